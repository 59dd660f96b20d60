"""Which engine serves a base here: the one asked for, or with `auto` vLLM where it can."""

from __future__ import annotations

import importlib.util
import json
from typing import Literal

from shared.bases import Base
from shared.engine.environment import vllm_environment
from shared.engine.port import InferenceEngine
from shared.engine.settings import EngineSettings
from shared.errors import Fatal

EngineKind = Literal["auto", "vllm", "transformers", "fake"]

# Dense decoders whose projections vLLM packs as this project reads them back.
VLLM_ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"}
)
# vLLM's smallest attention head on CPU; smaller models are for tests.
VLLM_HEAD_SIZES = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256})


def create_engine(kind: EngineKind, base: Base, settings: EngineSettings) -> InferenceEngine:
    """Load the base into a new engine. Blocks for up to a minute: call it in a thread.

    Raises Fatal for a kind that is unknown or cannot serve this base here."""
    chosen = _choose(base) if kind == "auto" else kind
    # Each engine brings a library that the others, and the fake above all, must do without.
    if chosen == "fake":
        from shared.engine.fake import fake_engine

        return fake_engine(base, settings)
    if chosen == "transformers":
        from shared.engine.transformers import transformers_engine

        return transformers_engine(base, settings)
    if chosen == "vllm":
        refusal = vllm_refusal(base)
        if refusal is not None:
            raise Fatal(f"engine vllm cannot serve {base.name}: {refusal}; use engine 'transformers'")
        with vllm_environment(settings):
            from shared.engine.vllm import vllm_engine

            return vllm_engine(base, settings)
    raise Fatal(f"engine {kind!r} is unknown; allowed: auto, vllm, transformers, fake")


def _choose(base: Base) -> EngineKind:
    return "transformers" if vllm_refusal(base) else "vllm"


def vllm_refusal(base: Base) -> str | None:
    """Why vLLM cannot serve a base on this machine; None if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    config = json.loads((base.directory / "config.json").read_bytes())
    architectures = config.get("architectures") or ["unknown"]
    if architectures[0] not in VLLM_ARCHITECTURES:
        return f"architecture {architectures[0]} is not one of {sorted(VLLM_ARCHITECTURES)}"
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if head not in VLLM_HEAD_SIZES:
        return f"its attention heads have size {head}; allowed: {sorted(VLLM_HEAD_SIZES)}"
    return None
