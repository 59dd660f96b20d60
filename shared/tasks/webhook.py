"""Rewards that live elsewhere: an HTTP service that scores batches.

Out goes `POST {"items": [{"id", "prompt", "completion", "answer"}]}`, `prompt` being chat messages; back
comes `{"scores": [number]}`, one for each item, in order. Invariants: only hosts on the operators' list are
called, and no redirect leads elsewhere; an answer is bounded in time and size; a failure is an error,
never a score.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from urllib.parse import urlsplit

import httpx
from mint_schemas.training import WebhookReward

from shared.errors import Fatal, Retryable
from shared.tasks.lines import json_kind
from shared.tasks.reward import RewardError, Sample

__all__ = ["HOSTS_SETTING", "Webhook", "webhook_scorer"]

HOSTS_SETTING = "MINT_REWARD_HOSTS"
ANSWER_BYTES = 1024**2
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
MAY_PASS = (408, 425, 429)


class Webhook:
    """A `BatchReward`."""

    def __init__(self, reward: WebhookReward, hosts: frozenset[str], first_delay_s: float = FIRST_DELAY_S) -> None:
        """Raises ValueError for an address that is none or whose host is not among `hosts`."""
        _require_allowed(reward.url, hosts)
        self._reward, self._first_delay_s = reward, first_delay_s
        self.batch_size: int | None = reward.batch_size

    async def scores(self, samples: Sequence[Sample]) -> Sequence[float]:
        """Raises Retryable when the service is away, overloaded or failing after all retries, and Fatal
        when it refuses the request or answers something else than asked for."""
        body = json.dumps({"items": [_item(sample) for sample in samples]}).encode()
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(trust_env=False, follow_redirects=False, limits=limits, timeout=None) as http:
            for attempt in range(self._reward.retries + 1):
                try:
                    status, content = await self._post(http, body)
                except (httpx.TransportError, TimeoutError) as error:
                    problem = f"{type(error).__name__} {error}".strip()
                else:
                    if status == 200:
                        return self._read(content, samples)
                    problem = f"it answered {status}: {content[:300].decode(errors='replace')}"
                    if status < 500 and status not in MAY_PASS:
                        raise Fatal(f"the reward webhook {self._reward.url} refused a batch: {problem}")
                if attempt < self._reward.retries:
                    await asyncio.sleep(min(self._first_delay_s * 2**attempt, LONGEST_DELAY_S))
        tries = self._reward.retries + 1
        raise Retryable(f"the reward webhook {self._reward.url} failed {tries} times, at last: {problem}")

    async def _post(self, http: httpx.AsyncClient, body: bytes) -> tuple[int, bytes]:
        """(status, body). Raises TimeoutError when all of it takes longer than it may."""
        headers = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}
        async with asyncio.timeout(self._reward.timeout_s):
            async with http.stream("POST", self._reward.url, content=body, headers=headers) as response:
                content = b""
                async for chunk in response.aiter_raw(65536):
                    content += chunk
                    if len(content) > ANSWER_BYTES:
                        raise Fatal(f"the reward webhook {self._reward.url} answered more than {ANSWER_BYTES} bytes")
                return response.status_code, content

    def _read(self, content: bytes, samples: Sequence[Sample]) -> list[float]:
        """Raises RewardError; whether the numbers are finite is for the caller, who names the prompt."""
        where = f"the reward webhook {self._reward.url} on prompt {samples[0].id}"
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise RewardError(f"{where} answered no JSON: {content[:200].decode(errors='replace')!r}") from error
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise RewardError(f"{where} answered {json_kind(answer)} without a list `scores`")
        if len(scores) != len(samples):
            raise RewardError(f"{where} answered {len(scores)} scores for {len(samples)} items")
        for sample, score in zip(samples, scores, strict=True):
            if isinstance(score, bool) or not isinstance(score, int | float):
                raise RewardError(
                    f"the reward webhook {self._reward.url} answered {json_kind(score)} as the score of a "
                    f"completion of prompt {sample.id}; a score is a number"
                )
        return scores


def webhook_scorer(reward: WebhookReward) -> str:
    """Named by its address; how it is called does not change what it scores."""
    return f"webhook:{hashlib.sha256(reward.url.encode()).hexdigest()[:16]}"


def _item(sample: Sample) -> dict[str, object]:
    return {"id": sample.id, "prompt": sample.prompt, "completion": sample.completion, "answer": sample.answer}


def _require_allowed(url: str, hosts: frozenset[str]) -> None:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ValueError(f"the reward webhook's address {url!r} is none: {error}") from error
    if not host or parts.username is not None or parts.password is not None:
        raise ValueError(f"the reward webhook's address {url!r} must name a host, without a user or password")
    if httpx.URL(url).host.lower() != host:
        raise ValueError(f"the reward webhook's address {url!r} can be read in two ways; write it plainly")
    written = f"[{host}]" if ":" in host else host
    if not {host, written, f"{written}:{port}"} & hosts:
        allowed = ", ".join(sorted(hosts)) or "none"
        raise ValueError(
            f"the reward webhook's host {written}:{port} is not allowed; allowed are: {allowed}. "
            f"Operators list hosts in {HOSTS_SETTING}, for the catalog, rollout and evaluator"
        )
