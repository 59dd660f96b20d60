"""Asking through the `openai` package, as anybody's client would."""

from __future__ import annotations

from dataclasses import dataclass

from openai import OpenAI

from cli.gateway import LOCAL_KEY


@dataclass(frozen=True)
class Answer:
    """`revision` is what the response headers name, None for a base model."""

    question: str
    text: str
    model: str
    revision: str | None
    adapter_sha256: str | None


def ask(url: str, model: str, questions: list[str], max_tokens: int) -> list[Answer]:
    """Greedy answers, one request each."""
    with OpenAI(base_url=f"{url}/v1", api_key=LOCAL_KEY, timeout=120.0, max_retries=2) as client:
        return [_one(client, model, question, max_tokens) for question in questions]


def _one(client: OpenAI, model: str, question: str, max_tokens: int) -> Answer:
    raw = client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0.0,
    )
    answer = raw.parse()
    return Answer(
        question=question,
        text=(answer.choices[0].message.content or "").strip(),
        model=answer.model,
        revision=raw.headers.get("mint-revision"),
        adapter_sha256=raw.headers.get("mint-adapter-sha256"),
    )
