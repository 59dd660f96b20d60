"""GRPO as rows: a rollout record in, datums with group-relative advantages out; and the mismatch watch.

Invariant: what a row's tokens weigh is fixed from the whole record, after the groups that teach nothing
are gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, compress

from mint_schemas.training import Grpo

from services.learner.datum import Datum
from services.learner.losses import trajectory_coefficients
from services.learner.recipe import StepRows
from services.learner.trainer import LossCall
from shared.errors import Fatal
from shared.rl.advantages import group_advantages, is_degenerate
from shared.rl.record import Group, RolloutRecord, Trajectory


def grpo_rows(record: RolloutRecord, method: Grpo) -> StepRows:
    """One datum per trajectory of each group with differing rewards (arXiv:2402.03300).

    The loss is `grpo` at the record's temperature, with lp_old = sg(lp): one optimizer step per record.
    Raises Fatal naming the prompt for a group that is no group or a trajectory that is not whole."""
    if record.temperature <= 0:
        raise Fatal(f"the record was sampled at temperature {record.temperature}; training needs more than 0")
    kept: list[tuple[Group, Trajectory, float]] = []
    dropped = 0
    for group in record.groups:
        advantages = _advantages(group)
        if is_degenerate([trajectory.reward for trajectory in group.trajectories]):
            dropped += 1
            continue
        kept += [(group, t, a) for t, a in zip(group.trajectories, advantages, strict=True)]
    lengths = [len(trajectory.token_ids) for _, trajectory, _ in kept]
    weights = trajectory_coefficients(lengths, method.loss_aggregation, record.max_tokens)
    data = [
        _datum(group, trajectory, advantage, weight)
        for (group, trajectory, advantage), weight in zip(kept, weights, strict=True)
        if trajectory.token_ids
    ]
    call = LossCall("grpo", {"clip_low": method.clip_low, "clip_high": method.clip_high}, record.temperature)
    return StepRows(data, call, _record_metrics(record, dropped))


def _advantages(group: Group) -> list[float]:
    for index, trajectory in enumerate(group.trajectories):
        if len(trajectory.logprobs) != len(trajectory.token_ids):
            raise Fatal(
                f"prompt {group.prompt_id}, trajectory {index}: {len(trajectory.token_ids)} tokens but "
                f"{len(trajectory.logprobs)} logprobs"
            )
    if not group.prompt_ids:
        raise Fatal(f"prompt {group.prompt_id} has no tokens")
    try:
        return group_advantages([trajectory.reward for trajectory in group.trajectories])
    except ValueError as error:
        raise Fatal(f"prompt {group.prompt_id}: {error}") from error


def _datum(group: Group, trajectory: Trajectory, advantage: float, weight: float) -> Datum:
    prompt, completion = group.prompt_ids, trajectory.token_ids
    before = len(prompt) - 1
    ids = prompt + completion
    nothing = (0.0,) * before
    return Datum(
        name=group.prompt_id,
        input_ids=ids[:-1],
        targets=ids[1:],
        mask=(False,) * before + (True,) * len(completion),
        inputs={
            "advantages": nothing + (advantage,) * len(completion),
            "logprobs": nothing + trajectory.logprobs,
        },
        coefficients=nothing + (weight,) * len(completion),
    )


def _record_metrics(record: RolloutRecord, dropped: int) -> dict[str, float]:
    trajectories = list(chain.from_iterable(group.trajectories for group in record.groups))
    if not trajectories:
        raise Fatal(f"the rollout record of step {record.step} has no trajectories")
    return {
        "reward_mean": math.fsum(t.reward for t in trajectories) / len(trajectories),
        "completion_tokens_mean": sum(len(t.token_ids) for t in trajectories) / len(trajectories),
        "kept_groups": float(len(record.groups) - dropped),
        "dropped_groups": float(dropped),
    }


def mismatch(data: Sequence[Datum], logprobs: Sequence[Sequence[float]]) -> dict[str, float]:
    """How far the learner's lp is from the sampler's q on the tokens that were sampled.

    mean and max |lp − q|; the mean of w = exp(lp − q), 1 in expectation when both compute one
    distribution; and the effective sample size (Σw)²/(n·Σw²), 1 at best."""
    differences = [
        lp - q
        for datum, row in zip(data, logprobs, strict=True)
        for lp, q in zip(compress(row, datum.mask), compress(datum.inputs["logprobs"], datum.mask), strict=True)
    ]
    count = len(differences)
    ratios = [math.exp(min(difference, 50.0)) for difference in differences]
    return {
        "mismatch_mean": math.fsum(abs(d) for d in differences) / count,
        "mismatch_max": max(abs(d) for d in differences),
        "ratio_mean": math.fsum(ratios) / count,
        "effective_sample_size": math.fsum(ratios) ** 2 / (count * math.fsum(r * r for r in ratios)),
    }
