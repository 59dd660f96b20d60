"""LoRA slots: one PEFT adapter per policy on the resident base, with its gradients and moments.

`SlotTable.acquire` gives a policy its slot, evicting the one used longest ago when all are taken.
Invariant: everything that a step of one policy reads or writes is in its own slot; the base and the
other slots are never touched.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from peft import LoraConfig
from peft.functional import delete_adapter, inject_adapter_in_model, set_adapter
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from services.learner.base_model import ResidentBase
from services.learner.optimizer import AdamW
from shared.errors import Fatal, Retryable


@dataclass(frozen=True)
class SlotShape:
    """What makes two adapters exchangeable in a slot."""

    rank: int
    alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...]


class Slot:
    """`parameters`: `<module path>.lora_A.weight` [r, in] and `.lora_B.weight` [out, r], fp32 or better.

    `gradients`: accumulated since the last optimizer step, None = none. `holds`: identity of the
    committed training checkpoint whose state this slot is in, None = unknown, restore before use."""

    def __init__(self, policy: str, shape: SlotShape, adapter: str, parameters: dict[str, nn.Parameter]) -> None:
        self.policy, self.shape, self.adapter, self.parameters = policy, shape, adapter, parameters
        self.optimizer = AdamW(parameters)
        self.gradients: dict[str, Tensor] | None = None
        self.holds: str | None = None

    def accumulate(self, gradients: dict[str, Tensor]) -> None:
        if self.gradients is None:
            self.gradients = gradients
            return
        for name, gradient in gradients.items():
            self.gradients[name].add_(gradient)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """A fresh adapter (arXiv:2106.09685): A ~ U(±1/√in) from `seed` alone, B = 0, moments 0."""
        generator = torch.Generator().manual_seed(seed)
        for name in sorted(self.parameters):
            parameter = self.parameters[name]
            if ".lora_B." in name:
                parameter.zero_()
                continue
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=generator)
            parameter.copy_(drawn)
        self.optimizer.reset()
        self.gradients = None


class SlotTable:
    """At most `capacity` slots; not thread-safe, one caller at a time."""

    def __init__(self, base: ResidentBase, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a learner needs at least one slot, not {capacity}")
        self._base, self._capacity = base, capacity
        self._slots: OrderedDict[str, Slot] = OrderedDict()
        self._created = 0

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies with a slot, the one used longest ago first."""
        return tuple(self._slots)

    def acquire(self, policy: str, shape: SlotShape) -> Slot:
        """The policy's slot, now the most recently used; new (`holds` None) if it had none of this shape.

        Raises Fatal when a target module is not in the base, Retryable when no slot may be evicted."""
        slot = self._slots.get(policy)
        if slot is not None and slot.shape != shape:
            self.drop(policy)
            slot = None
        if slot is None:
            if len(self._slots) >= self._capacity:
                self.drop(self._victim())
            slot = self._slots[policy] = self._create(policy, shape)
        self._slots.move_to_end(policy)
        return slot

    def find(self, policy: str, shape: SlotShape) -> Slot | None:
        """The policy's slot if it has one of this shape; unlike `acquire` it creates and evicts nothing."""
        slot = self._slots.get(policy)
        return slot if slot is not None and slot.shape == shape else None

    def drop(self, policy: str) -> None:
        """Free a policy's slot. Unknown: no-op."""
        slot = self._slots.pop(policy, None)
        if slot is not None:
            delete_adapter(self._base.module, slot.adapter, prefix="lora_", layer_cls=LoraLayer)

    def activate(self, slot: Slot) -> nn.Module:
        """The base with this slot's adapter alone applied."""
        set_adapter(self._base.module, slot.adapter, layer_cls=LoraLayer)
        return self._base.module

    def _victim(self) -> str:
        for policy, slot in self._slots.items():
            if slot.gradients is None:
                return policy
        raise Retryable(f"all {self._capacity} slots hold gradients of an open step; try again after one commits")

    def _create(self, policy: str, shape: SlotShape) -> Slot:
        # names never repeat in a process, so that nothing of an evicted adapter can answer for a new one
        adapter = f"slot{self._created}"
        self._created += 1
        config = LoraConfig(
            r=shape.rank,
            lora_alpha=shape.alpha,
            use_rslora=shape.use_rslora,
            target_modules=list(shape.target_modules),
            lora_dropout=0.0,
            bias="none",
        )
        try:
            inject_adapter_in_model(config, self._base.module, adapter)
        except ValueError as error:
            raise Fatal(f"{policy}: the base does not take this adapter: {error}") from error
        finally:
            # PEFT's own register of adapters; it would outlive an evicted one, and the slots are ours
            vars(self._base.module).pop("peft_config", None)
        return Slot(policy, shape, adapter, _adapter_parameters(self._base.module, adapter))


def _adapter_parameters(module: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    parameters: dict[str, nn.Parameter] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, LoraLayer) and adapter in layer.lora_A:
            for side, weights in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
                linear = weights[adapter]
                # PEFT creates adapters in the base's dtype; bf16 would round away small steps
                linear.to(torch.promote_types(linear.weight.dtype, torch.float32))
                parameters[f"{path}.{side}.weight"] = linear.weight
    return dict(sorted(parameters.items()))
