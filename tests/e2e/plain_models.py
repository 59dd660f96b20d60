"""A base, with or without a PEFT directory on it, as people load them without us: Transformers and PEFT in fp32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from shared.operations.payload import Array, Row

VLLM_TIMEOUT_S = 240


def rows(seed: int, lengths: Sequence[int] = (9, 30, 5, 17), vocabulary: int = 49152) -> list[Row]:
    """Random tokens for cross_entropy, each with a weight of 1."""
    generator = np.random.default_rng(seed)
    return [row_of(generator.integers(3, vocabulary, length + 1).tolist()) for length in lengths]


def row_of(tokens: Sequence[int]) -> Row:
    """Each token predicts the next."""
    ids = np.asarray(tokens, np.int64)
    return Row(ids[:-1].copy(), {"target_tokens": ids[1:].copy(), "weights": np.ones(len(ids) - 1, np.float32)})


def logprobs(base: Path, data: Sequence[Row], adapter: Path | None = None) -> list[Array]:
    """Of the targets, float64; one row at a time."""
    model = _loaded(base)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    return [_scored(model, row) for row in data]


def make_adapter(base: Path, directory: Path, seed: int, std: float = 0.05, **config: Any) -> Path:
    """A PEFT directory of a random adapter, none of its B zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(_loaded(base), LoraConfig(task_type="CAUSAL_LM", **config))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(directory)
    return directory


def vllm_greedy(
    base: Path, adapter: Path, prompts: Sequence[Sequence[int]], max_tokens: int, work: Path
) -> list[list[int]]:
    """What plain vLLM says with the adapter in fp32, in a process of its own."""
    asked, found = work / "asked.json", work / "found.json"
    spec = {"base": str(base), "adapter": str(adapter), "prompts": prompts, "max_tokens": max_tokens}
    asked.write_text(json.dumps(spec))
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1"}
    cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2", "VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("plain_vllm.py")), str(asked), str(found)],
        env=os.environ | offline | cpu,
        capture_output=True,
        text=True,
        timeout=VLLM_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[list[int]] = json.loads(found.read_text())
    return answers


def _loaded(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True).eval()


def _scored(model: Any, row: Row) -> Array:
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(row.tokens)[None]).logits[0].double()
    targets = torch.from_numpy(row.inputs["target_tokens"])[:, None]
    found: Array = torch.log_softmax(logits, -1).gather(1, targets)[:, 0].numpy()
    return found
