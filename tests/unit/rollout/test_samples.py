"""Sample operations: seeds, stops, prompt logprobs, and what is whose fault."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.rollout import samples
from services.rollout.samples import OperationSampler, UserFault
from services.rollout.stop_text import StopText
from shared.catalog.operations import SampleTaken
from shared.engine.port import SampleChunk, SampleRequest
from shared.errors import Busy, Outage, Refused, Retryable
from shared.operations.payload import SamplePayload, SampleResult
from shared.rl.seeds import derive_seed
from shared.sampling.fake import FakeSampler, token_logprob
from shared.sampling.port import INTERACTIVE, SampleStream
from shared.text import TextCodec
from tests.sampling import ADAPTER_SHA256, BASE_SHA256, REVISION, load_codec, small_base

TAKEN = SampleTaken(
    status="granted", epoch=1, tenant="acme", base="tiny/llama", revision=REVISION, adapter_sha256=ADAPTER_SHA256
)
PROMPT = np.asarray([5, 6, 7, 8], np.int64)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec()


class Replica(FakeSampler):
    """Prompt logprobs as an engine gives them: once, with the first chunk. `breaks` cuts that many streams after
    a token; `most` is how many streams were open at once."""

    def __init__(self, *arguments: Any, breaks: int = 0) -> None:
        super().__init__(*arguments)
        self.breaks, self.most = breaks, 0

    @asynccontextmanager
    async def stream(self, base: str, request: SampleRequest) -> AsyncIterator[SampleStream]:
        async with super().stream(base, request) as stream:
            self.most = max(self.most, self.open_streams)
            yield SampleStream(stream.served, self._with_prompt(request, stream.chunks))

    async def _with_prompt(
        self, request: SampleRequest, chunks: AsyncIterator[SampleChunk]
    ) -> AsyncIterator[SampleChunk]:
        k = request.settings.prompt_logprobs
        first = True
        async for chunk in chunks:
            await asyncio.sleep(0)
            if first and k is not None:
                values = (None, *(token_logprob(token) for token in request.prompt[1:]))
                tops = (None, *({1: -3.0, token: -4.0, 2: -0.5, 3: -math.inf} for token in request.prompt[1:]))
                chunk = replace(chunk, prompt_logprobs=values, prompt_top_logprobs=tops if k else None)
            yield chunk
            if self.breaks:
                self.breaks -= 1
                raise Retryable("replica fake-0 broke off", delay_s=0.0)
            first = False


def saying(codec: TextCodec, text: str) -> Replica:
    return Replica(lambda request, index: tuple(codec.encode(text)), {REVISION: ADAPTER_SHA256}, BASE_SHA256)


def hashed(**changes: Any) -> Replica:
    return Replica(None, {REVISION: ADAPTER_SHA256}, BASE_SHA256, **changes)


async def sample(
    replica: FakeSampler, codec: TextCodec, asked: SamplePayload, request_id: str = "op-1", **changes: Any
) -> SampleResult:
    patience, places = changes.pop("patience_s", 30.0), changes.pop("places", 8)
    sampler = OperationSampler(replica, small_base(), codec, asyncio.Semaphore(places), patience)
    return await sampler.sample(request_id, TAKEN.model_copy(update=changes), asked, lambda: None)


def asking(**changes: Any) -> SamplePayload:
    return SamplePayload(**{"prompt": PROMPT, "num_samples": 2, "max_tokens": 6, "seed": 11, **changes})


async def test_each_sequence_is_a_request_of_its_own_with_a_seed_of_its_own(codec: TextCodec) -> None:
    replica = hashed()
    result = await sample(replica, codec, asking(num_samples=3, temperature=0.5, top_k=9, top_p=0.8))
    asked = sorted(replica.requests, key=lambda request: request.request_id)
    assert [request.seed for request in asked] == [derive_seed("tinker", 11, i) for i in range(3)]
    assert len({tuple(s.tokens.tolist()) for s in result.sequences}) == 3
    for request, sequence in zip(asked, result.sequences, strict=True):
        assert (request.n, request.tenant, request.priority) == (1, "acme", INTERACTIVE)
        assert (request.revision, request.prompt) == (REVISION, (5, 6, 7, 8))
        settings = request.settings
        assert (settings.temperature, settings.top_k, settings.top_p, settings.max_tokens) == (0.5, 9, 0.8, 6)
        assert (settings.stop_token_ids, settings.logprobs, settings.prompt_logprobs) == (codec.eos_ids, 0, None)
        assert sequence.tokens.dtype == np.int64
        assert sequence.logprobs.dtype == np.float32
        assert sequence.stop_reason == "length"
        wanted = [np.float32(token_logprob(token)) for token in sequence.tokens.tolist()]
        assert sequence.logprobs.tolist() == wanted
    assert (result.revision, result.adapter_sha256) == (REVISION, ADAPTER_SHA256)
    assert result.prompt_logprobs is None
    assert result.topk is None


async def test_without_a_seed_the_same_operation_still_gives_the_same_sequences(codec: TextCodec) -> None:
    def drawn(result: SampleResult) -> list[list[int]]:
        return [sequence.tokens.tolist() for sequence in result.sequences]

    first = await sample(hashed(), codec, asking(seed=None))
    again = await sample(hashed(), codec, asking(seed=None))
    other = await sample(hashed(), codec, asking(seed=None), request_id="op-2")
    assert drawn(first) == drawn(again)
    assert drawn(first) != drawn(other)


async def test_the_base_model_is_sampled_without_a_revision(codec: TextCodec) -> None:
    replica = hashed()
    result = await sample(replica, codec, asking(), revision=None, adapter_sha256=None)
    assert {request.revision for request in replica.requests} == {None}
    assert (result.revision, result.adapter_sha256) == ("", "")


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("one two\n\nUser: three four five six", ("\n\nUser:",)),
        ("the answer is 42. And more.", ("42.",)),
        ("a b c d e f", ("d", "c d")),
        ("größer als 🙂 gedacht und weiter", ("🙂",)),
        ("nothing in here stops", ("STOP", "###")),
        ("<|im_end|> is text too, then more", ("<|im_end|>",)),
        ("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab cd ef", ("b c",)),
    ],
)
async def test_a_sequence_ends_with_the_token_that_completes_a_stop_string(
    codec: TextCodec, text: str, stops: tuple[str, ...]
) -> None:
    replica, ids = saying(codec, text), codec.encode(text)
    result = await sample(replica, codec, asking(num_samples=1, max_tokens=200, stop_strings=stops))
    ends = (n for n in range(1, len(ids) + 1) if any(s in codec.decode(ids[:n], skip_special=False) for s in stops))
    wanted = next(ends, len(ids))
    (sequence,) = result.sequences
    assert sequence.tokens.tolist() == ids[:wanted]
    assert len(sequence.logprobs) == wanted
    assert sequence.stop_reason == "stop"
    assert replica.open_streams == 0
    assert replica.requests[0].settings.stop_token_ids == codec.eos_ids


async def test_a_stop_string_ends_a_sequence_that_would_be_cut_for_its_length(codec: TextCodec) -> None:
    ids = codec.encode("one two three four")
    replica = saying(codec, "one two three four")
    result = await sample(replica, codec, asking(num_samples=1, max_tokens=len(ids), stop_strings=("four",)))
    assert result.sequences[0].stop_reason == "stop"
    result = await sample(replica, codec, asking(num_samples=1, max_tokens=len(ids), stop_strings=("five",)))
    assert result.sequences[0].stop_reason == "length"


def test_stop_text_says_so_once_and_goes_on_saying_so(codec: TextCodec) -> None:
    text = StopText(codec, ("b",))
    assert [text.push(token) for token in codec.encode("a b c")] == [False, True, True]
    assert not StopText(codec, ()).push(5)


def test_a_long_stop_string_is_looked_for_in_no_more_text_than_it_has(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = codec.encode("many different words " * 200)
    stop, decode = codec.decode(words[-300:]), codec.decode
    first = next(n for n in range(1, len(words) + 1) if stop in decode(words[:n], skip_special=False))
    lengths: list[int] = []

    def counted(ids: Sequence[int], skip_special: bool = True) -> str:
        text = decode(ids, skip_special)
        lengths.append(len(text))
        return text

    monkeypatch.setattr(codec, "decode", counted)
    text = StopText(codec, (stop,))
    found = [text.push(token) for token in words]
    assert found.index(True) + 1 == first
    assert max(lengths) < len(stop) + 60


async def test_stop_tokens_stand_in_place_of_the_bases_own(codec: TextCodec) -> None:
    replica = hashed()
    await sample(replica, codec, asking(stop_tokens=(9, 10)))
    assert {request.settings.stop_token_ids for request in replica.requests} == {(9, 10)}


async def test_nothing_stops_what_shall_not_stop(codec: TextCodec) -> None:
    replica = hashed()
    await sample(replica, codec, asking(ignore_eos=True))
    assert {request.settings.stop_token_ids for request in replica.requests} == {()}


async def test_without_max_tokens_the_context_is_the_bound(codec: TextCodec) -> None:
    replica = saying(codec, "short")
    await sample(replica, codec, asking(max_tokens=None))
    assert {request.settings.max_tokens for request in replica.requests} == {1020}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": np.arange(3, 1027)}, "the prompt has 1024 tokens; the context of tiny/llama is 1024"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"stop_strings": ("",)}, "a stop string is empty"),
    ],
)
async def test_what_cannot_be_sampled_is_its_callers_fault(
    codec: TextCodec, changes: dict[str, Any], reason: str
) -> None:
    replica = hashed()
    with pytest.raises(UserFault, match=reason):
        await sample(replica, codec, asking(**changes))
    assert not replica.requests


async def test_prompt_logprobs_are_asked_for_once_and_begin_with_nothing(codec: TextCodec) -> None:
    replica = hashed()
    result = await sample(replica, codec, asking(num_samples=3, prompt_logprobs=True, topk_prompt_logprobs=2))
    assert sorted(str(request.settings.prompt_logprobs) for request in replica.requests) == ["2", "None", "None"]
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs.dtype == np.float32
    assert math.isnan(result.prompt_logprobs[0])
    assert result.prompt_logprobs[1:].tolist() == [np.float32(token_logprob(token)) for token in (6, 7, 8)]
    assert result.topk == ((), *[((2, -0.5), (1, -3.0))] * 3)


async def test_prompt_logprobs_alone_bring_no_alternatives(codec: TextCodec) -> None:
    replica = hashed()
    result = await sample(replica, codec, asking(num_samples=1, prompt_logprobs=True))
    assert replica.requests[0].settings.prompt_logprobs == 0
    assert result.topk is None
    assert result.prompt_logprobs is not None


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (Refused("no such revision", code="unknown_revision", status=404), "acme/adder@3 can no longer be sampled"),
        (Refused("temperature is 101", code="invalid_request"), "temperature is 101"),
    ],
)
async def test_a_refusal_of_what_was_asked_is_its_callers_fault(
    codec: TextCodec, refusal: Refused, reason: str
) -> None:
    replica = hashed()
    replica.failures = [refusal]
    with pytest.raises(UserFault, match=reason):
        await sample(replica, codec, asking(num_samples=1))


async def test_an_adapter_that_cannot_be_served_is_not_its_callers_fault(codec: TextCodec) -> None:
    replica = hashed()
    replica.failures = [Refused("tensors differ", code="refused", status=409)]
    with pytest.raises(Retryable, match="serving refused to sample acme/adder@3: tensors differ"):
        await sample(replica, codec, asking(num_samples=1))


@pytest.mark.parametrize("changes", [{"adapter_sha256": "f" * 64}, {"adapter_sha256": None}])
async def test_what_another_adapter_said_is_not_used(codec: TextCodec, changes: dict[str, Any]) -> None:
    with pytest.raises(Retryable, match="adapter sha256"):
        await sample(hashed(), codec, asking(), patience_s=0.0, **changes)


async def test_a_crowded_or_lost_replica_is_waited_for_within_patience(codec: TextCodec) -> None:
    busy = [Busy("queue full", "queue_full", delay_s=0.0), Busy("limit", "rate_limited", 429, delay_s=0.0)]
    wanted = await sample(hashed(), codec, asking())
    replica = hashed(breaks=2)
    replica.failures = [*busy, Outage("no replica is alive", delay_s=0.0)]
    found = await sample(replica, codec, asking())
    for ours, theirs in zip(found.sequences, wanted.sequences, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.logprobs.tolist() == theirs.logprobs.tolist()
    replica.failures = [Busy("queue full", "queue_full", delay_s=5.0)]
    with pytest.raises(Busy, match="queue full"):
        await sample(replica, codec, asking(num_samples=1), patience_s=1.0)


async def test_so_many_sequences_are_under_way_at_once(codec: TextCodec) -> None:
    replica = hashed()
    result = await sample(replica, codec, asking(num_samples=12), places=3)
    assert len(result.sequences) == 12
    assert replica.most == 3


async def test_patience_is_for_trouble_and_not_for_a_place_or_for_drawing(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream takes 100 s, one at a time; the last of four breaks off once."""
    now = 0.0
    monkeypatch.setattr(samples, "time", SimpleNamespace(monotonic=lambda: now))

    class Slow(Replica):
        @asynccontextmanager
        async def stream(self, base: str, request: SampleRequest) -> AsyncIterator[SampleStream]:
            nonlocal now
            now += 100.0
            self.breaks = 1 if len(self.requests) == 3 else 0
            async with super().stream(base, request) as stream:
                yield stream

    replica = Slow(None, {REVISION: ADAPTER_SHA256}, BASE_SHA256)
    result = await sample(replica, codec, asking(num_samples=4), places=1, patience_s=1.0)
    assert (len(result.sequences), len(replica.requests)) == (4, 5)
