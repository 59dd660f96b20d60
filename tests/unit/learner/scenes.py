"""What tests compute in one process and in several: the same calls, for whoever makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.learner import checkpoint
from services.learner.base_model import ResidentBase
from services.learner.datum import Datum
from services.learner.optimizer import AdamParams
from services.learner.peers import Peers
from services.learner.ranks import Ranks
from services.learner.reverse_kl import KlRow
from services.learner.slots import Slot, SlotShape, SlotTable
from services.learner.trainer import LossCall, TorchTrainer, Work
from shared.bases import DENSE_TARGETS
from shared.errors import Fatal, MintError

MAX_RANK = 16
LARGE = SlotShape(MAX_RANK, 8.0, False, DENSE_TARGETS)
SMALL = SlotShape(2, 16.0, True, ("k_proj", "down_proj"))
ADAM = AdamParams(learning_rate=1e-3, eps=1e-8, grad_clip_norm=1.0)
CROSS_ENTROPY = LossCall("cross_entropy")
ORIGIN = checkpoint.Origin("acme/a", "run", "tiny/llama", "b" * 64, 1)


def go_on() -> None:
    return None


@dataclass
class Rig:
    """A resident base, its slots, and trainers over it."""

    base: ResidentBase
    slots: SlotTable
    peers: Peers | None

    @staticmethod
    def of(directory: Path, ranks: Ranks | None = None) -> Rig:
        base = ResidentBase(directory, "float32", DENSE_TARGETS, mesh=ranks.mesh if ranks else None)
        return Rig(base, SlotTable(base, 4, MAX_RANK), ranks.peers if ranks else None)

    def trainer(self, max_tokens: int = 4096) -> TorchTrainer:
        return TorchTrainer(self.base, max_tokens, self.peers)

    def fresh(self, policy: str, shape: SlotShape = LARGE) -> Slot:
        """An adapter whose every tensor matters: a fresh one has B = 0."""
        slot = self.slots.acquire(policy, shape)
        slot.initialise(3)
        with torch.no_grad():
            slot.flat.add_(0.01)
        return slot


def rows(count: int, seed: int = 0, call: str = "cross_entropy") -> list[Datum]:
    """Ragged, the first one the longest, Σc = 1 over all."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for i in range(count):
        ids = torch.randint(3, 49152, (6 + 3 * (count - i),), generator=generator).tolist()
        mask = tuple(at >= 2 for at in range(len(ids) - 1))
        each = tuple(taken / (count * (len(mask) - 2)) for taken in mask)
        ones = tuple(float(taken) for taken in mask)
        inputs = (
            {"weights": ones} if call == "cross_entropy" else {"advantages": ones, "logprobs": (-10.8,) * len(mask)}
        )
        data.append(Datum(f"row{i}", tuple(ids[:-1]), tuple(ids[1:]), mask, inputs, each))
    return data


def gradients(rig: Rig) -> dict[str, Any]:
    """Of adapters of the largest shape and of a small one, in 1, 3 and 5 micro-batches."""
    found: dict[str, Any] = {}
    for name, shape in (("large", LARGE), ("small", SMALL)):
        for max_tokens in (4096, 35, 1):
            slot = rig.fresh(f"acme/{name}", shape)
            result = rig.trainer(max_tokens).forward_backward(slot, rows(5), CROSS_ENTROPY, go_on)
            found[f"{name} {max_tokens}"] = result, {n: g.clone() for n, g in (slot.gradients or {}).items()}
            rig.slots.drop(slot.policy)
    return found


def forward(rig: Rig) -> list[list[list[float]]]:
    slot = rig.fresh("acme/a")
    return [rig.trainer(35).forward(its, rows(5), 0.7, go_on) for its in (None, slot)]


def reverse_kl(rig: Rig) -> tuple[Any, Tensor]:
    students, references = rows(3), rows(3, seed=9)
    pairs = [
        KlRow(s.name, s.input_ids, s.mask, r.input_ids, r.mask, tuple(0.1 * taken for taken in s.mask))
        for s, r in zip(students, references, strict=True)
    ]
    slot, reference = rig.fresh("acme/a"), rig.fresh("acme/b", SMALL)
    found = rig.trainer(1).reverse_kl(slot, reference, pairs, 0.7, go_on)
    summed = slot.flat_gradients.clone()
    rig.slots.drop("acme/a")
    rig.slots.drop("acme/b")
    return found, summed


def training(rig: Rig, start: Mapping[str, bytes] | None, steps: Sequence[int]) -> dict[str, Any]:
    """Optimizer steps of one policy from `start`: its losses and gradients, and the files at the end."""
    trainer, slot = rig.trainer(35), rig.fresh("acme/a")
    if start is not None:
        trainer.load(slot, start, ORIGIN.base_sha256, fresh_optimizer=False)
    losses, grads = [], []
    for step in steps:
        losses.append(trainer.forward_backward(slot, rows(5, step), CROSS_ENTROPY, go_on).loss)
        grads.append(slot.flat_gradients.clone())
        trainer.optim_step(slot, ADAM)
    files = trainer.save(slot, ORIGIN, steps[-1] if steps else 2)
    rig.slots.drop("acme/a")
    return {"losses": losses, "gradients": grads, "files": files}


def one_bad_row(rig: Rig) -> dict[str, Any]:
    """Two policies in joint passes, micro-batches of a row each: the bad row is the second process's."""
    call = LossCall("importance_sampling")
    data = rows(4, call=call.name)
    bad = [*data]
    # exp(lp - q) of a q this low is more than fp32 holds
    bad[1] = data[1].with_input("logprobs", (-1000.0,) * len(data[1].mask))
    a, b = rig.fresh("acme/a"), rig.fresh("acme/b", SMALL)
    trainer = rig.trainer(1)
    failed, went_on = trainer.forward_backward_batch([Work(a, bad, call, go_on), Work(b, data, call, go_on)])
    assert isinstance(failed, MintError)
    assert not isinstance(went_on, MintError)
    norm = trainer.optim_step(b, ADAM)
    found = {"error": failed, "a": a.gradients, "loss": went_on.loss, "norm": norm, "b": b.flat.clone()}
    rig.slots.drop("acme/a")
    rig.slots.drop("acme/b")
    return found


def a_check_that_raises(rig: Rig) -> list[str]:
    """The words of what each call ended with; the check of any process but the first counts for nothing."""
    leads = rig.peers is None or getattr(rig.peers, "rank", 0) == 0
    calls = [0]

    def check() -> None:
        calls[0] += 1
        if not leads:
            raise AssertionError("only the first process asks")
        if calls[0] == 2:
            raise Fatal("the lease is lost")

    slot, words = rig.fresh("acme/a"), []
    trainer = rig.trainer(1)
    for call in (
        lambda: trainer.forward_backward(slot, rows(5), CROSS_ENTROPY, check),
        lambda: trainer.forward(slot, rows(5), 1.0, check),
    ):
        calls[0] = 0
        try:
            call()
        except MintError as error:
            words.append(str(error))
        words.append(f"{slot.accumulated} accumulated")
    rig.slots.drop("acme/a")
    return words


def everything(rig: Rig, others: Mapping[str, bytes]) -> dict[str, Any]:
    """All of the above on one rig. `others`: a training checkpoint of step 2 that somebody else wrote."""
    before = rig.base.digest()
    found = {
        "gradients": gradients(rig),
        "forward": forward(rig),
        "reverse_kl": reverse_kl(rig),
        "whole": training(rig, None, [1, 2, 3, 4]),
        "half": training(rig, None, [1, 2]),
        "continued": training(rig, others, [3, 4]),
        "rewritten": training(rig, others, []),
        "one_bad_row": one_bad_row(rig),
        "check": a_check_that_raises(rig),
        "after": training(rig, None, [1, 2, 3, 4]),
    }
    return found | {"digests": (before, rig.base.digest())}
