"""A tiny random Llama with SmolLM2's tokenizer and chat template: the base model of the fast tests.

Nothing is downloaded; the tokenizer comes from the same package as the default base model's and is kept
under the cache directory. The weights depend on the fixed seed alone.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from services.learner.convert_smollm2 import TOKENIZER_FILES, convert_tokenizer

TINY_NAME = "tiny/llama"
TINY_TOKEN = "tiny-llama"


def tokenizer_directory() -> Path:
    """SmolLM2's tokenizer and chat template, made on first use."""
    cache = Path(os.environ.get("MINT_CACHE", "~/.cache/mint")).expanduser()
    return convert_tokenizer(cache / "tokenizers" / "smollm2")


def make_tiny_base(directory: Path, sharpness: float = 1.0, width: int = 64, heads: int = 4) -> Path:
    """Two layers of width 64 (4 heads, 2 for keys and values) in fp32, vocabulary 49152, about 13 MB. vLLM takes
    heads of 32 at least: `width` 256 with 8 of them.

    `sharpness` multiplies all logits. At 1 they lie so close together that no adapter can make a token
    likely; at 20 a policy can learn what to say and when to stop."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20240207)
        model = LlamaForCausalLM(config)
        if sharpness != 1.0:
            model.model.norm.weight.data.mul_(sharpness)
            # the row of the padding, which also ends a turn, is made as zeros
            model.model.embed_tokens.weight.data[config.eos_token_id].normal_(std=config.initializer_range)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2).save_pretrained(directory)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_directory() / name, directory / name)
    return directory


def write_bases_file(path: Path, directory: Path, max_rank: int = 32) -> Path:
    """A `bases.json` that names the tiny base at `directory`."""
    entry = {"name": TINY_NAME, "token": TINY_TOKEN, "directory": str(directory), "max_rank": max_rank}
    path.write_text(json.dumps({"bases": [entry]}), encoding="utf-8")
    return path
