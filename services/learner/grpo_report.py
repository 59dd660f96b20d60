"""What a GRPO step reports: the record's rewards and lengths, and how far the policy, the sampler and the
reference are apart.

Invariant: nothing here changes a step; a metric of the sampler's mismatch is measured against lp_old.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import chain, compress

import torch

from services.learner.datum import Datum
from services.learner.losses import LOSSES, Config, Rows
from services.learner.policy_losses import grpo_held
from shared.errors import Fatal
from shared.rl.record import RolloutRecord


def record_metrics(record: RolloutRecord, kept: int, advantages: Sequence[float]) -> dict[str, float]:
    """Of every trajectory of the record (`reward_std` with ddof 1); `advantages` are of those that take part.

    Raises Fatal for a record without trajectories."""
    trajectories = list(chain.from_iterable(group.trajectories for group in record.groups))
    if not trajectories:
        raise Fatal(f"the rollout record of step {record.step} has no trajectories")
    rewards = [t.reward for t in trajectories]
    lengths = [len(t.token_ids) for t in trajectories]
    return {
        "reward_mean": math.fsum(rewards) / len(rewards),
        "reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "completion_tokens_mean": sum(lengths) / len(lengths),
        "completion_tokens_max": float(max(lengths)),
        "truncated_share": sum(t.finish_reason == "length" for t in trajectories) / len(trajectories),
        "kept_groups": float(kept),
        "dropped_groups": float(len(record.groups) - kept),
        "advantage_abs_mean": math.fsum(map(abs, advantages)) / len(advantages) if advantages else 0.0,
    }


def step_metrics(config: Config, rows: Sequence[Datum], logprobs: Sequence[Sequence[float]]) -> dict[str, float]:
    """The mismatch; `clip_share`, the share of tokens that the clip holds; and `kl`, the mean of
    k3 = e^d − d − 1, d = lp_ref − lp, where the rows bring the reference's logprobs."""
    old = [datum.inputs.get("old_logprobs", row) for datum, row in zip(rows, logprobs, strict=True)]
    metrics = mismatch(rows, old) | {"clip_share": _clip_share(config, rows, logprobs)}
    if "ref_logprobs" in rows[0].inputs:
        metrics["kl"] = _mean_k3(rows, logprobs)
    return metrics


def mismatch(rows: Sequence[Datum], old: Sequence[Sequence[float]]) -> dict[str, float]:
    """How far the learner's lp_old is from the sampler's q on the tokens that were sampled.

    mean and max |lp_old − q|; the mean of w = exp(lp_old − q), 1 in expectation when both compute one
    distribution; and the effective sample size (Σw)²/(n·Σw²), 1 at best."""
    differences = [
        lp - q
        for datum, row in zip(rows, old, strict=True)
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


def _clip_share(config: Config, rows: Sequence[Datum], logprobs: Sequence[Sequence[float]]) -> float:
    def flat(arrays: Sequence[Sequence[float]]) -> torch.Tensor:
        taken = (compress(array, datum.mask) for array, datum in zip(arrays, rows, strict=True))
        return torch.tensor(list(chain.from_iterable(taken)), dtype=torch.float64)

    inputs = {name: flat([datum.inputs[name] for datum in rows]) for name in rows[0].inputs}
    row = torch.tensor([i for i, datum in enumerate(rows) for _ in range(datum.weighed)], dtype=torch.long)
    structure = Rows(row, len(rows), torch.empty((0, 2), dtype=torch.long))
    held = grpo_held(flat(logprobs), inputs, {**LOSSES["grpo"].defaults, **config}, structure)
    return float(held.double().mean())


def _mean_k3(rows: Sequence[Datum], logprobs: Sequence[Sequence[float]]) -> float:
    distances = [
        ref - lp
        for datum, row in zip(rows, logprobs, strict=True)
        for lp, ref in zip(compress(row, datum.mask), compress(datum.inputs["ref_logprobs"], datum.mask), strict=True)
    ]
    return math.fsum(math.expm1(min(d, 50.0)) - d for d in distances) / len(distances)
