"""Tiny random models of several architectures, written to disk the way that a base model is."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

VOCABULARY = 211
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
WINDOW = 4
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 2,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _config(architecture: str) -> PreTrainedConfig:
    match architecture:
        case "llama":
            return LlamaConfig(**_COMMON)
        case "mistral":
            return MistralConfig(**_COMMON, sliding_window=WINDOW)
        case "qwen2":
            layers = ["full_attention", "sliding_attention"]
            return Qwen2Config(**_COMMON, use_sliding_window=True, sliding_window=WINDOW, layer_types=layers)
        case "qwen3_moe":
            return Qwen3MoeConfig(**_COMMON, **_EXPERTS, num_experts=4, head_dim=8, norm_topk_prob=True)
        case "deepseek_v3":
            return DeepseekV3Config(
                **{**_COMMON, "num_key_value_heads": 4}, **_EXPERTS, n_routed_experts=4, n_shared_experts=1, n_group=2,
                topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8,
                qk_rope_head_dim=4, v_head_dim=6,
            )  # fmt: skip
        case "gemma2":
            return Gemma2Config(**_COMMON, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=5.0)
        case "bloom":
            return BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, max_position_embeddings=128)
    raise ValueError(architecture)


def make(architecture: str, directory: Path) -> Path:
    """Weights far enough from 0 that attention is not uniform."""
    config = _config(architecture)
    config.initializer_range = 0.3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    return directory
