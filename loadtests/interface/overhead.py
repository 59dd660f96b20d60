"""What an operation costs that computes nothing, or next to nothing: from sending it to having its result.

On a tiny base model, so that what is measured is the way: the gateway stores it, the catalog orders it, the learner
takes it, commits, and the future answers. `create_model` is done when it is accepted; an optim_step without gradients
is taken by the learner and refused there; a forward of one row of 4 tokens is computed, and what that takes in process
is subtracted. Each client waits for its result before it sends the next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cli.demo.command import mint
from loadtests.interface.wire import Wire
from loadtests.learning.stack import Stack
from loadtests.population.client import median, percentile
from loadtests.population.rig import Rows, Run
from services.learner.base_model import ResidentBase
from services.learner.datum import Datum
from services.learner.slots import SlotShape, SlotTable
from services.learner.trainer import TorchTrainer
from shared.bases import DENSE_TARGETS
from tests.stacks import tiny_bases
from tests.tiny import TINY_NAME

__all__ = ["measure"]

RANK = 8
TOKENS = (5, 6, 7, 8)
LORA = {"rank": RANK, "seed": 1, "train_unembed": False, "train_mlp": True, "train_attn": True}
NO_GRADIENTS = "needs a forward_backward before it"

Call = Callable[[int], Awaitable[tuple[float, float]]]


def measure(run: Run) -> None:
    number = run.pick(200, 5)
    folder = run.folder / "operations"
    folder.mkdir(parents=True, exist_ok=True)
    bases = tiny_bases(folder)
    computed = compute_seconds(folder / "base", number)
    rows: Rows = []
    with tiny_stack(folder / "data", bases) as stack:
        for clients in (1, 4):
            for name in ("create_model", "optim_step, refused", "forward, 4 tokens"):
                times = asyncio.run(_clients(stack.url, name, clients, number // clients))
                rows.append(_row(name, clients, times, computed if name.startswith("forward") else 0.0))
                run.keep("operations", rows, None)


@contextmanager
def tiny_stack(data: Path, bases: Path) -> Iterator[Stack]:
    where = ("--data", str(data))
    try:
        mint("up", "--detach", "--free-ports", "--engine", "transformers", "--bases", str(bases), *where)
        yield Stack(data.resolve())
    finally:
        mint("down", "--now", *where)


def compute_seconds(base: Path, number: int) -> float:
    """The median of what the forward takes where nothing is in its way."""
    resident = ResidentBase(base, "bfloat16", DENSE_TARGETS)
    slot = SlotTable(resident, 1, max_rank=RANK).acquire("bench/a", SlotShape(RANK, 32.0, False, DENSE_TARGETS))
    slot.initialise(1)
    trainer = TorchTrainer(resident, 1024)
    row = Datum("row", TOKENS, TOKENS, (True,) * len(TOKENS))
    taken = []
    for _ in range(number + 1):
        began = time.perf_counter()
        trainer.forward(slot, [row], 1.0, lambda: None)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


async def _clients(url: str, name: str, clients: int, each: int) -> list[tuple[float, float]]:
    """Of every call, seconds until it was accepted and until its result was there."""

    async def one(number: int) -> list[tuple[float, float]]:
        async with Wire(url) as wire:
            call = await _call(wire, name)
            await call(0)
            found = [await call(place) for place in range(1, each + 1)]
            await wire.finish()
            return found

    found = await asyncio.gather(*(one(number) for number in range(clients)))
    return [pair for pairs in found for pair in pairs]


async def _call(wire: Wire, name: str) -> Call:
    if name == "create_model":
        return lambda place: _timed(wire, "create_model", _new_model(wire, place))
    model = (await _made(wire))["model_id"]
    if name.startswith("optim_step"):
        params = {"learning_rate": 1e-4}
        return lambda place: _timed(
            wire, "optim_step", {"model_id": model, "seq_id": place + 1, "adam_params": params}, NO_GRADIENTS
        )
    tensor = {"data": list(TOKENS), "dtype": "int64", "shape": [len(TOKENS)]}
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": list(TOKENS)}]},
        "loss_fn_inputs": {"target_tokens": tensor},
    }
    content = {"data": [datum], "loss_fn": "cross_entropy"}
    return lambda place: _timed(wire, "forward", {"model_id": model, "seq_id": place + 1, "forward_input": content})


async def _made(wire: Wire) -> Any:
    begun = await wire.post("create_model", **_new_model(wire, 0))
    await wire.result(begun)
    return begun


def _new_model(wire: Wire, place: int) -> dict[str, Any]:
    return {"session_id": wire.session, "model_seq_id": place, "base_model": TINY_NAME, "lora_config": LORA}


async def _timed(wire: Wire, path: str, body: dict[str, Any], refusal: str | None = None) -> tuple[float, float]:
    """`refusal`: a word of the error that the operation must end with."""
    began = time.perf_counter()
    future = await wire.post(path, **body)
    accepted = time.perf_counter() - began
    try:
        await wire.result(future)
    except RuntimeError as error:
        if refusal is None or refusal not in str(error):
            raise
    else:
        if refusal is not None:
            raise RuntimeError(f"{path} was to be refused, and was done")
    return accepted, time.perf_counter() - began


def _row(name: str, clients: int, times: list[tuple[float, float]], computed: float) -> dict[str, Any]:
    accepted, whole = [pair[0] for pair in times], [pair[1] - computed for pair in times]
    return {
        "operation": name,
        "clients": clients,
        "calls": len(times),
        "accepted_p50_ms": percentile(accepted, 0.5) * 1000,
        "accepted_p95_ms": percentile(accepted, 0.95) * 1000,
        "result_p50_ms": percentile(whole, 0.5) * 1000,
        "result_p95_ms": percentile(whole, 0.95) * 1000,
        "subtracted_ms": computed * 1000,
    }
