"""What a caller gets when replicas refuse, break, lie or are lost: on real sockets, each by a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from shared.engine.port import Grammar, SampleRequest, SamplingSettings
from shared.errors import Busy, Outage, Refused
from shared.ports import free_port
from shared.residency import REPLICAS_BUCKET, Replica
from shared.sampling.ledger import Ledger
from shared.sampling.remote import ENGINES, TRIES, RemoteSampler, ReplicaLost
from shared.sampling.wire import encode_done, encode_error
from tests.sampling_stack import Answer, Script, ScriptedReplica, announced, chunk, having, says, served, whole
from tests.serving_kit import MemoryBus, until

BASE, A = "tiny/llama", "acme/adder@1"


def _request(revision: str | None = A, **changes: Any) -> SampleRequest:
    return replace(SampleRequest("r", (1, 2), SamplingSettings(max_tokens=2), revision, seed=3), **changes)


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class _Fleet:
    """Replicas on which the revision is ready, in the order in which the first request meets them."""

    sampler: RemoteSampler
    replicas: list[ScriptedReplica]
    clock: _Clock
    bus: MemoryBus

    def asked(self) -> list[int]:
        return [len(replica.asked) for replica in self.replicas]

    async def announce(self, *replicas: Replica) -> None:
        for replica in replicas:
            await self.bus.kv(REPLICAS_BUCKET).put(f"t.{replica.replica}", replica.model_dump_json().encode())
        await until(lambda: all(r in self.sampler.directory.replicas() for r in replicas))


@asynccontextmanager
async def _fleet(*scripts: Script, **announcement: Any) -> AsyncIterator[_Fleet]:
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(ScriptedReplica(f"r-{i}", script).running())
            for i, script in enumerate(scripts)
        ]
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        bus, clock = MemoryBus(), _Clock()
        sampler = RemoteSampler(bus, http, ledger=Ledger(clock))  # type: ignore[arg-type]
        stack.push_async_callback(sampler.stop)
        fleet = _Fleet(sampler, replicas, clock, bus)
        await sampler.start()
        for place, replica in enumerate(replicas):
            changes = {"ready": having(A), "in_flight": place, **announcement}
            await fleet.announce(replica.announcement(**changes))
        yield fleet


async def _streamed(sampler: RemoteSampler, request: SampleRequest) -> list[int]:
    async with sampler.stream(BASE, request) as stream:
        return [token async for part in stream.chunks for token in part.token_ids]


async def _sampled(sampler: RemoteSampler, request: SampleRequest) -> list[int]:
    return list((await sampler.sample(BASE, request)).sequences[0].token_ids)


Ask = Callable[[RemoteSampler, SampleRequest], Any]
both = pytest.mark.parametrize("ask", [_streamed, _sampled])


def _cut_at_once(_: SampleRequest) -> Answer:
    return Answer(cut=True)


def _cut_after_served(request: SampleRequest) -> Answer:
    return Answer((served(request),), cut=True)


def _ended_after_served(request: SampleRequest) -> Answer:
    return Answer((served(request),))


def _cut_within_a_line(request: SampleRequest) -> Answer:
    return Answer((served(request), chunk(9)[:10]), cut=True)


def _failed_after_served(request: SampleRequest) -> Answer:
    return Answer((served(request), encode_error("engine_down", "the engine died")))


def _another_revision(request: SampleRequest) -> Answer:
    return Answer((served(request, revision="acme/adder@2"), chunk(9, "stop"), encode_done()))


def _another_base(request: SampleRequest) -> Answer:
    return Answer((served(request, base="tiny/other"), chunk(9, "stop"), encode_done()))


def _the_base_instead(request: SampleRequest) -> Answer:
    return Answer((served(request, revision=None, adapter_sha256=None), chunk(9, "stop"), encode_done()))


def _broken_midway(request: SampleRequest) -> Answer:
    return Answer((served(request), chunk(5)), cut=True)


@both
@pytest.mark.parametrize(
    "lost",
    [
        _cut_at_once,
        _cut_after_served,
        _ended_after_served,
        _cut_within_a_line,
        _failed_after_served,
        _another_revision,
        _another_base,
        _the_base_instead,
        says(503, "queue_full", 2),
        says(503, "engine_down", 2),
        says(503, "unavailable", 2),
        says(409, "wrong_base"),
        says(500, "internal"),
        lambda _: Answer((b"<html>",), status=502),
    ],
)
async def test_a_request_of_which_nothing_was_streamed_is_answered_by_another(ask: Ask, lost: Script) -> None:
    async with _fleet(lost, whole) as fleet:
        assert await ask(fleet.sampler, _request()) == [5, 6]
        assert fleet.asked() == [1, 1]
        assert fleet.replicas[1].asked == [_request()]


@both
async def test_a_refused_connection_is_passed_over(ask: Ask) -> None:
    async with _fleet(whole, in_flight=5) as fleet:
        await fleet.announce(announced("gone", ready=having(A), url=f"http://127.0.0.1:{free_port()}"))
        assert await ask(fleet.sampler, _request()) == [5, 6]
        await fleet.announce(announced("nowhere", ready=having(A), url="http://[::1"))
        assert await ask(fleet.sampler, _request()) == [5, 6]


async def test_after_the_first_chunk_a_stream_is_not_begun_again() -> None:
    async with _fleet(_broken_midway, whole) as fleet:
        got: list[int] = []
        async with fleet.sampler.stream(BASE, _request()) as stream:
            got += (await anext(stream.chunks)).token_ids
            with pytest.raises(ReplicaLost, match="r-0"):
                await anext(stream.chunks)
        assert got == [5]
        assert fleet.asked() == [1, 0]


async def test_a_whole_sample_is_asked_again_after_any_loss_since_nothing_was_passed_on() -> None:
    async with _fleet(_broken_midway, whole) as fleet:
        assert await _sampled(fleet.sampler, _request()) == [5, 6]
        assert fleet.asked() == [1, 1]


@both
@pytest.mark.parametrize("lost", [_cut_after_served, _broken_midway])
async def test_three_replicas_at_most_are_asked_for_one_sample(ask: Ask, lost: Script) -> None:
    assert TRIES == 3
    async with _fleet(lost, lost, lost, whole) as fleet:
        with pytest.raises(ReplicaLost):
            await ask(fleet.sampler, _request())
        assert fleet.asked() == ([1, 0, 0, 0] if (ask, lost) == (_streamed, _broken_midway) else [1, 1, 1, 0])


@both
@pytest.mark.parametrize(
    ("script", "error", "code"),
    [
        (says(429, "rate_limited", 7), Busy, "rate_limited"),
        (says(503, "loading", 7, queue_position=3, expected_wait_s=4.5), Busy, "loading"),
        (says(400, "invalid_request"), Refused, "invalid_request"),
        (says(404, "unknown_revision"), Refused, "unknown_revision"),
        (says(409, "refused"), Refused, "refused"),
    ],
)
async def test_what_no_other_replica_would_mend_is_said_at_once(
    ask: Ask, script: Script, error: type[Exception], code: str
) -> None:
    async with _fleet(script, whole) as fleet:
        with pytest.raises(error) as raised:
            await ask(fleet.sampler, _request())
        assert raised.value.code == code  # type: ignore[attr-defined]
        if code == "loading":
            assert (raised.value.queue_position, raised.value.expected_wait_s) == (3, 4.5)  # type: ignore[attr-defined]
        if isinstance(raised.value, Busy):
            assert raised.value.delay_s == 7
        assert fleet.asked() == [1, 0]


@both
async def test_of_several_that_are_full_the_shortest_wait_is_passed_on(ask: Ask) -> None:
    async with _fleet(*(says(503, "queue_full", wait) for wait in (9, 4, 6))) as fleet:
        with pytest.raises(Busy) as busy:
            await ask(fleet.sampler, _request())
        assert (busy.value.code, busy.value.status, busy.value.delay_s) == ("queue_full", 503, 4)
        assert fleet.asked() == [1, 1, 1]


async def test_full_says_more_than_lost_and_an_unknown_wait_less_than_a_known_one() -> None:
    async with _fleet(says(503, "queue_full"), says(503, "queue_full", 6), _cut_at_once) as fleet:
        with pytest.raises(Busy) as busy:
            await _streamed(fleet.sampler, _request())
        assert busy.value.delay_s == 6


@both
async def test_a_wait_that_is_used_up_is_not_begun_again_elsewhere(ask: Ask) -> None:
    async with _fleet(says(503, "queue_full", 2), whole) as fleet:
        with pytest.raises(Busy):
            await ask(fleet.sampler, _request(wait_s=0.0))
        assert fleet.asked() == [1, 0]


@both
async def test_who_says_nothing_of_a_wait_waits_no_longer_at_several_full_replicas_than_at_one(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _fleet(says(503, "queue_full", 2), whole) as fleet:
        monkeypatch.setattr("shared.sampling.remote.WAIT_S", 0.0)
        with pytest.raises(Busy):
            await ask(fleet.sampler, _request())
        assert fleet.asked() == [1, 0]
        fleet.replicas[0].script = says(503, "unavailable", 2)
        assert await ask(fleet.sampler, _request()) == [5, 6]
        assert fleet.asked() == [2, 1]


async def test_the_next_replica_gets_what_is_left_of_the_wait() -> None:
    async with _fleet(says(503, "queue_full", 2), whole) as fleet:
        assert await _streamed(fleet.sampler, _request(wait_s=500.0)) == [5, 6]
        first, second = (replica.asked[0] for replica in fleet.replicas)
        assert first.wait_s == 500.0
        assert second.wait_s is not None
        assert 0 < second.wait_s < 500.0


@pytest.mark.parametrize("lost", [_cut_at_once, _failed_after_served, says(503, "engine_down", 2)])
async def test_a_lost_replica_is_put_aside_for_a_time_so_that_others_do_not_pay_for_it(lost: Script) -> None:
    async with _fleet(lost, whole) as fleet:
        for _ in range(6):
            assert await _streamed(fleet.sampler, _request()) == [5, 6]
        assert fleet.asked() == [1, 6]
        fleet.replicas[0].script = whole
        fleet.clock.now += 5.0
        await _streamed(fleet.sampler, _request())
        assert fleet.asked() == [2, 6]


async def test_another_boot_of_a_lost_replica_is_asked_at_once() -> None:
    async with _fleet(_cut_at_once, whole) as fleet:
        await _streamed(fleet.sampler, _request())
        fleet.replicas[0].script = whole
        await fleet.announce(fleet.replicas[0].announcement(ready=having(A), boot_id="second"))
        await _streamed(fleet.sampler, _request())
        assert fleet.asked() == [2, 1]


@pytest.mark.parametrize("code", ["queue_full", "unavailable", "internal"])
async def test_a_replica_that_answers_is_not_put_aside(code: str) -> None:
    async with _fleet(says(503, code, 2), whole) as fleet:
        await _streamed(fleet.sampler, _request())
        await _streamed(fleet.sampler, _request())
        assert fleet.asked() == [2, 2]


async def test_the_last_replica_is_asked_even_when_it_was_just_lost() -> None:
    async with _fleet(_cut_at_once) as fleet:
        with pytest.raises(ReplicaLost):
            await _streamed(fleet.sampler, _request())
        fleet.replicas[0].script = whole
        assert await _streamed(fleet.sampler, _request()) == [5, 6]


async def test_requests_that_wait_go_elsewhere_when_their_replica_is_lost() -> None:
    gate = asyncio.Event()
    async with _fleet(lambda request: replace(_cut_after_served(request), gate=gate), whole) as fleet:
        await fleet.announce(fleet.replicas[1].announcement(ready=having(A), in_flight=100))
        waiting = [asyncio.create_task(_streamed(fleet.sampler, _request())) for _ in range(20)]
        await until(lambda: fleet.asked() == [20, 0])
        gate.set()
        assert await asyncio.gather(*waiting) == [[5, 6]] * 20
        assert fleet.asked() == [20, 20]


async def test_a_silent_replica_that_stops_announcing_itself_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.sampling.exchange.LOOK_EVERY_S", 0.02)
    async with _fleet(lambda request: replace(whole(request), gate=asyncio.Event()), whole) as fleet:
        waiting = asyncio.create_task(_streamed(fleet.sampler, _request()))
        await until(lambda: fleet.asked() == [1, 0])
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await fleet.bus.kv(REPLICAS_BUCKET).delete("t.r-0")
        assert await waiting == [5, 6]


async def test_open_requests_are_counted_until_they_end_however_they_end() -> None:
    async with _fleet(_cut_after_served, says(400, "invalid_request")) as fleet:
        with pytest.raises(Refused):
            await _streamed(fleet.sampler, _request())
        fleet.replicas[1].script = whole
        async with fleet.sampler.stream(BASE, _request()) as stream:
            await anext(stream.chunks)
        names = fleet.sampler.directory.replicas()
        assert {mine.open for mine in fleet.sampler._ledger.mine(names, A).values()} == {0}


async def test_a_grammar_goes_to_a_replica_that_has_grammars() -> None:
    grammar = replace(_request(), settings=SamplingSettings(max_tokens=2, grammar=Grammar("regex", "a+")))
    async with _fleet(whole, whole) as fleet:
        able = fleet.replicas[1].announcement(ready=having(A), in_flight=9, structured_output=True)
        await fleet.announce(able)
        await _streamed(fleet.sampler, grammar)
        assert fleet.asked() == [0, 1]
        await fleet.announce(able.model_copy(update={"structured_output": False, "at": able.at + 1}))
        await _streamed(fleet.sampler, grammar)
        assert fleet.asked() == [1, 1]


async def test_a_long_request_goes_to_a_replica_whose_context_holds_it() -> None:
    async with _fleet(whole, whole, whole, max_context=3) as fleet:
        await fleet.announce(fleet.replicas[1].announcement(ready=having(A), in_flight=9, max_context=4))
        await fleet.announce(fleet.replicas[2].announcement(ready=having(A), in_flight=99))
        assert await _streamed(fleet.sampler, _request()) == [5, 6]
        assert fleet.asked() == [0, 1, 0]
        longer = replace(_request(), settings=SamplingSettings(max_tokens=3))
        assert await _streamed(fleet.sampler, longer) == [5, 6]
        assert fleet.asked() == [0, 1, 1]
        fits_all = replace(_request(), settings=SamplingSettings(max_tokens=1))
        assert await _streamed(fleet.sampler, fits_all) == [5, 6]
        assert fleet.asked() == [1, 1, 1]


@both
async def test_an_adapter_that_one_replica_refuses_is_tried_where_larger_ranks_go(ask: Ask) -> None:
    refused = says(409, "refused")
    async with _fleet(refused, whole, whole, max_rank=32) as fleet:
        await fleet.announce(fleet.replicas[2].announcement(ready=having(A), in_flight=9, max_rank=64))
        assert await ask(fleet.sampler, _request()) == [5, 6]
        assert fleet.asked() == [1, 0, 1]
        fleet.replicas[2].script = refused
        with pytest.raises(Refused) as refusal:
            await ask(fleet.sampler, _request())
        assert (refusal.value.code, refusal.value.status, fleet.asked()) == ("refused", 409, [2, 0, 2])


async def test_a_refusal_outweighs_trouble_elsewhere_only_where_ranks_are_no_larger() -> None:
    async with _fleet(says(503, "queue_full", 2), says(409, "refused"), max_rank=32) as fleet:
        with pytest.raises(Refused):
            await _streamed(fleet.sampler, _request())
        await fleet.announce(fleet.replicas[0].announcement(ready=having(A), max_rank=64))
        with pytest.raises(Busy):
            await _streamed(fleet.sampler, _request())
        assert fleet.asked() == [2, 2]


@both
@pytest.mark.parametrize("lost", [_failed_after_served, says(503, "engine_down", 2)])
async def test_a_request_under_which_two_engines_were_lost_is_given_to_no_third(ask: Ask, lost: Script) -> None:
    assert ENGINES == 2
    async with _fleet(lost, lost, whole) as fleet:
        with pytest.raises(ReplicaLost):
            await ask(fleet.sampler, _request())
        assert fleet.asked() == [1, 1, 0]


async def _until_finished(sampler: RemoteSampler, request: SampleRequest) -> list[int]:
    """As a caller who stops reading with the last token."""
    got: list[int] = []
    async with sampler.stream(BASE, request) as stream:
        async for part in stream.chunks:
            got += part.token_ids
            if part.finish_reason is not None:
                break
    return got


@pytest.mark.parametrize("ask", [_streamed, _sampled, _until_finished])
async def test_samples_one_after_the_other_share_a_connection(ask: Ask) -> None:
    async with _fleet(whole) as fleet:
        fleet.replicas[0].keeps = True
        for _ in range(3):
            assert await ask(fleet.sampler, _request()) == [5, 6]
        assert (fleet.asked(), fleet.replicas[0].connections) == ([3], 1)


async def test_leaving_before_the_last_token_ends_the_connection() -> None:
    async with _fleet(whole) as fleet:
        fleet.replicas[0].keeps = True
        for _ in range(2):
            async with fleet.sampler.stream(BASE, _request()) as stream:
                assert (await anext(stream.chunks)).token_ids == (5,)
        assert fleet.replicas[0].connections == 2


async def test_an_answer_that_is_cut_after_its_last_token_is_whole_for_who_has_read_it() -> None:
    async with _fleet(lambda request: Answer((served(request), chunk(5), chunk(6, "stop")), cut=True)) as fleet:
        assert await _until_finished(fleet.sampler, _request()) == [5, 6]


async def test_no_replica_at_all_is_an_outage() -> None:
    async with _fleet(whole) as fleet:
        with pytest.raises(Outage, match="no serving replica of tiny/none is alive"):
            await fleet.sampler.sample("tiny/none", _request())
        assert fleet.asked() == [0]


async def test_residency_is_asked_of_every_replica_and_one_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.sampling.remote.REPORT_WAIT_S", 0.3)
    async with _fleet(whole, whole, whole) as fleet:
        fleet.replicas[0].reports = Answer((b'{"replica": "r-0", "slot": ["acme/adder@1"]}',))
        fleet.replicas[2].reports = Answer((b"down",), status=500)
        await fleet.announce(announced("z-gone", url=f"http://127.0.0.1:{free_port()}"))
        await fleet.announce(announced("z-other", base="tiny/other", url=f"http://127.0.0.1:{free_port()}"))
        whole_report, silent, failing, gone = await fleet.sampler.residency(BASE)
        assert whole_report == {"replica": "r-0", "slot": ["acme/adder@1"]}
        assert (silent["replica"], failing["replica"], gone["replica"]) == ("r-1", "r-2", "z-gone")
        assert "no answer" in silent["error"]
        assert "500" in failing["error"]
        assert "ConnectError" in gone["error"]
        assert [report["replica"] for report in await fleet.sampler.residency()][-1] == "z-other"
