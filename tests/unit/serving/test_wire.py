"""What a replica and its callers say to each other, and whom callers take to be alive."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from shared.engine.port import SampleChunk, SampleRequest, SamplingSettings
from shared.errors import Retryable
from shared.residency import Replica
from shared.sampling import wire
from shared.sampling.collect import collect
from shared.sampling.directory import AWAY_AFTER_S, ReplicaDirectory
from shared.sampling.fake import FakeSampler
from shared.sampling.port import SampleStream, Served
from tests.serving_kit import ask

_SETTINGS = SamplingSettings(7, 0.5, 0.9, 5, 0.1, 0.2, 0.3, {5: 1.5, 6: -100.0}, (2, 3), 4, 1)


def test_a_request_comes_back_as_it_was_sent() -> None:
    request = SampleRequest("r", (1, 2), _SETTINGS, "acme/adder@1", 3, 2**62, 10)
    assert wire.decode_request(wire.encode_request(request)) == request


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{}", "request_id"),
        (b'{"request_id":"r","prompt":["a"],"settings":{"max_tokens":1}}', "prompt.0"),
        (b'{"request_id":"r","prompt":[1],"settings":{"max_tokens":"many"}}', "settings.max_tokens"),
        (b'1},"x":{', "body"),
    ],
)
def test_a_broken_request_is_refused_by_field(body: bytes, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        wire.decode_request(body)


def test_a_chunk_comes_back_as_it_was_sent_and_is_json_even_with_infinities() -> None:
    low = float("-inf")
    full = SampleChunk(1, (1, 2), (-1.0, low), ({1: -0.5, 2: low}, {3: -0.1}), "stop", (None, -1.0), (None, {1: -2.0}))
    for chunk in (full, SampleChunk(0, (5,)), SampleChunk(0, (), finish_reason="abort")):
        line = wire.encode_chunk(chunk)
        assert wire.decode_line(line).chunk == chunk
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_first_and_last_lines() -> None:
    served = Served("b", "c" * 64, None, None, "mini-0", "boot", "fake")
    assert wire.decode_line(wire.encode_served(served)).served == served
    assert wire.decode_line(wire.encode_done()).done
    error = wire.decode_line(wire.encode_error("engine_down", "gone")).error
    assert error is not None
    assert (error.code, error.message) == ("engine_down", "gone")


async def test_the_fake_streams_what_it_samples_and_seeds_matter() -> None:
    sampler = FakeSampler()
    request = ask("acme/adder@1", n=3, seed=7)
    whole = await sampler.sample("b", request)
    async with sampler.stream("b", request) as stream:
        assert await collect(stream, request) == whole
    assert len({sequence.token_ids for sequence in whole.sequences}) == 3
    assert (await sampler.sample("b", replace(request, seed=8))).sequences != whole.sequences


async def test_a_sequence_that_did_not_finish_is_no_answer() -> None:
    async def cut() -> AsyncIterator[SampleChunk]:
        yield SampleChunk(0, (1,), (-1.0,))

    served = Served("b", "c" * 64, None, None, "mini-0", "boot", "fake")
    with pytest.raises(Retryable, match="ended early"):
        await collect(SampleStream(served, cut()), ask())


def _replica(at: float) -> Replica:
    return Replica(
        replica="mini-0",
        boot_id="boot",
        url="http://127.0.0.1:1",
        base="mini/llama",
        token="mini",
        engine="fake",
        dtype="float32",
        max_rank=8,
        slots=1,
        max_resident=1,
        at=at,
    )


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _directory(clock: _Clock) -> ReplicaDirectory:
    return ReplicaDirectory(None, ttl_s=15.0, clock=clock)  # type: ignore[arg-type]


def _pass(directory: ReplicaDirectory, clock: _Clock, seconds: float) -> None:
    for _ in range(int(seconds)):
        clock.now += 1
        directory.reached()


def test_a_silent_replica_is_out_within_the_ttl() -> None:
    clock = _Clock()
    directory = _directory(clock)
    directory.observe("mini.mini-0", _replica(time.time()).model_dump_json().encode())
    _pass(directory, clock, 14)
    assert len(directory.replicas("mini/llama")) == 1
    assert directory.replicas("other") == []
    _pass(directory, clock, 1)
    assert directory.replicas() == []


def test_an_announcement_that_was_old_when_read_counts_its_age() -> None:
    clock = _Clock()
    directory = _directory(clock)
    directory.observe("mini.mini-0", _replica(time.time() - 10).model_dump_json().encode())
    assert len(directory.replicas()) == 1
    _pass(directory, clock, 6)
    assert directory.replicas() == []


def test_while_the_bus_is_away_the_view_stays_and_afterwards_the_living_have_time_to_speak() -> None:
    clock = _Clock()
    directory = _directory(clock)
    directory.observe("mini.mini-0", _replica(time.time()).model_dump_json().encode())
    clock.now = 1000.0
    assert len(directory.replicas()) == 1
    directory.reached()
    assert len(directory.replicas()) == 1
    _pass(directory, clock, 15 - AWAY_AFTER_S)
    assert directory.replicas() == []
