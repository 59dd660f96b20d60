"""What `forward` and samplers say of a trained model in fp32 is what plain PEFT says with the model's archive."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.adapters.layout import CONFIG_FILE, TENSOR_FILE
from shared.adapters.peft_dir import COMPLETE_FILE
from shared.bases import Base, load_bases
from shared.operations.payload import AdamPayload
from tests.contract.engine_rig import peft_greedy
from tests.e2e import plain_models as plain
from tests.e2e.tinker_json import Model, Wire
from tests.stacks import StackProcess
from tests.tiny import TINY_NAME

EXACT = 1e-4
SHAPES: dict[str, dict[str, Any]] = {
    "rank-16": {"rank": 16},
    "rank-2-attention": {"rank": 2, "train_mlp": False},
    "rank-5-mlp": {"rank": 5, "train_attn": False},
}


@dataclass(frozen=True)
class Trained:
    """`archive`: of the saved sampler weights, unpacked; `path` is theirs."""

    model: Model
    rank: int
    path: str
    archive: Path


@pytest.fixture(scope="module")
def wire(shared_stack: StackProcess) -> Iterator[Wire]:
    with Wire(shared_stack.url, TINY_NAME) as wire:
        yield wire


@pytest.fixture(scope="module")
def base(bases: Path) -> Base:
    return load_bases(bases)[TINY_NAME]


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES.keys())
def trained(request: pytest.FixtureRequest, wire: Wire, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    model = wire.model(**request.param)
    for seed in (1, 2):
        model.forward_backward(plain.rows(seed))
        model.optim_step(AdamPayload(learning_rate=5e-3))
    path = model.save_for_sampler("numbers")
    archive = wire.unpack(path, tmp_path_factory.mktemp("archive"))
    return Trained(model, request.param["rank"], path, archive)


def test_forward_of_a_new_model_has_the_logprobs_of_the_base(wire: Wire, base: Base) -> None:
    data = plain.rows(3)
    for ours, theirs in zip(
        wire.model(rank=4).forward(data).logprobs, plain.logprobs(base.directory, data), strict=True
    ):
        assert np.abs(ours - theirs).max() <= EXACT


def test_forward_of_a_trained_model_has_the_logprobs_of_plain_peft(trained: Trained, base: Base) -> None:
    """They are others than the base's, by far more than the tolerance."""
    data = plain.rows(4)
    ours = trained.model.forward(data)
    peft = plain.logprobs(base.directory, data, trained.archive)
    assert [len(values) for values in ours.logprobs] == [len(row.tokens) for row in data]
    for mine, theirs in zip(ours.logprobs, peft, strict=True):
        assert np.abs(mine - theirs).max() <= EXACT
    assert ours.loss == pytest.approx(-sum(float(values.sum()) for values in peft), rel=1e-5)
    untrained = plain.logprobs(base.directory, data)
    assert max(np.abs(a - b).max() for a, b in zip(peft, untrained, strict=True)) > 100 * EXACT


def test_compute_logprobs_of_the_sampler_equals_forward_of_the_trainer(trained: Trained, wire: Wire) -> None:
    """trl#4159: raw logprobs against scaled ones; both are at temperature 1."""
    sampler = wire.sampler(trained.path)
    for row in plain.rows(5, lengths=(2, 13, 40)):
        (forward,) = trained.model.forward([row]).logprobs
        tokens = [int(row.tokens[0]), *row.inputs["target_tokens"].tolist()]
        assert np.abs(sampler.logprobs(tokens) - forward).max() <= EXACT


def test_what_is_sampled_has_the_logprobs_of_plain_peft(trained: Trained, wire: Wire, base: Base) -> None:
    prompt = plain.rows(6, lengths=(7,))[0].tokens.tolist()
    drawn = wire.sampler(trained.path).draw(prompt, 12, prompt_logprobs=True, seed=3, stop=[])
    (tokens,), (sampled,) = drawn.tokens, drawn.logprobs
    (peft,) = plain.logprobs(base.directory, [plain.row_of([*prompt, *tokens])], trained.archive)
    assert len(tokens) == 12
    assert np.abs(np.concatenate([drawn.prompt_logprobs, sampled]) - peft).max() <= EXACT


def test_greedy_tokens_are_those_of_plain_peft(trained: Trained, wire: Wire, base: Base) -> None:
    prompts = [tuple(row.tokens.tolist()) for row in plain.rows(7, lengths=(3, 8))]
    sampler = wire.sampler(trained.path)
    ours = [sampler.greedy(prompt, 8).tokens[0] for prompt in prompts]
    assert ours == peft_greedy(base, trained.archive, prompts, 8)


def test_alpha_is_32_whatever_the_rank(trained: Trained, base: Base, tmp_path: Path) -> None:
    """Another alpha in the same directory gives other logprobs, so that those above are proof of this one."""
    config = json.loads((trained.archive / CONFIG_FILE).read_bytes())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (trained.rank, 32, False)
    other = shutil.copytree(trained.archive, tmp_path / "other")
    (other / CONFIG_FILE).write_text(json.dumps(config | {"lora_alpha": 16}))
    data = plain.rows(4)
    pairs = zip(trained.model.forward(data).logprobs, plain.logprobs(base.directory, data, other), strict=True)
    assert max(np.abs(ours - theirs).max() for ours, theirs in pairs) > 100 * EXACT


def test_the_archive_of_saved_weights_is_that_of_the_sampler_weights(
    trained: Trained, wire: Wire, tmp_path: Path
) -> None:
    """One state, two ways to its PEFT directory."""
    weights = wire.unpack(trained.model.save_weights("numbers"), tmp_path)
    files = {CONFIG_FILE, TENSOR_FILE, COMPLETE_FILE}
    for directory in (weights, trained.archive):
        assert {file.name for file in directory.iterdir()} == files
    for name in files:
        assert (weights / name).read_bytes() == (trained.archive / name).read_bytes()
