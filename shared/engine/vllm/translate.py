"""The port's words and vLLM's: settings to SamplingParams, outputs to chunks."""

from __future__ import annotations

import math
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from shared.engine.port import FinishReason, Grammar, SampleChunk, SamplingSettings


def sampling_params(
    settings: SamplingSettings, seed: int, with_prompt: bool, grammar_end: int | None = None
) -> SamplingParams:
    """One sequence. Ends at `stop_token_ids` and `max_tokens` only, and under a grammar at `grammar_end`: the one
    token that vLLM allows once the grammar is fulfilled. `with_prompt`: sequence 0 alone answers prompt logprobs.

    Raises ValueError for a temperature that vLLM would change (below 0.01) where logprobs are asked for:
    they would be of another distribution than the caller's."""
    stops = list(settings.stop_token_ids)
    if settings.grammar is not None and grammar_end is not None and grammar_end not in stops:
        stops.append(grammar_end)
    params = SamplingParams(
        n=1,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=max(settings.top_k, 0),
        min_p=settings.min_p,
        presence_penalty=settings.presence_penalty,
        frequency_penalty=settings.frequency_penalty,
        logit_bias=dict(settings.logit_bias) or None,
        stop_token_ids=stops,
        ignore_eos=True,
        seed=seed if settings.temperature > 0 else None,
        logprobs=settings.logprobs,
        prompt_logprobs=settings.prompt_logprobs if with_prompt else None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=_structured(settings.grammar),
    )
    if settings.logprobs is not None and params.temperature != settings.temperature:
        raise ValueError(
            f"temperature is {settings.temperature}; with logprobs it must be 0 or at least {params.temperature} "
            "in this engine"
        )
    return params


def _structured(grammar: Grammar | None) -> StructuredOutputsParams | None:
    if grammar is None:
        return None
    if grammar.kind == "regex":
        return StructuredOutputsParams(regex=grammar.text)
    return StructuredOutputsParams(json=grammar.text)


def chunk_of(index: int, output: Any, prompt: tuple[int, ...], settings: SamplingSettings) -> SampleChunk:
    """A RequestOutput (delta) of one sequence as a chunk."""
    completion = output.outputs[0]
    tokens = tuple(completion.token_ids)
    logprobs = top = None
    if settings.logprobs is not None:
        rows = completion.logprobs
        logprobs = tuple(float(row[token].logprob) for token, row in zip(tokens, rows, strict=True))
        top = tuple(_finite(row) for row in rows) if settings.logprobs else None
    prompt_logprobs = prompt_top = None
    if output.prompt_logprobs:
        rows = output.prompt_logprobs
        prompt_logprobs = (None, *(float(row[token].logprob) for token, row in zip(prompt[1:], rows[1:], strict=True)))
        prompt_top = (None, *(_finite(row) for row in rows[1:])) if settings.prompt_logprobs else None
    return SampleChunk(
        index=index,
        token_ids=tokens,
        logprobs=logprobs,
        top_logprobs=top,
        finish_reason=_reason(completion.finish_reason),
        prompt_logprobs=prompt_logprobs,
        prompt_top_logprobs=prompt_top,
    )


def _finite(row: Any) -> dict[int, float]:
    """Filters leave minus infinity behind, which is no JSON number; such tokens are left out."""
    return {int(token): float(entry.logprob) for token, entry in row.items() if math.isfinite(entry.logprob)}


def _reason(reason: str | None) -> FinishReason | None:
    if reason is None or reason == "stop":
        return reason  # type: ignore[return-value]
    return "length" if reason == "length" else "abort"
