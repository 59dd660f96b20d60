"""The manifest of a revision: everything that a loader must know before it touches a tensor."""

from __future__ import annotations

from typing import Literal

from mint_schemas.common import FileRef
from pydantic import BaseModel, ConfigDict, Field


class TensorSpec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")
    name: str
    shape: tuple[int, ...]
    dtype: Literal["F32", "BF16", "F16"]


class Probe(BaseModel):
    """A fixed prompt and the trainer's temperature-1 logprob of each of its tokens but the first."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    prompt: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: Literal["float32", "bfloat16"]


class Manifest(BaseModel):
    """Per revision, immutable. `adapter_sha256` is the sha256 of the canonical JSON list of
    [file name, sha256] of `adapter_config.json` (canonical bytes) and `adapter_model.safetensors`,
    sorted by name. `zero_delta`: every product A·B is zero, so the revision equals its base."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    format: Literal[1] = 1
    revision: str = Field(description="tenant/policy@N; empty until registered")
    policy: str
    base: str = Field(description="public name of the base model")
    base_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    rank: int
    alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    files: dict[str, FileRef] = Field(description="adapter_model.safetensors, adapter_config.json")
    adapter_sha256: str
    parent: str | None
    run_id: str
    step: int
    zero_delta: bool
    probe: Probe | None

    @property
    def scaling(self) -> float:
        """alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA (arXiv:2312.03732)."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    @property
    def adapter_bytes(self) -> int:
        return sum(f.size for f in self.files.values())
