"""What a sample request may ask of an engine, and the seeds of its sequences."""

from __future__ import annotations

import hashlib
import math
import secrets

from shared.engine.port import Capabilities, SampleRequest, SamplingSettings

MIN_TEMPERATURE = 1e-5
"""Logits divided by less leave float32: the row would be no distribution any more."""


def check_request(request: SampleRequest, has: Capabilities, vocab_size: int) -> None:
    """Raises ValueError naming the field and its bound for a request that the engine cannot serve."""
    settings = request.settings
    if not request.prompt:
        raise ValueError("prompt is empty; at least 1 token is needed")
    if not all(0 <= token < vocab_size for token in request.prompt):
        raise ValueError(f"prompt has token ids outside 0 to {vocab_size - 1}")
    if request.n < 1:
        raise ValueError(f"n is {request.n}; it must be at least 1")
    if settings.max_tokens < 1:
        raise ValueError(f"max_tokens is {settings.max_tokens}; it must be at least 1")
    total = len(request.prompt) + settings.max_tokens
    if total > has.max_context:
        raise ValueError(
            f"prompt ({len(request.prompt)}) + max_tokens ({settings.max_tokens}) is {total} tokens; "
            f"max_context is {has.max_context}"
        )
    _check_settings(settings, has, vocab_size)


def _check_settings(settings: SamplingSettings, has: Capabilities, vocab_size: int) -> None:
    bounds = {
        "temperature": (settings.temperature, 0.0, 100.0),
        "min_p": (settings.min_p, 0.0, 1.0),
        "presence_penalty": (settings.presence_penalty, -2.0, 2.0),
        "frequency_penalty": (settings.frequency_penalty, -2.0, 2.0),
    }
    for name, (value, low, high) in bounds.items():
        if not (math.isfinite(value) and low <= value <= high):
            raise ValueError(f"{name} is {value}; it must be within {low} to {high}")
    if not 0.0 < settings.top_p <= 1.0:
        raise ValueError(f"top_p is {settings.top_p}; it must be above 0 and at most 1")
    if 0 < settings.temperature < MIN_TEMPERATURE:
        raise ValueError(f"temperature is {settings.temperature}; it must be 0 (greedy) or at least {MIN_TEMPERATURE}")
    if settings.top_k != -1 and not 1 <= settings.top_k < 2**31:
        raise ValueError(f"top_k is {settings.top_k}; it must be -1 (off) or within 1 to {2**31 - 1}")
    for name, count in (("logprobs", settings.logprobs), ("prompt_logprobs", settings.prompt_logprobs)):
        if count is not None and not 0 <= count <= has.max_logprobs:
            raise ValueError(f"{name} is {count}; it must be within 0 to {has.max_logprobs}")
    for token, bias in settings.logit_bias.items():
        if not 0 <= token < vocab_size or not -100.0 <= bias <= 100.0:
            raise ValueError(f"logit_bias {token}: {bias}; tokens are 0 to {vocab_size - 1}, biases -100 to 100")
    if not all(0 <= token < vocab_size for token in settings.stop_token_ids):
        raise ValueError(f"stop_token_ids holds ids outside 0 to {vocab_size - 1}")
    for name, declared, used in (
        ("min_p", has.min_p, settings.min_p != 0),
        (
            "presence_penalty and frequency_penalty",
            has.penalties,
            settings.presence_penalty or settings.frequency_penalty,
        ),
        ("logit_bias", has.logit_bias, bool(settings.logit_bias)),
        ("structured output (json_schema, regex)", has.structured_output, settings.grammar is not None),
    ):
        if used and not declared:
            raise ValueError(f"engine {has.name} has no {name}")


def sequence_seeds(seed: int | None, n: int) -> list[int]:
    """One 63-bit seed per sequence, from (seed, index) by hash: seeds of near requests never meet.
    Without a seed they are random."""
    if seed is None:
        return [secrets.randbits(63) for _ in range(n)]
    return [
        int.from_bytes(hashlib.sha256(f"mint-sequence|{seed}|{i}".encode()).digest()[:8], "big") >> 1 for i in range(n)
    ]
