"""LoRA slots: what one policy's steps read and write, beside the resident base.

A slot owns four flat buffers (parameters, both moments, gradients) of the largest shape that the learner
advertises, allocated once; a policy's adapter is carved out of them. `SlotTable.acquire` gives a policy
its slot, evicting the one used longest ago when all are taken, open gradients last. Invariant: everything
that a step of one policy reads or writes is in its own slot; the base and the other slots are never touched.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from services.learner.base_model import ResidentBase
from services.learner.lora import Span
from services.learner.optimizer import AdamW
from shared.errors import Fatal, Retryable


@dataclass(frozen=True)
class SlotShape:
    """What makes two adapters exchangeable in a slot."""

    rank: int
    alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...]

    @property
    def scaling(self) -> float:
        """alpha/r, or alpha/√r (rsLoRA, arXiv:2312.03732)."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


class Buffers:
    """Flat tensors of `size` numbers; pages that no adapter touches cost no memory."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.parameters, self.first, self.second, self.gradients = (
            torch.zeros(size, dtype=dtype, device=device) for _ in range(4)
        )


class Slot:
    """`parameters`: `<module path>.lora_A.weight` [r, in] and `.lora_B.weight` [out, r], fp32 or better.

    `flat` and `flat_gradients` are the same memory, end to end in the order of `parameters`. `accumulated`
    counts the forward_backwards since the last optimizer step. `holds`: identity of the committed training
    checkpoint whose state this slot is in, None = unknown, restore before use. `in_use`: never evict.
    `turn` counts the steps that were begun on it. `replayable`: its open gradients can be computed again, so
    that they are given up when a slot is needed and no other is free."""

    def __init__(self, policy: str, shape: SlotShape, buffers: Buffers, layers: dict[str, nn.Linear]) -> None:
        self.policy, self.shape, self.buffers = policy, shape, buffers
        sizes = _parameter_shapes(layers, shape.rank)
        self.size = sum(a * b for a, b in sizes.values())
        self.parameters = _carve(buffers.parameters, sizes)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self._gradients = _carve(buffers.gradients, sizes)
        self.optimizer = AdamW(
            self.flat, buffers.first[: self.size], buffers.second[: self.size],
            _carve(buffers.first, sizes), _carve(buffers.second, sizes),
        )  # fmt: skip
        self.accumulated = 0
        self.holds: str | None = None
        self.in_use = 0
        self.turn = 0
        self.replayable = False
        tensors = {
            path: (self.parameters[f"{path}.lora_A.weight"], self.parameters[f"{path}.lora_B.weight"])
            for path in layers
        }
        self._whole = Span(tensors, shape.scaling)

    @property
    def flat(self) -> Tensor:
        return self.buffers.parameters[: self.size]

    @property
    def flat_gradients(self) -> Tensor:
        return self.buffers.gradients[: self.size]

    @property
    def gradients(self) -> dict[str, Tensor] | None:
        """Accumulated since the last optimizer step, by parameter; None = none."""
        return self._gradients if self.accumulated else None

    def span(self, start: int = 0, stop: int | None = None) -> Span:
        return Span(self._whole.tensors, self._whole.scaling, start, stop)

    def accumulate(self, flat: Tensor) -> None:
        """Add the gradients of one forward_backward."""
        if self.accumulated:
            self.flat_gradients.add_(flat)
        else:
            self.flat_gradients.copy_(flat)
        self.accumulated += 1

    def restore_gradients(self, gradients: Mapping[str, Tensor], accumulated: int) -> None:
        for name, gradient in gradients.items():
            self._gradients[name].copy_(gradient)
        self.accumulated = accumulated

    def forget_gradients(self) -> None:
        self.accumulated = 0

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """A fresh adapter (arXiv:2106.09685): A ~ U(±1/√in) from `seed` alone, B = 0, moments 0."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.parameters.items():
            if ".lora_B." in name:
                parameter.zero_()
                continue
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=generator)
            parameter.copy_(drawn)
        self.optimizer.reset()
        self.forget_gradients()


class SlotTable:
    """At most `capacity` slots for adapters of up to `max_rank` on the base's layers; not thread-safe."""

    def __init__(self, base: ResidentBase, capacity: int, max_rank: int) -> None:
        if capacity < 1:
            raise ValueError(f"a learner needs at least one slot, not {capacity}")
        self._base, self.capacity, self._max_rank = base, capacity, max_rank
        largest = _parameter_shapes(base.router.layers, max_rank)
        dtype = torch.promote_types(base.dtype, torch.float32)
        self._size = sum(a * b for a, b in largest.values())
        self._free = [Buffers(self._size, dtype, base.device) for _ in range(capacity)]
        self._slots: OrderedDict[str, Slot] = OrderedDict()

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies with a slot, the one used longest ago first."""
        return tuple(self._slots)

    def acquire(self, policy: str, shape: SlotShape) -> Slot:
        """The policy's slot, now the most recently used; new (`holds` None) if it had none of this shape.

        Raises Fatal for a shape that the base or the learner does not take, Retryable when no slot may be
        evicted."""
        slot = self._slots.get(policy)
        if slot is not None and slot.shape != shape:
            self.drop(policy)
            slot = None
        if slot is None:
            layers = self._layers(policy, shape)
            if not self._free:
                self.drop(self._victim())
            slot = self._slots[policy] = Slot(policy, shape, self._free.pop(), layers)
        self._slots.move_to_end(policy)
        return slot

    @contextmanager
    def using(self, slots: Sequence[Slot]) -> Iterator[None]:
        """None of `slots` is evicted inside."""
        for slot in slots:
            slot.in_use += 1
        try:
            yield
        finally:
            for slot in slots:
                slot.in_use -= 1

    def find(self, policy: str, shape: SlotShape) -> Slot | None:
        """The policy's slot if it has one of this shape; unlike `acquire` it creates and evicts nothing."""
        slot = self._slots.get(policy)
        return slot if slot is not None and slot.shape == shape else None

    def holding(self, policy: str) -> str | None:
        """What the policy's slot holds, of whatever shape it is; None = nothing, or nobody knows."""
        slot = self._slots.get(policy)
        return None if slot is None else slot.holds

    def drop(self, policy: str) -> None:
        """Free a policy's slot. Unknown: no-op."""
        slot = self._slots.pop(policy, None)
        if slot is not None:
            self._free.append(slot.buffers)

    def _victim(self) -> str:
        idle = [(policy, slot) for policy, slot in self._slots.items() if not slot.in_use]
        for policy, slot in idle:
            if not slot.accumulated:
                return policy
        for policy, slot in idle:
            if slot.replayable:
                return policy
        raise Retryable(
            f"all {self.capacity} slots hold gradients of an open step or are in use; trying again after one is "
            "free (MINT_LEARNER_SLOTS says how many there are)"
        )

    def _layers(self, policy: str, shape: SlotShape) -> dict[str, nn.Linear]:
        if shape.rank > self._max_rank:
            raise Fatal(f"{policy}: rank {shape.rank} is more than this learner's {self._max_rank}")
        by_name: dict[str, dict[str, nn.Linear]] = {name: {} for name in shape.target_modules}
        for path, layer in self._base.router.layers.items():
            name = path.rsplit(".", 1)[-1]
            if name in by_name:
                by_name[name][path] = layer
        missing = sorted(name for name, found in by_name.items() if not found)
        if missing:
            known = ", ".join(sorted({path.rsplit(".", 1)[-1] for path in self._base.router.layers}))
            raise Fatal(f"{policy}: the base does not take this adapter: no layer {', '.join(missing)}; it has {known}")
        return {path: layer for found in by_name.values() for path, layer in found.items()}


def _parameter_shapes(layers: dict[str, nn.Linear], rank: int) -> dict[str, tuple[int, int]]:
    shapes: dict[str, tuple[int, int]] = {}
    for path, layer in layers.items():
        shapes[f"{path}.lora_A.weight"] = (rank, layer.in_features)
        shapes[f"{path}.lora_B.weight"] = (layer.out_features, rank)
    return dict(sorted(shapes.items()))


def _carve(flat: Tensor, shapes: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Views of `flat`, one after another; leaves for autograd each."""
    views, at = {}, 0
    for name, shape in shapes.items():
        count = shape[0] * shape[1]
        views[name] = flat[at : at + count].view(shape).detach()
        at += count
    return views
