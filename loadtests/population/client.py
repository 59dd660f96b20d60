"""A client of the OpenAI completions API that costs little itself, in a closed or an open loop.

In: requests (`Ask`). Out: one `Answer` each, with its times measured here, whatever became of it, and the
`Load` that they make together. Every answer is streamed. A refusal or a broken stream is an answer with
an `error`, never an exception, so that one failure costs no measurement.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

LOCAL_KEY = "tml-dev"
TIMEOUT_S = 600.0
_WORDS = (
    "river stone winter garden letter market window bridge silver summer doctor island paper music engine"
    " mountain village number station captain planet weather kitchen forest teacher question morning picture"
    " history science answer harbor travel simple quiet broken yellow sudden heavy careful distant bright"
)
# Both ends of text of SmolLM2: with these ruled out every answer has all of its tokens, on every server.
NO_END = {"0": -100.0, "2": -100.0}


@dataclass(frozen=True)
class Ask:
    """`model`: a reference or base name. Greedy, and `max_tokens` long unless `fields` says otherwise."""

    model: str
    prompt: str | list[int]
    max_tokens: int = 32
    fields: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> bytes:
        body = {
            "model": self.model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "logit_bias": NO_END,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        return json.dumps(body, separators=(",", ":")).encode()


@dataclass
class Answer:
    """Times in seconds: `began` and `first` by time.perf_counter, `ttft` and `seconds` since `began`,
    `gaps` between events with text. `status` 0: no answer at all. `tokens` as the server's usage counts."""

    model: str
    began: float
    ttft: float | None = None
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.ttft is not None

    @property
    def revision(self) -> str | None:
        return self.headers.get("mint-revision")

    @property
    def first(self) -> float | None:
        return None if self.ttft is None else self.began + self.ttft


@dataclass(frozen=True)
class Load:
    """What a loop gave; `seconds` from its first request to its last answer."""

    answers: list[Answer]
    seconds: float

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.ok]

    @property
    def errors(self) -> list[str]:
        return [f"{answer.status}: {answer.error or 'no token'}" for answer in self.answers if not answer.ok]

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def requests_per_s(self) -> float:
        return len(self.good) / self.seconds

    @property
    def ttfts(self) -> list[float]:
        return [answer.ttft for answer in self.good if answer.ttft is not None]

    @property
    def gaps(self) -> list[float]:
        return [gap for answer in self.good for gap in answer.gaps]


class Client:
    """One connection pool to one server. `async with Client(url) as client: await client.closed(…)`."""

    def __init__(self, url: str, key: str = LOCAL_KEY, connections: int = 256) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={
                "Authorization": f"Bearer {key}",
                "Content-Type": "application/json",
                "Accept-Encoding": "identity",
            },
            timeout=httpx.Timeout(TIMEOUT_S),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, asked: Ask) -> Answer:
        answer = Answer(asked.model, time.perf_counter())
        try:
            async with self._http.stream("POST", "/v1/completions", content=asked.body()) as response:
                answer.status, answer.headers = response.status_code, response.headers
                if response.status_code != 200:
                    answer.error = (await response.aread()).decode(errors="replace")[:300]
                else:
                    await _read(response, answer)
        except (httpx.HTTPError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.seconds = time.perf_counter() - answer.began
        return answer

    async def closed(self, asks: Iterable[Ask], concurrency: int) -> Load:
        """`concurrency` callers, each with its next request as soon as it has its answer."""
        waiting, answers = iter(asks), list[Answer]()

        async def caller() -> None:
            for asked in waiting:
                answers.append(await self.ask(asked))

        began = time.perf_counter()
        async with asyncio.TaskGroup() as callers:
            for _ in range(concurrency):
                callers.create_task(caller())
        return Load(answers, time.perf_counter() - began)

    async def open(self, asks: Sequence[Ask], rate: float, seed: int = 0) -> Load:
        """Requests as they come: Poisson, `rate` a second, whether or not earlier ones are answered."""
        draw = random.Random(seed)
        began = time.perf_counter()
        due, running = began, list[asyncio.Task[Answer]]()
        async with asyncio.TaskGroup() as group:
            for asked in asks:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                running.append(group.create_task(self.ask(asked)))
                due += draw.expovariate(rate)
        return Load([task.result() for task in running], time.perf_counter() - began)

    async def steadily(self, ask: Callable[[int], Ask], concurrency: int, until: asyncio.Event) -> Load:
        """A closed loop of `ask(0)`, `ask(1)`, … until the event is set; what runs then is answered too."""

        def asks() -> Iterable[Ask]:
            number = 0
            while not until.is_set():
                yield ask(number)
                number += 1

        return await self.closed(asks(), concurrency)


async def _read(response: httpx.Response, answer: Answer) -> None:
    """Server-sent events until `[DONE]`; without it the answer is an error."""
    rest, last = b"", 0.0
    async for data in response.aiter_raw():
        now = time.perf_counter()
        *events, rest = (rest + data).split(b"\n\n")
        for text in events:
            if text == b"data: [DONE]":
                return
            if not text.startswith(b"data: "):
                continue
            event = json.loads(text.removeprefix(b"data: "))
            if "error" in event:
                answer.error = json.dumps(event["error"])[:300]
                return
            if event.get("choices"):
                if answer.ttft is None:
                    answer.ttft = now - answer.began
                else:
                    answer.gaps.append(now - last)
                last = now
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
    answer.error = "the stream ended without [DONE]"


def words(seed: int, count: int = 45) -> str:
    """A prompt of about 1.3 tokens a word; other seeds differ from the first words on, so that no prompt
    finds another's prefix in a cache."""
    draw, known = random.Random(seed), _WORDS.split()
    return f"{seed} " + " ".join(draw.choice(known) for _ in range(count))


def percentile(values: Sequence[float], share: float) -> float:
    """By linear interpolation between ranks; `share` 0.5 is the median. Raises ValueError without values."""
    if not values:
        raise ValueError("no request was answered, so that there is nothing to measure")
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def percentiles(values: Sequence[float], name: str = "", scale: float = 1000.0) -> dict[str, float | None]:
    """`{name}p50`, `p95`, `p99` in milliseconds (of seconds); None where there is no value."""
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {f"{name}{key}": percentile(values, share) * scale if values else None for key, share in shares.items()}


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Half of the range, as a share of the median."""
    return (max(values) - min(values)) / 2 / statistics.median(values)
