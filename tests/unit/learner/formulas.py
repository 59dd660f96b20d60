"""The losses once more, written from their formulas in 50-digit arithmetic, token by token; and random
ragged masked batches to compare on.

Rows are lists of floats with a mask; a gradient is a central difference of width 1e-20, which is exact to
far more digits than a float64 has. `fixed` holds what sg(·) sees.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import compress

import mpmath
import torch

from services.learner.losses import Rows

NAMES = ("advantages", "logprobs", "old_logprobs", "ref_logprobs", "weights", "sequence_ratio_mask")


@dataclass
class Row:
    lp: list[float]
    mask: list[bool]
    c: list[float]
    inputs: dict[str, list[float]]

    def kept(self, values) -> list:
        return list(compress(values, self.mask))


def random_rows(seed: int, count: int = 6, names=NAMES, spread: float = 0.4) -> list[Row]:
    """`count` rows of 2 to 9 positions, one masked out at least in most; the masked ones hold nonsense."""
    rng = random.Random(seed)
    return [_random_row(rng, names, spread) for _ in range(count)]


def _random_row(rng: random.Random, names, spread: float) -> Row:
    length = rng.randint(2, 9)
    mask = [rng.random() < 0.7 for _ in range(length)]
    mask[rng.randrange(length)] = True
    lp = [-rng.expovariate(1) for _ in mask]
    drawn = {name: [_draw(rng, name, value, spread) for value in lp] for name in names}
    if "sequence_ratio_mask" in drawn:
        drawn["sequence_ratio_mask"][mask.index(True)] = 1.0
    for values in (lp, *drawn.values()):
        values[:] = [value if kept else 777.0 for value, kept in zip(values, mask, strict=True)]
    return Row(lp, mask, [rng.uniform(0.01, 1) if kept else 777.0 for kept in mask], drawn)


def _draw(rng: random.Random, name: str, lp: float, spread: float) -> float:
    if name.endswith("logprobs"):
        return lp + rng.gauss(0, spread)
    if name == "sequence_ratio_mask":
        return float(rng.random() < 0.6)
    if name == "clip_low_threshold":
        return rng.uniform(0.5, 0.9)
    if name == "clip_high_threshold":
        return rng.uniform(1.1, 1.5)
    return rng.gauss(0, 1)


def flatten(rows: list[Row], names, dtype=torch.float64):
    """(lp, inputs, c, structure) as a loss takes them; with pairs (0, 1), (2, 3), … for as many as there are."""

    def flat(arrays):
        values = [v for row, array in zip(rows, arrays, strict=True) for v in row.kept(array)]
        return torch.tensor(values, dtype=dtype)

    owner = torch.tensor([i for i, row in enumerate(rows) for _ in range(sum(row.mask))])
    pairs = torch.tensor([(i, i + 1) for i in range(0, len(rows) - 1, 2)])
    inputs = {name: flat([row.inputs[name] for row in rows]) for name in names}
    lp = flat([row.lp for row in rows]).requires_grad_()
    return lp, inputs, flat([row.c for row in rows]), Rows(owner, len(rows), pairs)


def reference(name: str, config: dict, rows: list[Row]) -> tuple[float, list[float]]:
    """(Σ c·ℓ, its gradient at each position that is not masked, row by row)."""
    with mpmath.workdps(50):
        units = [[a, b] for a, b in zip(rows[::2], rows[1::2], strict=True)] if name == "dpo" else [[r] for r in rows]
        total, gradient = mpmath.mpf(0), []
        for unit in units:
            fixed = [[mpmath.mpf(x) for x in row.kept(row.lp)] for row in unit]
            total += _unit(name, config, unit, fixed, fixed)
            gradient += _differences(name, config, unit, fixed)
        return float(total), gradient


def _differences(name, config, unit, fixed) -> list[float]:
    width, found = mpmath.mpf(10) ** -20, []
    for r, row in enumerate(fixed):
        for t in range(len(row)):
            sides = []
            for sign in (1, -1):
                moved = [list(values) for values in fixed]
                moved[r][t] += sign * width
                sides.append(_unit(name, config, unit, moved, fixed))
            found.append(float((sides[0] - sides[1]) / (2 * width)))
    return found


def _unit(name, config, unit, lp, fixed):
    if name == "dpo":
        return _dpo(config, unit, lp)
    (row,), (lp,), (fixed,) = unit, lp, fixed
    inputs = {key: [mpmath.mpf(x) for x in row.kept(values)] for key, values in row.inputs.items()}
    losses = FORMULAS[name](lp, fixed, inputs, config)
    return mpmath.fsum(c * loss for c, loss in zip(row.kept(row.c), losses, strict=True))


def _dpo(config, unit, lp):
    moved = []
    for row, values in zip(unit, lp, strict=True):
        moved.append(mpmath.fsum(x - y for x, y in zip(values, row.kept(row.inputs["ref_logprobs"]), strict=True)))
    # the loss of a pair stands at the first position of its chosen row
    return unit[0].kept(unit[0].c)[0] * mpmath.log(1 + mpmath.exp(-config.get("beta", 0.1) * (moved[0] - moved[1])))


def _clip(x, low, high):
    return min(max(x, low), high)


def _pessimist(ratio, a, low, high):
    return -min(ratio * a, _clip(ratio, low, high) * a)


def _ends(inputs, config, default, t):
    low, high = (inputs.get(f"clip_{side}_threshold") for side in ("low", "high"))
    return (
        low[t] if low else config.get("clip_low_threshold", default[0]),
        high[t] if high else config.get("clip_high_threshold", default[1]),
    )


def _cross_entropy(lp, fixed, i, config):
    return [-w * x for w, x in zip(i["weights"], lp, strict=True)]


def _importance_sampling(lp, fixed, i, config):
    return [-mpmath.exp(x - q) * a for x, q, a in zip(lp, i["logprobs"], i["advantages"], strict=True)]


def _ppo(lp, fixed, i, config):
    return [
        _pessimist(mpmath.exp(lp[t] - i["logprobs"][t]), i["advantages"][t], *_ends(i, config, (0.8, 1.2), t))
        for t in range(len(lp))
    ]


def _cispo(lp, fixed, i, config):
    return [
        -_clip(mpmath.exp(fixed[t] - i["logprobs"][t]), *_ends(i, config, (0.0, 4.0), t)) * lp[t] * i["advantages"][t]
        for t in range(len(lp))
    ]


def _dro(lp, fixed, i, config):
    return [
        -(x * a - mpmath.mpf(config["beta"]) / 2 * (x - q) ** 2)
        for x, q, a in zip(lp, i["logprobs"], i["advantages"], strict=True)
    ]


def _gspo(lp, fixed, i, config):
    counted = [t for t in range(len(lp)) if "sequence_ratio_mask" not in i or i["sequence_ratio_mask"][t]]
    s = mpmath.exp(mpmath.fsum(fixed[t] - i["logprobs"][t] for t in counted) / len(counted))
    return [
        _pessimist(s * mpmath.exp(lp[t] - fixed[t]), i["advantages"][t], *_ends(i, config, (0.8, 1.2), t))
        if t in counted
        else 0 * lp[t]
        for t in range(len(lp))
    ]


def _grpo(lp, fixed, i, config):
    old = i.get("old_logprobs", fixed)
    s = mpmath.exp(mpmath.fsum(x - o for x, o in zip(fixed, old, strict=True)) / len(lp))
    low, high = 1 - config.get("clip_low", 0.2), 1 + config.get("clip_high", 0.2)
    losses = []
    for t in range(len(lp)):
        ratio, a = mpmath.exp(lp[t] - old[t]), i["advantages"][t]
        if config.get("kl") == "k1":
            a -= config["kl_coefficient"] * (fixed[t] - i["ref_logprobs"][t])
        if config.get("objective") == "cispo":
            loss = -_clip(mpmath.exp(fixed[t] - old[t]), low, high) * lp[t] * a
        elif config.get("objective") == "gspo":
            loss = _pessimist(s * mpmath.exp(lp[t] - fixed[t]), a, low, high)
        else:
            loss = _pessimist(ratio, a, low, high)
        losses.append(loss * _weight(old[t], i, config, t) + _kl(lp[t], ratio, i, config, t))
    return losses


def _weight(old, i, config, t):
    if config.get("correction", "none") == "none":
        return 1
    w = mpmath.exp(old - i["logprobs"][t])
    if config["correction"] == "tis":
        return min(w, config.get("correction_cap", 2.0))
    return w if config.get("correction_low", 0.5) <= w <= config.get("correction_high", 5.0) else 0


def _kl(lp, ratio, i, config, t):
    if config.get("kl") not in ("k2", "k3"):
        return 0
    d = i["ref_logprobs"][t] - lp
    term = d**2 / 2 if config["kl"] == "k2" else mpmath.exp(d) - d - 1
    return config["kl_coefficient"] * term * (ratio if config.get("kl_times_ratio") and config["kl"] == "k3" else 1)


FORMULAS = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
    "grpo": _grpo,
}
