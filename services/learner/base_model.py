"""The resident base model: loaded once, frozen, shared by every slot of the process.

A directory goes in; a module that adapters are injected into stays. Invariant: no code path writes a
base weight, so `digest()` is the same from load to exit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.distributed import DeviceMesh
from transformers import AutoModelForCausalLM

from services.learner.lora import AdapterRouter
from services.learner.packing import pack_attention
from services.learner.sharding import shard, whole

Precision = Literal["float32", "bfloat16", "float64"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class ResidentBase:
    """`max_context` and `vocab_size` bound what a row may hold. `router` puts adapters on the layers named
    by `targets`. `packing`: whether rows may be packed without padding; whether they are is tried at load.
    `mesh`: the processes that each keep a share of the weights; None = all here."""

    def __init__(
        self,
        directory: Path,
        precision: Precision,
        targets: Sequence[str],
        device: str = "cpu",
        packing: bool = True,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.precision, self.dtype = precision, _DTYPES[precision]
        self.device = torch.device(device)
        module = AutoModelForCausalLM.from_pretrained(directory, dtype=self.dtype, local_files_only=True)
        if self.dtype is torch.float64:
            module.set_experts_implementation("eager")  # the grouped one has no float64
        # eval: no dropout of the base's own, so that a step is a function of its rows alone
        self.module: nn.Module = module.requires_grad_(False).eval()
        self.packing = packing and pack_attention(module)
        if mesh is None:
            self.module.to(self.device)
        else:
            shard(self.module, mesh, targets)
        self.router = AdapterRouter(self.module, targets)
        self.vocab_size: int = module.config.get_text_config().vocab_size
        self.max_context: int = module.config.get_text_config().max_position_embeddings

    def digest(self) -> str:
        """sha256 over the frozen tensors (name, dtype, shape, bytes), the same however they are sharded."""
        digest = hashlib.sha256()
        for name, value in sorted(self.module.state_dict().items()):
            tensor = whole(value.detach()).cpu().contiguous()
            digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()
