"""`loss:sum` of each loss is what numpy makes, in float64, of the logprobs that came with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from shared.operations.payload import AdamPayload, Array, Row
from tests.e2e import plain_models as plain
from tests.e2e.tinker_json import Model, Wire
from tests.stacks import StackProcess
from tests.tiny import TINY_NAME

Inputs = Mapping[str, Array]
Config = Mapping[str, float]
Terms = Callable[[Array, Inputs, Config], Array]


@dataclass(frozen=True)
class Case:
    """`more`: inputs beside those that every sampled row has. `clips`: to be seen by what comes without a clip."""

    loss: str
    config: dict[str, float] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    clips: bool = False


def importance_sampling(lp: Array, inputs: Inputs, config: Config) -> Array:
    return -np.exp(lp - inputs["logprobs"]) * inputs["advantages"]


def ppo(lp: Array, inputs: Inputs, config: Config) -> Array:
    return _clipped(np.exp(lp - inputs["logprobs"]), inputs, config)


def cispo(lp: Array, inputs: Inputs, config: Config) -> Array:
    low, high = _bounds(inputs, config, 0.0, 4.0)
    return -np.clip(np.exp(lp - inputs["logprobs"]), low, high) * lp * inputs["advantages"]


def dro(lp: Array, inputs: Inputs, config: Config) -> Array:
    return -(lp * inputs["advantages"] - 0.5 * config["beta"] * (lp - inputs["logprobs"]) ** 2)


def gspo(lp: Array, inputs: Inputs, config: Config) -> Array:
    counted = inputs.get("sequence_ratio_mask", np.ones_like(lp)) != 0
    ratio = np.exp((lp - inputs["logprobs"])[counted].mean())
    return np.where(counted, _clipped(np.full_like(lp, ratio), inputs, config), 0.0)


def _clipped(ratio: Array, inputs: Inputs, config: Config) -> Array:
    low, high = _bounds(inputs, config, 0.8, 1.2)
    return -np.minimum(ratio * inputs["advantages"], np.clip(ratio, low, high) * inputs["advantages"])


def _bounds(inputs: Inputs, config: Config, low: float, high: float) -> tuple[Array, Array]:
    found = []
    for name, default in (("clip_low_threshold", low), ("clip_high_threshold", high)):
        found.append(inputs[name] if name in inputs else np.asarray(config.get(name, default)))
    return found[0], found[1]


TERMS: dict[str, Terms] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
OWN = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}
PER_TOKEN = ("clip_low_threshold", "clip_high_threshold")
CASES = (
    Case("importance_sampling"),
    Case("ppo", clips=True),
    Case("ppo", OWN, clips=True),
    Case("ppo", more=PER_TOKEN, clips=True),
    Case("cispo"),
    Case("cispo", OWN, clips=True),
    Case("cispo", more=PER_TOKEN, clips=True),
    Case("dro", {"beta": 0.3}),
    Case("gspo", clips=True),
    Case("gspo", OWN, ("sequence_ratio_mask",), clips=True),
    Case("gspo", more=(*PER_TOKEN, "sequence_ratio_mask"), clips=True),
)


@pytest.fixture(scope="module")
def model(shared_stack: StackProcess) -> Iterator[Model]:
    """Trained, so that its adapter has a say."""
    with Wire(shared_stack.url, TINY_NAME) as wire:
        found = wire.model(rank=4)
        found.forward_backward(plain.rows(1))
        found.optim_step(AdamPayload(learning_rate=5e-3))
        yield found


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join((case.loss, *case.config, *case.more)))
def test_the_sum_of_a_loss_is_that_of_numpy(model: Model, case: Case) -> None:
    rows = sampled_rows(model, case.more)
    forward = model.forward(rows, case.loss, **case.config)
    backward = model.forward_backward(rows, case.loss, **case.config)
    for ours, theirs in zip(forward.logprobs, backward.logprobs, strict=True):
        assert np.array_equal(ours, theirs)
    terms = _terms(TERMS[case.loss], rows, forward.logprobs, case.config)
    tolerance = 1e-5 * float(np.abs(terms).sum())
    for found in (forward.loss, backward.loss):
        assert found == pytest.approx(float(terms.sum()), abs=tolerance)
    if case.clips:
        wide = [Row(row.tokens, {k: v for k, v in row.inputs.items() if k not in PER_TOKEN}) for row in rows]
        unbounded = {"clip_low_threshold": 0.0, "clip_high_threshold": np.inf}
        free = _terms(TERMS[case.loss], wide, forward.logprobs, unbounded)
        assert abs(float(free.sum() - terms.sum())) > 100 * tolerance


def test_the_sum_of_cross_entropy_is_that_of_numpy(model: Model) -> None:
    """With weights of 0, of fractions and below 0."""
    generator = np.random.default_rng(5)
    rows = [
        Row(row.tokens, row.inputs | {"weights": generator.choice([0, 1, 0.3, -0.7], len(row.tokens)).astype("f4")})
        for row in plain.rows(6)
    ]
    forward, backward = model.forward(rows), model.forward_backward(rows)
    terms = np.concatenate(
        [-row.inputs["weights"].astype(float) * lp for row, lp in zip(rows, forward.logprobs, strict=True)]
    )
    for found in (forward, backward):
        assert found.loss == pytest.approx(float(terms.sum()), abs=1e-5 * float(np.abs(terms).sum()))
    for ours, theirs in zip(forward.logprobs, backward.logprobs, strict=True):
        assert np.array_equal(ours, theirs)


def sampled_rows(model: Model, more: Sequence[str]) -> list[Row]:
    """As if a sampler near the model had drawn them: ratios around 1, each row's more or less than that."""
    generator = np.random.default_rng(8)
    known = model.forward(plain.rows(4)).logprobs
    made = []
    for shift, row, lp in zip((-0.5, 0.0, 0.3, 0.6), plain.rows(4), known, strict=True):
        inputs = {
            "target_tokens": row.inputs["target_tokens"],
            "logprobs": lp + shift + generator.normal(0.0, 0.4, len(lp)),
            "advantages": generator.normal(0.3, 1.0, len(lp)),
        }
        given = {
            "clip_low_threshold": generator.uniform(0.5, 0.95, len(lp)),
            "clip_high_threshold": generator.uniform(1.05, 1.5, len(lp)),
            "sequence_ratio_mask": generator.choice([0.0, 1.0, 1.0], len(lp)),
        }
        inputs |= {name: given[name] for name in more}
        made.append(Row(row.tokens, {k: v if v.dtype.kind == "i" else v.astype("f4") for k, v in inputs.items()}))
    return made


def _terms(loss: Terms, rows: Sequence[Row], logprobs: Sequence[Array], config: Config) -> Array:
    """Of all tokens of all rows."""
    doubled = [{name: values.astype(np.float64) for name, values in row.inputs.items()} for row in rows]
    return np.concatenate([loss(lp, inputs, config) for lp, inputs in zip(logprobs, doubled, strict=True)])
