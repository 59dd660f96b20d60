"""Asking through the OpenAI routes, with the headers that say which revision answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cli.errors import CliError
from cli.gateway import Gateway

COMPLETIONS = "/v1/chat/completions"


def complete(gateway: Gateway, request: dict[str, Any]) -> dict[str, Any]:
    """`{"text", "revision", "adapter_sha256", "response"}`; `revision` is None for a base model."""
    body, headers = gateway.post_with_headers(COMPLETIONS, request)
    return {
        "text": body["choices"][0]["message"]["content"],
        "revision": headers.get("mint-revision"),
        "adapter_sha256": headers.get("mint-adapter-sha256"),
        "response": body,
    }


def stream(gateway: Gateway, request: dict[str, Any]) -> Iterator[str]:
    """The answer's text as it is generated. Raises CliError if the stream reports an error."""
    for event in gateway.stream(COMPLETIONS, {**request, "stream": True}):
        if "error" in event:
            raise CliError(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices", []):
            piece = choice.get("delta", {}).get("content")
            if piece:
                yield piece
