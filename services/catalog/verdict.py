"""What scores decide: whether the training is over early, which revision stands for the run, whether it
passes the gate.

Pure; scores come by step. Invariant: a reason to stop that holds goes on to hold, whatever the run's last
evaluation says, so that a run which was ended is not begun again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.catalog.goal import Goal, scores_step

MAX_SKIPPED = 10


def stop_reason(goal: Goal, scores: Mapping[int, float], tokens: int) -> str | None:
    """Why no step should follow, in words; None = train on."""
    on_the_way = [(step, scores[step]) for step in sorted(scores) if scores_step(goal, step)]
    return _target(goal, on_the_way) or _no_progress(goal, on_the_way) or _budget(goal, tokens)


def _target(goal: Goal, scored: list[tuple[int, float]]) -> str | None:
    target = goal.target_score
    if target is None:
        return None
    reached = next((score for _, score in scored if score >= target), None)
    return None if reached is None else f"score {reached:.4g} reached target_score {target:.4g}"


def _no_progress(goal: Goal, scored: list[tuple[int, float]]) -> str | None:
    """Looked at with each evaluation, since nothing is known in between. An equal score is no progress."""
    if goal.no_progress_steps is None or not scored:
        return None
    best_step, best = scored[0]
    for step, score in scored[1:]:
        if score > best:
            best_step, best = step, score
        elif step - best_step >= goal.no_progress_steps:
            return (
                f"no evaluation in {step - best_step} steps was above the {best:.4g} of step {best_step} "
                f"(no_progress_steps is {goal.no_progress_steps})"
            )
    return None


def _budget(goal: Goal, tokens: int) -> str | None:
    if goal.max_tokens is None or tokens < goal.max_tokens:
        return None
    return f"{tokens} tokens were sampled and trained on, max_tokens is {goal.max_tokens}"


def skip_limit(goal: Goal) -> int:
    """Skipped steps in a row that fail a run: never fewer than two records get, since one record without a
    signal is chance."""
    return max(MAX_SKIPPED, 2 * goal.steps_per_record)


def skipped_reason(goal: Goal, skipped: int, done: int) -> str | None:
    """Why a run of which nothing is learned any more fails; None = it goes on."""
    if skipped < skip_limit(goal):
        return None
    why = "no row was left to learn from; see whether the rows fit max_length"
    if goal.samples:
        why = (
            "every group had equal rewards (or, with mask_overlong, completions that were all cut at max_tokens), "
            "so there was nothing to learn from; use a task that is neither too hard nor solved already, a larger "
            "group_size or a higher temperature"
        )
    return f"{skipped} optimizer steps in a row were skipped, up to step {done}: {why}"


@dataclass(frozen=True)
class Pick:
    """The step whose revision stands for the run. `of`: among how many scores it is the best; 0 = it is
    the last one, whatever its score."""

    step: int
    score: float | None
    of: int = 0


def pick(goal: Goal, last: int, scores: Mapping[int, float]) -> Pick:
    """The later one of two equal scores."""
    if goal.promote == "last" or not scores:
        return Pick(last, scores.get(last))
    step = max(scores, key=lambda at: (scores[at], at))
    return Pick(step, scores[step], len(scores))


def shortfall(goal: Goal, picked: Pick, name: str, reference: float | None, reference_name: str) -> str | None:
    """What the pick, called `name`, lacks to be promoted."""
    score = picked.score
    if score is None:
        return None
    whose = f" of {name} (the best of {picked.of} scores)" if picked.of else ""
    if goal.at_least is not None and score < goal.at_least:
        return f"score {score:.4g}{whose} is below at_least {goal.at_least:.4g}"
    if goal.no_worse_than is not None and reference is not None and score < reference:
        return f"score {score:.4g}{whose} is below {reference_name}'s {reference:.4g}"
    return None
