"""A PEFT adapter made elsewhere is sampled from as PEFT has it, and trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.adapters.layout import CONFIG_FILE
from shared.bases import DENSE_TARGETS, Base, load_bases
from shared.operations.payload import AdamPayload
from tests.e2e import plain_models as plain
from tests.e2e.tinker_json import Model, Wire
from tests.stacks import StackProcess
from tests.tiny import TINY_NAME

EXACT = 1e-4


@pytest.fixture(scope="module")
def wire(shared_stack: StackProcess) -> Iterator[Wire]:
    with Wire(shared_stack.url, TINY_NAME) as wire:
        yield wire


@pytest.fixture(scope="module")
def base(bases: Path) -> Base:
    return load_bases(bases)[TINY_NAME]


def test_an_adapter_made_by_peft_is_sampled_from_and_loaded_into_a_model(
    wire: Wire, base: Base, tmp_path: Path
) -> None:
    """Of the shape that models here have."""
    made = plain.make_adapter(base.directory, tmp_path / "peft", 1, r=4, lora_alpha=32, target_modules=[*DENSE_TARGETS])
    path = wire.import_adapter(made, "foreign")["path"]
    check_sampler(wire, base, path, made)
    model = wire.model(rank=4)
    model.load_weights(path)
    check_trained_on(wire, base, model, made, tmp_path / "trained")


def test_an_adapter_of_another_shape_begins_a_model_of_its_own(wire: Wire, base: Base, tmp_path: Path) -> None:
    """Its alpha and its rsLoRA stay what they are."""
    shape = {"r": 3, "lora_alpha": 12, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}
    made = plain.make_adapter(base.directory, tmp_path / "peft", 2, **shape)
    found = wire.import_adapter(made, "foreign-shape")
    assert (found["lora"]["rank"], found["lora"]["alpha"], found["lora"]["use_rslora"]) == (3, 12.0, True)
    check_sampler(wire, base, found["path"], made)
    archive = check_trained_on(wire, base, wire.model_from(found["path"]), made, tmp_path / "trained")
    config = json.loads((archive / CONFIG_FILE).read_bytes())
    assert {name: config[name] for name in shape} == shape


def check_sampler(wire: Wire, base: Base, path: str, made: Path) -> None:
    """Its logprobs are PEFT's, and not the base's."""
    (row,) = plain.rows(4, lengths=(21,))
    ours = wire.sampler(path).logprobs([int(row.tokens[0]), *row.inputs["target_tokens"].tolist()])
    (peft,), (without,) = plain.logprobs(base.directory, [row], made), plain.logprobs(base.directory, [row])
    assert np.abs(ours - peft).max() <= EXACT
    assert np.abs(peft - without).max() > 100 * EXACT


def check_trained_on(wire: Wire, base: Base, model: Model, made: Path, directory: Path) -> Path:
    """Training begins at the adapter, lowers its loss, and what comes of it is PEFT's too; its archive, unpacked."""
    data = plain.rows(5)
    before = model.forward_backward(data)
    for ours, theirs in zip(before.logprobs, plain.logprobs(base.directory, data, made), strict=True):
        assert np.abs(ours - theirs).max() <= EXACT
    model.optim_step(AdamPayload(learning_rate=1e-3))
    after = model.forward(data)
    assert after.loss < before.loss
    archive = wire.unpack(model.save_for_sampler("trained"), directory)
    for ours, theirs in zip(after.logprobs, plain.logprobs(base.directory, data, archive), strict=True):
        assert np.abs(ours - theirs).max() <= EXACT
    return archive
