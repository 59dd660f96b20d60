"""Plain vLLM with a PEFT directory, as its own users run it: `plain_vllm.py ASKED FOUND`, both JSON files."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(asked: Path, found: Path) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    spec = json.loads(asked.read_text())
    llm = LLM(
        model=spec["base"],
        dtype="float32",
        max_model_len=256,
        # By default a share of all memory, which fails beside a stack.
        kv_cache_memory_bytes=2**28,
        enable_lora=True,
        max_lora_rank=8,
        enforce_eager=True,
    )
    answers = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in spec["prompts"]],
        SamplingParams(temperature=0.0, max_tokens=spec["max_tokens"], ignore_eos=True),
        lora_request=LoRARequest("adapter", 1, spec["adapter"]),
    )
    found.write_text(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
