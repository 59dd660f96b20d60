"""What the engine contract suite drives: one engine, adapters made on demand, answers collected."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shared.adapters.manifest import Manifest
from shared.bases import Base, load_base
from shared.engine.create import EngineKind, create_engine
from shared.engine.port import InferenceEngine, LoadReport, SampleRequest, SamplingSettings
from shared.engine.settings import EngineSettings
from tests.adapters import write_adapter
from tests.tiny import TINY_NAME, TINY_TOKEN, make_tiny_base

SMOL_NAME, SMOL_TOKEN = "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"
PROMPT = (1, 4093, 198, 1780, 314, 216, 34, 33, 27, 34, 47, 2, 198)
# Strong enough to change every token of a random or real base.
STRONG = 0.2


@dataclass
class Answer:
    """One sequence, put together from its chunks."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    prompt_logprobs: list[tuple[float | None, ...]] = field(default_factory=list)


@dataclass
class Rig:
    engine: InferenceEngine
    base: Base
    directory: Path

    def write(self, revision: str, **adapter: Any) -> tuple[Manifest, Path]:
        where = self.directory / revision.replace("/", "-")
        shutil.rmtree(where, ignore_errors=True)
        return write_adapter(where, self.base, revision, **adapter), where

    async def load(self, revision: str, **adapter: Any) -> LoadReport:
        return await self.engine.load(*self.write(revision, **adapter))

    async def ask(
        self,
        revision: str | None = None,
        *,
        prompt: tuple[int, ...] = PROMPT,
        n: int = 1,
        seed: int = 7,
        **settings: Any,
    ) -> list[Answer]:
        answers = [Answer() for _ in range(n)]
        settings = {"max_tokens": 8, "temperature": 0.0, "logprobs": 0} | settings
        request = SampleRequest(f"r{seed}", prompt, SamplingSettings(**settings), revision=revision, n=n, seed=seed)
        async for chunk in self.engine.sample(request):
            answer = answers[chunk.index]
            answer.tokens.extend(chunk.token_ids)
            answer.logprobs.extend(chunk.logprobs or ())
            answer.top.extend(chunk.top_logprobs or ())
            if chunk.finish_reason is not None:
                answer.reasons.append(chunk.finish_reason)
            if chunk.prompt_logprobs is not None:
                answer.prompt_logprobs.append(chunk.prompt_logprobs)
        return answers

    async def scores(self, revision: str | None = None, prompt: tuple[int, ...] = PROMPT) -> list[float]:
        """The prompt's logprobs under a revision or the base, without the first."""
        (answer,) = await self.ask(revision, prompt=prompt, max_tokens=1, prompt_logprobs=0)
        return [value for value in answer.prompt_logprobs[0] if value is not None]

    def text(self, tokens: list[int]) -> str:
        tokenizer = Tokenizer.from_file(str(self.base.directory / "tokenizer.json"))
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    async def clear(self) -> None:
        """Unload everything. A test leaves nothing in flight."""
        for adapter in await self.engine.resident():
            await self.engine.unload(adapter.revision)


def close_to(ours: list[float], theirs: list[float], tolerance: float) -> bool:
    return len(ours) == len(theirs) and all(abs(a - b) <= tolerance for a, b in zip(ours, theirs, strict=True))


def smollm2() -> Base | None:
    """The converted SmolLM2 of the cache directory, if it is there."""
    cache = Path(os.environ.get("MINT_CACHE", "~/.cache/mint")).expanduser()
    directory = cache / "bases" / SMOL_TOKEN
    return load_base(SMOL_NAME, SMOL_TOKEN, directory) if (directory / "model.safetensors").is_file() else None


def make_rig(kind: EngineKind, directory: Path, base: Base | None = None, **settings: Any) -> Rig:
    """fp32, three slots, four resident adapters, rank up to 16; the tiny base unless one is given."""
    base = base or load_base(TINY_NAME, TINY_TOKEN, make_tiny_base(directory / "base"))
    chosen: dict[str, Any] = {
        "dtype": "float32",
        "slots": 3,
        "max_resident": 4,
        "max_rank": 16,
        "kv_cache_bytes": 2**28,
        "max_context": 512,
        "threads": 2,
    }
    engine = create_engine(kind, base, EngineSettings(state_dir=directory / "state", **(chosen | settings)))
    # What an engine's start dropped, and warns about when collected, goes while warnings are ignored.
    gc.collect()
    return Rig(engine, base, directory)


def peft_greedy(base: Base, directory: Path, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[list[int]]:
    """What plain PEFT says in fp32 with the adapter in `directory`, one prompt after the other."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base.directory, dtype=torch.float32)
    model = PeftModel.from_pretrained(plain, directory).eval()
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(max_tokens):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers
