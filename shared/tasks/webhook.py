"""Rewards that live elsewhere: an HTTP service that scores batches.

Out goes `POST {"items": [{"id", "prompt", "completion", "answer"}]}`, `prompt` being chat messages; back
comes `{"scores": [number]}`, one for each item, in order. Invariants: only hosts on the operators' list are
called, and no redirect leads elsewhere; an answer is bounded in time and size; a failure is an error,
never a score. Requests are bounded for each webhook alone, so that a slow one delays nobody else.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
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
    """A `BatchReward`. Its connections are kept from batch to batch, until `aclose`."""

    def __init__(
        self,
        reward: WebhookReward,
        hosts: frozenset[str],
        concurrency: int = 4,
        first_delay_s: float = FIRST_DELAY_S,
    ) -> None:
        """`concurrency`: requests at once. Raises ValueError for an address that is none or whose host is
        not among `hosts`."""
        _require_allowed(reward.url, hosts)
        self._reward, self._first_delay_s = reward, first_delay_s
        self._places = asyncio.Semaphore(concurrency)
        self._opening = asyncio.Lock()
        self._client: httpx.AsyncClient | None = None
        self._using, self._retired = 0, False
        self.batch_size: int | None = reward.batch_size

    async def scores(self, samples: Sequence[Sample]) -> Sequence[float]:
        """Raises Retryable when the service is away, overloaded or failing after all retries, and Fatal
        when it refuses the request or answers something else than asked for."""
        body = json.dumps({"items": [_item(sample) for sample in samples]}).encode()
        async with self._http() as http:
            for attempt in range(self._reward.retries + 1):
                try:
                    async with self._places:  # not while it waits for the next attempt
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

    async def aclose(self) -> None:
        """Give the connections back once no batch uses them; a batch that still comes is scored too."""
        self._retired = True
        await self._close_unused()

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[httpx.AsyncClient]:
        self._using += 1
        try:
            async with self._opening:
                if self._client is None:
                    # It reads certificates, which takes tens of milliseconds.
                    self._client = await asyncio.to_thread(_new_client)
            yield self._client
        finally:
            self._using -= 1
            await self._close_unused()

    async def _close_unused(self) -> None:
        if self._retired and not self._using and self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

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


def _new_client() -> httpx.AsyncClient:
    """How many requests run at once and how long they may take is the caller's to bound. Cookies are not
    kept: what a batch scores does not depend on the one before."""
    return httpx.AsyncClient(
        trust_env=False,
        follow_redirects=False,
        timeout=None,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=4),
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
    )


def webhook_scorer(reward: WebhookReward) -> str:
    """Named by its address; how it is called does not change what it scores."""
    return f"webhook:{hashlib.sha256(reward.url.encode()).hexdigest()[:16]}"


def _item(sample: Sample) -> dict[str, object]:
    return {"id": sample.id, "prompt": sample.prompt, "completion": sample.completion, "answer": sample.answer}


def _require_allowed(url: str, hosts: frozenset[str]) -> None:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)
        called = httpx.URL(url).host.lower()
    except (ValueError, httpx.InvalidURL) as error:
        raise ValueError(f"the reward webhook's url {url!r} is no address: {error}") from error
    if not host or parts.username is not None or parts.password is not None:
        raise ValueError(f"the reward webhook's url {url!r} must name a host, without a user or password")
    if called != host:
        raise ValueError(f"the reward webhook's url {url!r} can be read in two ways; write it plainly")
    written = f"[{host}]" if ":" in host else host
    if not {host, written, f"{written}:{port}"} & hosts:
        allowed = ", ".join(sorted(hosts)) or "none"
        raise ValueError(
            f"the reward webhook's host {written}:{port} is not allowed; allowed are: {allowed}. "
            f"Operators list hosts in {HOSTS_SETTING}, for the catalog, rollout and evaluator"
        )
