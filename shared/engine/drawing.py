"""Drawing one token from one row of logits: temperature, filters, penalties, logprobs.

Used by the engines whose forward pass is ours (Transformers, fake). The order is vLLM's: bias and
penalties, temperature, min_p, then top_k and top_p, and logprobs of the distribution that is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.engine.port import SamplingSettings

Row = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Drawn:
    token: int
    logprob: float | None
    top: dict[int, float] | None


def log_softmax(logits_V: Row) -> Row:
    shifted = logits_V - logits_V.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum(dtype=np.float64)), dtype=np.float32)


def draw(logits_V: Row, settings: SamplingSettings, sampled: Sequence[int], rng: np.random.Generator) -> Drawn:
    """Draw by the inverse of the cumulative distribution; temperature 0 takes the most likely token.

    `logits_V` is float32 [vocabulary]; `sampled` are the tokens that this sequence has so far."""
    scores_V = _adjust(logits_V, settings, sampled)
    if settings.temperature == 0:
        logprobs_V = log_softmax(scores_V) if settings.logprobs is not None else scores_V
        token = int(np.argmax(scores_V))
    else:
        logprobs_V = log_softmax(_filter(scores_V / np.float32(settings.temperature), settings))
        cumulative = np.cumsum(np.exp(logprobs_V, dtype=np.float64))
        token = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    if settings.logprobs is None:
        return Drawn(token, None, None)
    return Drawn(token, float(logprobs_V[token]), top_logprobs(logprobs_V, settings.logprobs, token))


def top_logprobs(logprobs_V: Row, k: int, token: int) -> dict[int, float]:
    """The k most likely tokens and `token` itself. Tokens that filters removed are left out."""
    found = {token: float(logprobs_V[token])}
    if k:
        best = np.argpartition(-logprobs_V, k - 1)[:k]
        order = best[np.argsort(-logprobs_V[best], kind="stable")]
        found = {int(i): float(logprobs_V[i]) for i in order if np.isfinite(logprobs_V[i])} | found
    return found


def _adjust(logits_V: Row, settings: SamplingSettings, sampled: Sequence[int]) -> Row:
    if not (settings.logit_bias or settings.presence_penalty or settings.frequency_penalty):
        return logits_V
    scores_V = logits_V.copy()
    for token, bias in settings.logit_bias.items():
        scores_V[token] += bias
    if sampled:
        tokens, counts = np.unique(np.asarray(sampled), return_counts=True)
        scores_V[tokens] -= settings.presence_penalty + settings.frequency_penalty * counts
    return scores_V


def _filter(scores_V: Row, settings: SamplingSettings) -> Row:
    """Minus infinity for what min_p, top_k and top_p remove; the most likely token always stays."""
    if settings.min_p > 0:
        scores_V = np.where(scores_V < scores_V.max() + np.log(settings.min_p), np.float32(-np.inf), scores_V)
    if 0 < settings.top_k < len(scores_V):
        bound = np.partition(scores_V, -settings.top_k)[-settings.top_k]
        scores_V = np.where(scores_V < bound, np.float32(-np.inf), scores_V)
    if settings.top_p < 1:
        order = np.argsort(-scores_V, kind="stable")
        before = np.cumsum(np.exp(log_softmax(scores_V)[order], dtype=np.float64))
        keep = order[: int(np.searchsorted(before, settings.top_p, side="left")) + 1]
        kept = np.full_like(scores_V, -np.inf)
        kept[keep] = scores_V[keep]
        scores_V = kept
    return scores_V
