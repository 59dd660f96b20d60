"""What the parts share: the base, rows of realistic shapes, medians of interleaved rounds, a process apart."""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.learner.base_model import ResidentBase
from services.learner.datum import Datum
from services.learner.optimizer import AdamParams
from services.learner.slots import Slot, SlotShape, SlotTable
from services.learner.trainer import LossCall, TorchTrainer
from shared.bases import DENSE_TARGETS
from shared.text.codec import TextCodec

CALL = LossCall("cross_entropy")
ADAM = AdamParams(learning_rate=1e-4, grad_clip_norm=1.0)
SHAPE = SlotShape(8, 32.0, False, DENSE_TARGETS)
BATCH_TOKENS = 1024
MARK = "figures: "


def smollm2() -> Path:
    cache = Path(os.environ.get("MINT_CACHE", "~/.cache/mint")).expanduser()
    return cache / "bases" / "smollm2-135m"


class Rig:
    """The resident base in bf16 with `capacity` slots."""

    def __init__(self, capacity: int = 1, packing: bool = True) -> None:
        self.base = ResidentBase(smollm2(), "bfloat16", DENSE_TARGETS, packing=packing)
        self.slots = SlotTable(self.base, capacity, max_rank=8)
        self.trainer = TorchTrainer(self.base, BATCH_TOKENS)

    def fresh(self, policy: str) -> Slot:
        slot = self.slots.acquire(policy, SHAPE)
        slot.initialise(1)
        return slot


def sums(count: int, seed: int) -> list[Datum]:
    """`What is a+b?` and its answer: rows of about 25 tokens, the loss on the last 3 or 4."""
    draw = random.Random(seed)
    pairs = [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(count)]
    return _rows([(f"What is {a}+{b}?", str(a + b)) for a, b in pairs])


def chats(count: int, seed: int) -> list[Datum]:
    """Questions with answers of 10 to 250 words: ragged rows, most of the tokens under the loss."""
    draw = random.Random(seed)
    words = ("plain", "words", "about", "what", "a", "reader", "asks", "of", "the", "policy", "in", "numbers")
    answers = [" ".join(draw.choice(words) for _ in range(draw.randint(10, 250))) for _ in range(count)]
    return _rows([(f"Tell me about item {i}.", answer) for i, answer in enumerate(answers)])


def _rows(chats: Sequence[tuple[str, str]]) -> list[Datum]:
    codec = TextCodec.load(smollm2())
    encoded = [
        codec.conversation([{"role": "user", "content": ask}, {"role": "assistant", "content": answer}])
        for ask, answer in chats
    ]
    total = sum(sum(mask[1:]) for _, mask in encoded)
    return [_datum(f"row{i}", ids, mask, total) for i, (ids, mask) in enumerate(encoded)]


def _datum(name: str, ids: Sequence[int], mask: Sequence[bool], total: int) -> Datum:
    taken = tuple(mask[1:])
    weights = tuple(float(t) for t in taken)
    return Datum(name, tuple(ids[:-1]), tuple(ids[1:]), taken, {"weights": weights}, tuple(w / total for w in weights))


def tokens(rows: Sequence[Datum]) -> int:
    return sum(len(row.input_ids) for row in rows)


def go_on() -> None:
    return None


def interleaved(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each case, a round of all of them after the other, after one round to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, case in cases.items():
            began = time.perf_counter()
            case()
            if number:
                taken[name].append(time.perf_counter() - began)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return taken


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Half of the range, as a share of the median."""
    return (max(values) - min(values)) / 2 / statistics.median(values)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def apart(module: str, *arguments: str) -> Any:
    """What `python -m module …` printed behind MARK; a process of its own has a peak of its own."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    return json.loads(lines[-1].removeprefix(MARK))


def answer(figures: object) -> None:
    print(MARK + json.dumps(figures), flush=True)
