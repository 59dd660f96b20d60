"""The client script: forward_backward and optim_step, then the new weights for the sampler, then samples; in a loop.

The same requests go to our server and to SkyRL's, whose turns alternate; plain PEFT does the same work in one process
without a server. Several clients are as many models at once; plain PEFT takes them in turn. What a step costs is
measured after one that warms up, in each turn anew, with new models.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from loadtests.interface.peer import Peer, skyrl
from loadtests.interface.wire import Wire
from loadtests.learning.rig import apart, sums
from loadtests.population.client import median, spread
from loadtests.population.rig import BASE, Rows, Run, rig, say
from services.learner.datum import Datum

__all__ = ["RANK", "Size", "Turn", "measure", "prompt_of", "rows_of"]

OURS, SKYRL, PLAIN = "mint", "skyrl-tx", "PEFT, no server"
RANK, RATE = 8, 1e-4
PATIENCE_S = 1200.0
ROUNDS = {1: 3, 4: 2}
"""By clients; a turn of four takes SkyRL's server three minutes."""


@dataclass(frozen=True)
class Size:
    """Of one step of one client: `rows` are learnt, then each of `prompts` is answered `samples` times with `tokens`
    tokens. `steps` of each turn count."""

    rows: int = 16
    prompts: int = 2
    samples: int = 4
    tokens: int = 8
    steps: int = 3


@dataclass(frozen=True)
class Turn:
    """`nll`: the mean of the first rows before anything is learnt, which is the base model's on every side."""

    steps_per_s: float
    nll: float
    sampled: int


def rows_of(size: Size, client: int) -> list[Datum]:
    return sums(size.rows, seed=client)


def prompt_of(row: Datum) -> tuple[int, ...]:
    """The row up to what it learns."""
    return row.input_ids[: row.mask.index(True) + 1]


def measure(run: Run, python: Path | None) -> None:
    """`python`: of a venv with skyrl-tx; None leaves it out."""
    size = Size(rows=4, samples=1, tokens=4, steps=1) if run.quick else Size()
    # By default the learner has one thread and the engine two; what is learnt weighs more here than what is sampled.
    threads = patch.dict("os.environ", {"MINT_LEARNER_THREADS": "2", "MINT_SERVING_THREADS": "1"})
    with threads, rig(run.folder / "loop", slots=8, max_resident=32) as ours, ExitStack() as stack:
        sides: dict[str, Callable[[int], Turn]] = {OURS: lambda clients: ask(ours.url, clients, size)}
        if python is not None:
            peer = stack.enter_context(skyrl(python, run.folder / "skyrl", size.rows, size.prompts * size.samples))
            # until its engine is loaded and has compiled its shapes, and then it is stopped
            _in_its_turn(peer, 1, replace(size, steps=1))
            sides[SKYRL] = lambda clients: _in_its_turn(peer, clients, size)
        sides[PLAIN] = lambda clients: _plain(clients, size)
        rows: Rows = []
        for clients in ROUNDS:
            turns = _alternate(sides, clients, run.pick(ROUNDS[clients], 1))
            rows += [_row(clients, side, turns) for side in turns]
            run.keep("loop", rows, None)


def _alternate(sides: Mapping[str, Callable[[int], Turn]], clients: int, rounds: int) -> dict[str, list[Turn]]:
    """Who goes first moves on from round to round."""
    found: dict[str, list[Turn]] = {side: [] for side in sides}
    names = list(sides)
    for number in range(rounds):
        for place in range(len(names)):
            side = names[(place + number) % len(names)]
            turn = sides[side](clients)
            found[side].append(turn)
            say(f"  {clients} clients, round {number + 1} of {rounds}: {side} {turn.steps_per_s:.3f} steps/s")
    return found


def _row(clients: int, side: str, turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """`mint_ratio`: our steps per second to this side's, by round; its median and range."""
    speeds = [turn.steps_per_s for turn in turns[side]]
    ratios = [ours.steps_per_s / turn.steps_per_s for ours, turn in zip(turns[OURS], turns[side], strict=True)]
    return {
        "clients": clients,
        "side": side,
        "steps_s": median(speeds),
        "steps_s_spread": spread(speeds),
        "mint_ratio": None if side == OURS else median(ratios),
        "mint_ratio_range": None if side == OURS else [min(ratios), max(ratios)],
        "first_nll": turns[side][0].nll,
        "sampled_tokens": turns[side][0].sampled,
        "rounds": len(speeds),
    }


def ask(url: str, clients: int, size: Size) -> Turn:
    return asyncio.run(_ask(url, clients, size))


def _in_its_turn(peer: Peer, clients: int, size: Size) -> Turn:
    with peer.awake():
        return ask(peer.url, clients, size)


def _plain(clients: int, size: Size) -> Turn:
    numbers = [str(value) for value in asdict(size).values()]
    return Turn(**apart("loadtests.interface.plain", str(clients), *numbers))


async def _ask(url: str, clients: int, size: Size) -> Turn:
    async with asyncio.timeout(PATIENCE_S), Wire(url) as wire:
        trainees = [Trainee(wire, number, size) for number in range(clients)]
        try:
            await asyncio.gather(*(trainee.begin() for trainee in trainees))
            await asyncio.gather(*(trainee.step() for trainee in trainees))
            began = time.perf_counter()
            await asyncio.gather(*(trainee.steps(size.steps) for trainee in trainees))
            seconds = time.perf_counter() - began
        finally:
            await asyncio.gather(*(trainee.end() for trainee in trainees))
    return Turn(clients * size.steps / seconds, trainees[0].nll, sum(trainee.sampled for trainee in trainees))


class Trainee:
    """One model and its script. `nll` is of the first step, `sampled` counts the tokens of the steps that count."""

    def __init__(self, wire: Wire, number: int, size: Size) -> None:
        self._wire, self._number, self._size = wire, number, size
        self._rows = rows_of(size, number)
        self._data = [_datum(row) for row in self._rows]
        self._model, self._done, self._saved = "", 0, 0
        self.nll, self.sampled = math.nan, 0

    async def begin(self) -> None:
        """A new model of the wire's session."""
        lora = {"rank": RANK, "seed": 1, "train_unembed": False, "train_mlp": True, "train_attn": True}
        begun = await self._wire.post(
            "create_model",
            session_id=self._wire.session,
            model_seq_id=self._number,
            base_model=BASE,
            lora_config=lora,
        )
        await self._wire.result(begun)
        self._model = begun["model_id"]

    async def end(self) -> None:
        if self._model:
            await self._wire.call("unload_model", model_id=self._model)

    async def steps(self, number: int) -> None:
        self.sampled = 0
        for _ in range(number):
            await self.step()

    async def step(self) -> None:
        """optim_step is sent before the gradients are there, as clients do."""
        wire, data = self._wire, {"data": self._data, "loss_fn": "cross_entropy"}
        learnt = await wire.post("forward_backward", **self._next(), forward_backward_input=data)
        stepped = await wire.post("optim_step", **self._next(), adam_params={"learning_rate": RATE})
        outputs = (await wire.result(learnt))["loss_fn_outputs"]
        await wire.result(stepped)
        if math.isnan(self.nll):
            self.nll = _nll(self._rows, [output["logprobs"]["data"] for output in outputs])
        saved = await wire.call("save_weights_for_sampler", **self._next(), sampling_session_seq_id=self._sampler())
        answers = await asyncio.gather(
            *(self._sample(saved["sampling_session_id"], place) for place in range(self._size.prompts))
        )
        self.sampled += sum(len(sequence["tokens"]) for answer in answers for sequence in answer["sequences"])

    async def _sample(self, sampler: str, place: int) -> Any:
        return await self._wire.call(
            "asample",
            sampling_session_id=sampler,
            seq_id=place,
            num_samples=self._size.samples,
            prompt={"chunks": [_chunk(prompt_of(self._rows[place]))]},
            sampling_params={"max_tokens": self._size.tokens, "stop": [], "seed": place},
        )

    def _next(self) -> dict[str, Any]:
        self._done += 1
        return {"model_id": self._model, "seq_id": self._done}

    def _sampler(self) -> int:
        """Its numbers are of the session, which all models share."""
        self._saved += 1
        return self._number * 1_000_000 + self._saved


def _datum(row: Datum) -> dict[str, Any]:
    inputs = {
        "target_tokens": {"data": list(row.targets), "dtype": "int64", "shape": [len(row.targets)]},
        "weights": {"data": list(row.inputs["weights"]), "dtype": "float32", "shape": [len(row.targets)]},
    }
    return {"model_input": {"chunks": [_chunk(row.input_ids)]}, "loss_fn_inputs": inputs}


def _chunk(tokens: Sequence[int]) -> dict[str, Any]:
    return {"type": "encoded_text", "tokens": list(tokens)}


def _nll(rows: Sequence[Datum], logprobs: Sequence[Sequence[float]]) -> float:
    pairs = [
        (weight, logprob)
        for row, found in zip(rows, logprobs, strict=True)
        for weight, logprob in zip(row.inputs["weights"], found, strict=True)
    ]
    return -sum(weight * logprob for weight, logprob in pairs) / sum(weight for weight, _ in pairs)
