"""A gateway as people's OpenAI clients meet it, with one policy; what they rely on is in `openai_checks`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI

from tests.e2e.runs import Runs
from tests.stacks import StackProcess

KEY = "tml-dev"
QUESTION: list[Any] = [{"role": "user", "content": "What is 17+25?"}]
TEXT = "The capital of France is"


@dataclass(frozen=True)
class Surface:
    """A gateway, a base model that it has, and a policy of that base with its `live` revision. `speaks` is which
    of both is asked where nothing else is said: one that says ordinary tokens."""

    url: str
    client: OpenAI
    base: str
    policy: str
    revision: str
    adapter_sha256: str
    speaks: str

    def chat(self, model: str | None = None, **fields: Any) -> Any:
        """Greedy, of up to 8 tokens, unless said otherwise."""
        ask = {"model": model or self.speaks, "messages": QUESTION, "temperature": 0, "max_tokens": 8} | fields
        return self.client.chat.completions.create(**ask)

    def complete(self, model: str | None = None, **fields: Any) -> Any:
        ask = {"model": model or self.speaks, "prompt": TEXT, "temperature": 0, "max_tokens": 8} | fields
        return self.client.completions.create(**ask)

    def post(self, path: str, **body: Any) -> Any:
        headers = {"authorization": f"Bearer {KEY}"}
        return httpx.post(self.url + path, json=body, headers=headers, trust_env=False).raise_for_status().json()

    def in_flight(self) -> int:
        headers = {"authorization": f"Bearer {KEY}"}
        answer = httpx.get(f"{self.url}/v1/residency", headers=headers, trust_env=False).raise_for_status().json()
        # A replica too busy to report is not idle.
        return sum(replica.get("in_flight", 1) for replica in answer["data"])

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.post("/tokenize", model=self.base, prompt=text)["tokens"]
        return found


@contextmanager
def trained_surface(stack: StackProcess, base: str, policy: str = "acme/client") -> Iterator[Surface]:
    """A policy of one step, and a client for the stack that serves it."""
    data = {"kind": "task", "task": {"kind": "arithmetic"}}
    with Runs(stack) as runs:
        method = {"kind": "sft", "steps": 1, "batch_size": 4, "data": data}
        runs.completed(runs.start(policy, method, key=policy, base=base))
        (revision,) = runs.revisions(policy)
    with OpenAI(base_url=f"{stack.url}/v1", api_key=KEY, timeout=300.0, max_retries=0) as client:
        yield Surface(stack.url, client, base, policy, revision["revision"], revision["adapter_sha256"], policy)
