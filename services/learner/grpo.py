"""GRPO as rows: a rollout record in, one minibatch of it out as datums with group-relative advantages.

Invariant: what a row's tokens weigh is fixed from the whole minibatch, after the groups and trajectories
that take no part are gone; the minibatches of an epoch are a partition of what is left of the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mint_schemas.training import Grpo, IcePop, Tis

from services.learner.datum import Datum
from services.learner.grpo_report import record_metrics, step_metrics
from services.learner.losses import Config, trajectory_coefficients
from services.learner.recipe import StepRows
from services.learner.trainer import LossCall
from shared.errors import Fatal
from shared.rl.advantages import group_advantages, is_degenerate
from shared.rl.record import Group, RolloutRecord, Trajectory
from shared.tasks.permutation import Permutation

__all__ = ["grpo_config", "grpo_rows"]

OVERLONG = "length"


@dataclass(frozen=True)
class _Row:
    """`length`: how many of the trajectory's tokens take part, all or none."""

    name: str
    prompt: tuple[int, ...]
    trajectory: Trajectory
    advantage: float
    length: int


def grpo_rows(record: RolloutRecord, method: Grpo, epoch: int = 0, minibatch: int = 0, seed: int = 0) -> StepRows:
    """One datum per trajectory that takes part, of the groups of this minibatch (arXiv:2402.03300).

    A group takes part unless its rewards are all equal and `drop_zero_variance` is set; a trajectory unless
    it was cut and `mask_overlong` is set; it then has no token left, but still counts among the B of its
    minibatch and in its group's baseline. The groups left
    are dealt to the minibatches anew for each epoch, by (seed, record step, epoch); there may be fewer of
    them than minibatches. Raises Fatal naming the prompt for a group that is no group or a trajectory that
    is not whole."""
    if record.temperature <= 0:
        raise Fatal(f"the record was sampled at temperature {record.temperature}; training needs more than 0")
    groups = [rows for i, group in enumerate(record.groups) if (rows := _group_rows(i, group, method))]
    picked = _minibatch(len(groups), method.minibatches, minibatch, f"grpo|{seed}|{record.step}|{epoch}")
    rows = [row for i in picked for row in groups[i]]
    weights = trajectory_coefficients([row.length for row in rows], method.loss_aggregation, record.max_tokens)
    data = [_datum(row, weight) for row, weight in zip(rows, weights, strict=True) if row.length]
    whole = [_datum(row, None) for group in groups for row in group if row.length]
    config = grpo_config(method)
    return StepRows(
        data=data,
        call=LossCall("grpo", config, record.temperature),
        metrics=record_metrics(record, len(groups), [row.advantage for group in groups for row in group]),
        record=whole if method.steps_per_record > 1 else (),
        reference=method.kl is not None,
        report=partial(step_metrics, config),
    )


def grpo_config(method: Grpo) -> Config:
    """The method's options as the flat settings of the loss `grpo`."""
    config: dict[str, float | str] = {
        "objective": method.objective,
        "clip_low": method.clip_low,
        "clip_high": method.clip_high,
    }
    match method.correction:
        case Tis(cap=cap):
            config |= {"correction": "tis", "correction_cap": cap}
        case IcePop(low=low, high=high):
            config |= {"correction": "icepop", "correction_low": low, "correction_high": high}
    if method.kl is not None:
        config |= {
            "kl": method.kl.estimator,
            "kl_coefficient": method.kl.coefficient,
            "kl_times_ratio": float(method.kl.times_ratio),
        }
    return config


def _group_rows(index: int, group: Group, method: Grpo) -> list[_Row]:
    """What of the group takes part, in order; the group is checked whole, whether or not it does."""
    advantages = _advantages(group, method)
    rewards = [trajectory.reward for trajectory in group.trajectories]
    if method.drop_zero_variance and is_degenerate(rewards):
        return []
    rows = [
        # an item may be asked twice in a step, so the prompt's name alone would not name the row
        _Row(
            f"{group.prompt_id}, group {index}, trajectory {number}",
            group.prompt_ids,
            trajectory,
            advantage,
            0 if method.mask_overlong and trajectory.finish_reason == OVERLONG else len(trajectory.token_ids),
        )
        for number, (trajectory, advantage) in enumerate(zip(group.trajectories, advantages, strict=True))
    ]
    return rows if any(row.length for row in rows) else []


def _advantages(group: Group, method: Grpo) -> list[float]:
    for index, trajectory in enumerate(group.trajectories):
        if len(trajectory.logprobs) != len(trajectory.token_ids):
            raise Fatal(
                f"prompt {group.prompt_id}, trajectory {index}: {len(trajectory.token_ids)} tokens but "
                f"{len(trajectory.logprobs)} logprobs"
            )
    if not group.prompt_ids:
        raise Fatal(f"prompt {group.prompt_id} has no tokens")
    try:
        return group_advantages([trajectory.reward for trajectory in group.trajectories], method.advantage)
    except ValueError as error:
        raise Fatal(f"prompt {group.prompt_id}: {error}") from error


def _minibatch(size: int, count: int, number: int, key: str) -> Sequence[int]:
    """Which of `size` groups are in minibatch `number` of `count`, ascending; sizes differ by 1 at most, the
    first being the largest, so that the first is empty only where all are."""
    if not 0 <= number < count:
        raise Fatal(f"minibatch {number} of a record that has {count} (the first is 0)")
    shuffled = Permutation(size, key) if size else ()
    return sorted(shuffled[at] for at in range(number, size, count))


def _datum(row: _Row, weight: float | None) -> Datum:
    completion = row.trajectory.token_ids
    ids = row.prompt + completion
    nothing, count = (0.0,) * (len(row.prompt) - 1), len(completion)
    return Datum(
        name=row.name,
        input_ids=ids[:-1],
        targets=ids[1:],
        mask=(False,) * len(nothing) + (True,) * count,
        inputs={
            "advantages": nothing + (row.advantage,) * count,
            "logprobs": nothing + row.trajectory.logprobs,
        },
        coefficients=None if weight is None else nothing + (weight,) * count,
    )
