"""`sample.requested` → a committed result or failure, or the work given back."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from mint_schemas.cloudevents import Envelope

from services.rollout.sample_handler import SampleHandler
from services.rollout.samples import OperationSampler
from shared.bus import Received
from shared.catalog import operations as ops
from shared.catalog.api import RenewAnswer
from shared.errors import Busy, Fatal, Outage, Refused, Retryable
from shared.operations import content
from shared.operations.payload import AdamPayload, SamplePayload, SampleResult, decode, encode
from shared.sampling.fake import FakeSampler
from shared.store.memory import MemoryStore
from shared.text import TextCodec
from tests.sampling import ADAPTER_SHA256, BASE_SHA256, REVISION, load_codec, small_base


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return load_codec()


class Catalog:
    """One sample operation; `refuses` is raised by the next commit, `held` answers renewals."""

    def __init__(self, store: MemoryStore, payload: Any = None, **changes: Any) -> None:
        self._store = store
        self._payload = payload or SamplePayload(
            **{"prompt": np.asarray([5, 6], np.int64), "num_samples": 1, "max_tokens": 4, **changes}
        )
        self.status: Any = "granted"
        self.refuses: Exception | None = None
        self.held, self.renewed = True, asyncio.Event()
        self.commits: list[ops.CommitOperation] = []
        self.releases: list[ops.OperationsLease] = []
        self.renewals: list[ops.OperationsLease] = []

    async def take_sample(self, request: ops.TakeSample) -> ops.SampleTaken:
        if self.status != "granted":
            return ops.SampleTaken(status=self.status, retry_after_s=0.3)
        return ops.SampleTaken(
            status="granted", epoch=4, tenant="acme", base="tiny/llama", revision=REVISION,
            adapter_sha256=ADAPTER_SHA256, payload=await content.keep(self._store, encode(self._payload)),
        )  # fmt: skip

    async def renew(self, request: ops.OperationsLease) -> RenewAnswer:
        self.renewals.append(request)
        self.renewed.set()
        return RenewAnswer(held=self.held)

    async def release(self, request: ops.OperationsLease) -> None:
        self.releases.append(request)

    async def commit(self, request: ops.CommitOperation) -> ops.OperationView:
        if self.refuses is not None:
            raise self.refuses
        self.commits.append(request)
        return ops.OperationView(request_id=request.request_id, kind="sample", state="done")


def replica() -> FakeSampler:
    return FakeSampler(None, {REVISION: ADAPTER_SHA256}, BASE_SHA256)


def handler(
    catalog: Catalog, store: MemoryStore, codec: TextCodec, sampler: FakeSampler | None = None, beat_s: float = 30.0
) -> SampleHandler:
    sampling = OperationSampler(sampler or replica(), small_base(), codec, asyncio.Semaphore(4), patience_s=0.0)
    return SampleHandler(catalog, store, {"tiny/llama": sampling}, "w", beat_s)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


async def test_a_message_becomes_a_committed_result(store: MemoryStore, codec: TextCodec) -> None:
    catalog = Catalog(store)
    envelope = Envelope(type="mint.v1.sample.requested", source="mint/catalog", id="x", time="")
    message = Received(envelope, b'{"request_id": "op-1", "base": "tiny/llama"}', "tiny-llama", "s", 1, {})
    await handler(catalog, store, codec).handle(message)
    (commit,) = catalog.commits
    assert (commit.request_id, commit.worker, commit.epoch, commit.failure) == ("op-1", "w", 4, None)
    assert commit.result is not None
    result = decode(await content.read(store, commit.result))
    assert isinstance(result, SampleResult)
    assert len(result.sequences[0].tokens) == 4
    assert not catalog.releases


async def test_a_large_result_is_a_file(store: MemoryStore, codec: TextCodec) -> None:
    catalog = Catalog(store, num_samples=4, max_tokens=1000)
    await handler(catalog, store, codec).work("op-1", "tiny/llama")
    (commit,) = catalog.commits
    assert commit.result is not None
    assert commit.result.inline is None
    result = decode(await content.read(store, commit.result))
    assert isinstance(result, SampleResult)
    assert [len(sequence.tokens) for sequence in result.sequences] == [1000] * 4


async def test_what_its_caller_got_wrong_is_committed_as_a_failure(store: MemoryStore, codec: TextCodec) -> None:
    catalog = Catalog(store, num_samples=0)
    await handler(catalog, store, codec).work("op-1", "tiny/llama")
    (commit,) = catalog.commits
    assert commit.result is None
    assert commit.failure == ops.Failure(message="num_samples is 0; it must be at least 1", category="user")


@pytest.mark.parametrize(
    ("trouble", "failure"),
    [
        (Outage("no serving replica is alive", delay_s=1.0), ""),
        (Busy("queue full", "queue_full", delay_s=1.0), ""),
        (Retryable("a chunk was lost", delay_s=1.0), "Retryable: a chunk was lost"),
    ],
)
async def test_what_is_nobodys_fault_is_given_back(
    store: MemoryStore, codec: TextCodec, trouble: Exception, failure: str
) -> None:
    """Full queues and outages are not counted against the operation."""
    catalog, sampler = Catalog(store), replica()
    sampler.failures = [trouble]
    with pytest.raises(Retryable, match=str(trouble)):
        await handler(catalog, store, codec, sampler).work("op-1", "tiny/llama")
    assert not catalog.commits
    (release,) = catalog.releases
    assert (release.request_id, release.worker, release.epoch, release.failure) == ("op-1", "w", 4, failure)


async def test_a_payload_that_is_no_samples_is_never_dead_lettered(store: MemoryStore, codec: TextCodec) -> None:
    """Its operation is still there, and fails when it was taken too often."""
    catalog = Catalog(store, payload=AdamPayload())
    with pytest.raises(Retryable, match="the payload of sample op-1 is a AdamPayload"):
        await handler(catalog, store, codec).work("op-1", "tiny/llama")
    assert "AdamPayload" in catalog.releases[0].failure


async def test_busy_and_settled_samples_are_left_alone(store: MemoryStore, codec: TextCodec) -> None:
    catalog, sampler = Catalog(store), replica()
    worker = handler(catalog, store, codec, sampler)
    catalog.status = "closed"
    await worker.work("op-1", "tiny/llama")
    catalog.status = "busy"
    with pytest.raises(Retryable, match="another worker") as busy:
        await worker.work("op-1", "tiny/llama")
    assert busy.value.delay_s == 0.3
    assert not sampler.requests


async def test_an_old_epoch_commits_nothing(store: MemoryStore, codec: TextCodec) -> None:
    catalog = Catalog(store)
    catalog.refuses = Refused("epoch 4 is over", "stale_epoch", status=409)
    with pytest.raises(Retryable, match="stale_epoch"):
        await handler(catalog, store, codec).work("op-1", "tiny/llama")
    assert not catalog.commits
    assert not catalog.releases


async def test_a_commit_whose_answer_was_lost_is_asked_for_again(
    store: MemoryStore, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.worker.answered.PAUSES_S", (0.0, 0.0))
    catalog, left = Catalog(store), [Outage("away"), Outage("away")]
    commit = catalog.commit

    async def lossy(request: ops.CommitOperation) -> ops.OperationView:
        answer = await commit(request)
        if left:
            raise left.pop()
        return answer

    catalog.commit = lossy  # type: ignore[method-assign]
    sampler = replica()
    await handler(catalog, store, codec, sampler).work("op-1", "tiny/llama")
    assert len(catalog.commits) == 3
    assert catalog.commits[0] == catalog.commits[2]
    assert len(sampler.requests) == 1
    assert not catalog.releases


async def test_a_lease_lost_on_the_way_ends_the_generation(store: MemoryStore, codec: TextCodec) -> None:
    catalog = Catalog(store, num_samples=1)
    catalog.held = False

    class Slow(FakeSampler):
        async def _chunks(self, request: Any) -> Any:
            async for chunk in super()._chunks(request):
                await catalog.renewed.wait()
                await asyncio.sleep(0)
                yield chunk

    sampler = Slow(None, {REVISION: ADAPTER_SHA256}, BASE_SHA256)
    with pytest.raises(Retryable, match="another worker holds the lease of op-1"):
        await handler(catalog, store, codec, sampler, beat_s=0.01).work("op-1", "tiny/llama")
    assert {renewal.request_id for renewal in catalog.renewals} == {"op-1"}
    assert not catalog.commits
    assert sampler.open_streams == 0


async def test_a_base_that_is_not_configured_is_named(store: MemoryStore, codec: TextCodec) -> None:
    with pytest.raises(Fatal, match="no base model 'other/base' is configured here; there are tiny/llama"):
        await handler(Catalog(store), store, codec).work("op-1", "other/base")
