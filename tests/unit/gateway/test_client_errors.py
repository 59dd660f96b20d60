"""Every failure as the openai client's own exception, with what it needs to come back."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from shared.errors import Busy, Fatal, Outage, Refused, Retryable
from tests.unit.gateway.kit import BASE, Kit

BUSY_503 = Busy("7 loads stand before it", "queue_full", 503, 4.2, queue_position=7, expected_wait_s=4.2)
BUSY_429 = Busy("acme has 8 requests in flight, 8 are allowed", "rate_limited", 429, 1.5)


@pytest.mark.parametrize(
    ("failure", "kind", "status", "code", "retry_after"),
    [
        (BUSY_503, openai.InternalServerError, 503, "queue_full", "5"),
        (BUSY_429, openai.RateLimitError, 429, "rate_limited", "2"),
        (Outage("no serving replica is alive"), openai.InternalServerError, 503, "unavailable", "2"),
        (Retryable("the engine restarts", delay_s=30), openai.InternalServerError, 503, "unavailable", "30"),
        (Fatal("the proof failed"), openai.InternalServerError, 500, "failed", None),
        (Refused("no such revision", "unknown", [], 404), openai.NotFoundError, 404, "unknown", None),
        (Refused("another base", "wrong_base", [], 409), openai.ConflictError, 409, "wrong_base", None),
        (Refused("too long", "invalid_request", [], 422), openai.BadRequestError, 400, "invalid_request", None),
    ],
    ids=lambda value: getattr(value, "code", None),
)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_is_the_clients_own_exception(
    kit: Kit,
    endpoint: str,
    stream: bool,
    failure: Exception,
    kind: type[openai.APIStatusError],
    status: int,
    code: str,
    retry_after: str | None,
) -> None:
    kit.sampler.failure = failure
    with pytest.raises(kind) as caught:
        await _ask(kit.openai(), endpoint, stream)
    error = caught.value
    assert (error.status_code, error.code) == (status, code)
    assert str(failure) in error.message
    assert error.response.headers.get("retry-after") == retry_after
    assert isinstance(error.body, dict)
    assert error.body["type"] in ("server_error", "rate_limit_error", "invalid_request_error")
    assert error.request_id == error.response.headers["x-request-id"]


async def test_the_place_in_the_queue_is_in_the_body(kit: Kit) -> None:
    kit.sampler.failure = BUSY_503
    with pytest.raises(openai.InternalServerError) as caught:
        await _ask(kit.openai(), "chat", stream=False)
    body: Any = caught.value.body
    assert (body["queue_position"], body["expected_wait_s"]) == (7, 4.2)


async def test_the_client_comes_back_by_itself_after_a_busy_answer(kit: Kit) -> None:
    kit.sampler.failure = Busy("one load stands before it", "loading", 503, 0.001)
    client = kit.openai().with_options(max_retries=1)
    waited: list[float] = []

    async def no_wait(self: Any, *, retries_taken: int, response: Any, **_: Any) -> None:
        waited.append(float(response.headers["retry-after"]))
        kit.sampler.failure = None

    client._sleep_for_retry = no_wait.__get__(client)  # type: ignore[method-assign]
    answer: Any = await _ask(client, "chat", stream=False)
    assert answer.choices[0].message.content == "from base"
    assert waited == [1.0]
    assert len(kit.sampler.requests) == 2


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_a_failure_midway_reaches_the_reader_of_the_stream(kit: Kit, endpoint: str) -> None:
    kit.sampler.failure_midway = Retryable("the replica was lost; ask again")
    stream: Any = await _ask(kit.openai(), endpoint, stream=True)
    with pytest.raises(openai.APIError, match="the replica was lost"):
        async for _ in stream:
            pass
    assert kit.sampler.open == []


async def _ask(client: openai.AsyncOpenAI, endpoint: str, stream: bool) -> object:
    if endpoint == "chat":
        return await client.chat.completions.create(
            model=BASE, messages=[{"role": "user", "content": "hi"}], stream=stream
        )
    return await client.completions.create(model=BASE, prompt="hi", stream=stream)
