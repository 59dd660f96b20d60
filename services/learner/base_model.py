"""The resident base model: loaded once, frozen, shared by every slot of the process.

A directory goes in; a module that adapters are injected into stays. Invariant: no code path writes a
base weight, so `digest()` is the same from load to exit.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM

Precision = Literal["float32", "bfloat16", "float64"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class ResidentBase:
    """`max_context` and `vocab_size` bound what a row may hold."""

    def __init__(self, directory: Path, precision: Precision, device: str = "cpu") -> None:
        self.precision = precision
        self.device = torch.device(device)
        module = AutoModelForCausalLM.from_pretrained(directory, dtype=_DTYPES[precision], local_files_only=True)
        # eval: no dropout of the base's own, so that a step is a function of its rows alone
        self.module: nn.Module = module.to(self.device).requires_grad_(False).eval()
        self.vocab_size: int = module.config.get_text_config().vocab_size
        self.max_context: int = module.config.get_text_config().max_position_embeddings

    def autocast(self) -> AbstractContextManager[object]:
        """bf16 arithmetic where the base is bf16, so that fp32 adapters do not promote every activation."""
        if self.precision != "bfloat16":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def digest(self) -> str:
        """sha256 over the frozen tensors (name, dtype, shape, bytes), whatever adapters are injected."""
        digest = hashlib.sha256()
        frozen = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in self.module.state_dict(keep_vars=True).items()
            if "lora_" not in name
        }
        for name in sorted(frozen):
            tensor = frozen[name].detach().cpu().contiguous()
            digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()
