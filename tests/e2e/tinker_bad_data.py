"""Forwards, forward_backwards and steps that cannot be, each with the words that its refusal must hold.

Each is made from what the bad-input tests have open, and goes to its model under the number that is next there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.e2e.tinker_wire import Model, backward, datum, forward, tensor, text

LIMIT = 1 << 25
"""Bytes that a body may have."""
MANY = 1_000_000


@dataclass(frozen=True)
class Scene:
    """`model` is the client's own, `sampler` a sampling session of the base; `next_sample` is its next number."""

    model: Model
    sampler: str
    next_sample: int


Body = Mapping[str, Any] | str | bytes
Case = tuple[str, Callable[[Scene], Body], tuple[str, ...]]


def changed(**inputs: Any) -> dict[str, Any]:
    """A datum of three tokens with other inputs of its loss."""
    good = datum(length=3)
    return {**good, "loss_fn_inputs": {**good["loss_fn_inputs"], **inputs}}


def on_tokens(model_input: Any) -> dict[str, Any]:
    return {**datum(length=3), "model_input": model_input}


def asked(*data: Mapping[str, Any], loss: str = "cross_entropy", **more: Any) -> Callable[[Scene], Body]:
    return lambda scene: scene.model.body(backward(*data, loss=loss, **more))


def written(*data: Mapping[str, Any], **numbers: str) -> Callable[[Scene], Body]:
    """As JSON text in which each `<name>` is what only text can hold."""

    def body(scene: Scene) -> Body:
        made = json.dumps(scene.model.body(backward(*data)))
        for name, value in numbers.items():
            made = made.replace(f'"<{name}>"', value)
        return made

    return body


def to_model(content: Mapping[str, Any]) -> Callable[[Scene], Body]:
    return lambda scene: scene.model.body(content)


WEIGHTS = [1.0, 1.0, 1.0]
RATIO = {"target_tokens": tensor([1, 2, 3]), "logprobs": tensor([-1e30] * 3, "float32")}
SAMPLED = {**RATIO, "advantages": tensor(WEIGHTS, "float32")}

DATA: dict[str, Case] = {
    "no data": ("forward_backward", asked(), ("data", "there is none")),
    "no data to go forward with": ("forward", to_model(forward()), ("data", "there is none")),
    "no tokens": ("forward_backward", asked(on_tokens(text([]))), ("data[0].model_input", "no token")),
    "no chunks": ("forward_backward", asked(on_tokens({})), ("data[0].model_input.chunks", "a list is needed")),
    "an image": (
        "forward_backward",
        asked(on_tokens({"chunks": [{"type": "image", "data": "", "format": "png"}]})),
        ("data[0].model_input.chunks[0]", "image", "encoded_text"),
    ),
    "tokens of words": (
        "forward_backward",
        asked(on_tokens(text(["one"]))),  # type: ignore[list-item]
        ("data[0].model_input.chunks[0].tokens", "whole numbers"),
    ),
    "a token below 0": ("forward_backward", asked(on_tokens(text([5, -1, 5]))), ("data[0].model_input", "-1")),
    "a token outside the vocabulary": (
        "forward_backward",
        asked(datum(), on_tokens(text([5, 49_152, 5]))),
        ("row 1", "49152", "vocabulary of 49152"),
    ),
    "a target outside the vocabulary": (
        "forward_backward",
        asked(changed(target_tokens=tensor([1, 2, 60_000]))),
        ("row 0", "60000", "vocabulary of 49152"),
    ),
    "a target of 40 bits": (
        "forward_backward",
        asked(changed(target_tokens=tensor([1, 2, 2**40]))),
        ("data[0].loss_fn_inputs.target_tokens", str(2**40)),
    ),
    "more tokens than the context": (
        "forward_backward",
        asked(datum(length=1500)),
        ("row 0", "1500 tokens", "1024"),
    ),
    "targets longer than inputs": (
        "forward_backward",
        asked(changed(target_tokens=tensor([1, 2, 3, 4]), weights=tensor([*WEIGHTS, 1.0], "float32"))),
        ("data[0]", "4 targets are more than 3 input tokens"),
    ),
    "no targets": (
        "forward_backward",
        asked({**datum(), "loss_fn_inputs": {}}),
        ("data[0].loss_fn_inputs", "cross_entropy needs target_tokens"),
    ),
    "weights NaN": (
        "forward_backward",
        written(changed(weights=tensor([1.0, 1.0, "<bad>"], "float32")), bad="NaN"),  # type: ignore[list-item]
        ("data[0].loss_fn_inputs.weights", "finite"),
    ),
    "weights of 1e999": (
        "forward_backward",
        written(changed(weights=tensor([1.0, 1.0, "<bad>"], "float32")), bad="1e999"),  # type: ignore[list-item]
        ("data[0].loss_fn_inputs.weights", "finite"),
    ),
    "weights that float32 cannot hold": (
        "forward_backward",
        asked(changed(weights=tensor([1.0, 1.0, 1e39], "float32"))),
        ("data[0].loss_fn_inputs.weights", "finite"),
    ),
    "weights of whole numbers": (
        "forward_backward",
        asked(changed(weights=tensor([1, 1, 1]))),
        ("data[0].loss_fn_inputs.weights", "int64", "must be float32"),
    ),
    "an unknown dtype": (
        "forward_backward",
        asked(changed(weights=tensor(WEIGHTS, "float16"))),
        ("data[0].loss_fn_inputs.weights", "float16", "int64 and float32 are"),
    ),
    "targets that are fractions": (
        "forward_backward",
        asked(changed(target_tokens=tensor([1.5, 2, 3]))),
        ("data[0].loss_fn_inputs.target_tokens", "whole numbers"),
    ),
    "a shape of more values": (
        "forward_backward",
        asked(changed(weights=tensor(WEIGHTS, "float32", shape=[2, 2]))),
        ("data[0].loss_fn_inputs.weights", "needs 4 values, 3 came"),
    ),
    "weights of another shape": (
        "forward_backward",
        asked(changed(weights=tensor([1.0, 1.0], "float32"))),
        ("data[0].loss_fn_inputs.weights", "[2]", "[3]"),
    ),
    "three dimensions": (
        "forward_backward",
        asked(changed(weights=tensor(WEIGHTS, "float32", shape=[1, 3, 1]))),
        ("data[0].loss_fn_inputs.weights", "one or two dimensions"),
    ),
    "an unknown loss": (
        "forward_backward",
        asked(datum(), loss="stable_reinforce"),
        ("stable_reinforce", "known are cross_entropy"),
    ),
    "an unknown input": (
        "forward_backward",
        asked(changed(temperature=tensor(WEIGHTS, "float32"))),
        ("data[0].loss_fn_inputs", "temperature", "its inputs are"),
    ),
    "an unknown setting": (
        "forward_backward",
        asked(datum(), loss_fn_config={"epsilon": 0.1}),
        ("loss_fn_config", "epsilon", "its settings are"),
    ),
    "dro without beta": (
        "forward_backward",
        asked({**datum(length=3), "loss_fn_inputs": SAMPLED}, loss="dro"),
        ("loss_fn_config", "dro needs beta"),
    ),
    "a ratio beyond float32": (
        "forward_backward",
        asked({**datum(length=3), "loss_fn_inputs": SAMPLED}, loss="importance_sampling"),
        ("row 0", "loss is"),
    ),
    "a field that there is none of": (
        "forward_backward",
        lambda scene: scene.model.body({**backward(datum()), "datums": []}),
        ("datums", "its fields are"),
    ),
    "no JSON": ("forward_backward", lambda scene: '{"model_id": ', ("not JSON",)),
    "JSON without end": ("forward_backward", lambda scene: "[" * 200_000, ("not JSON",)),
    "JSON that is no object": ("forward_backward", lambda scene: "[]", ("an object is needed",)),
    "NaN for a learning rate": (
        "optim_step",
        lambda scene: json.dumps(scene.model.body({"adam_params": {"learning_rate": float("nan")}})),
        ("learning_rate",),
    ),
    "a learning rate below 0": ("optim_step", to_model({"adam_params": {"learning_rate": -1.0}}), ("learning_rate",)),
    "no gradients": ("optim_step", to_model({"adam_params": {}}), ("needs a forward_backward before it",)),
    "another optimizer": (
        "optim_step",
        to_model({"optimizer_params": {"type": "muon"}}),
        ("muon", "not supported", "adam_params"),
    ),
    "10^6 data in JSON": (
        "forward_backward",
        lambda scene: json.dumps(scene.model.body(backward(*[{"model_input": 0}] * MANY))),
        ("more than 4096 data",),
    ),
    "more bytes than are taken": ("forward_backward", lambda scene: " " * (LIMIT + 1), (f"more than {LIMIT} bytes",)),
}
