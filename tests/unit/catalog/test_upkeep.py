"""What stays and what goes: the outbox, training checkpoints, unnamed files."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta

import pytest

from services.catalog import aliases, retention
from services.catalog.outbox import Relay
from services.catalog.readiness import Replicas
from services.catalog.sweep import sweep_once
from services.catalog.tables import CheckpointRow, FileRow, OutboxRow
from shared.residency import FailedRevision, ReadyRevision, Replica
from shared.store import keys
from shared.store.memory import MemoryStore
from tests.catalog_kit import TINY, Lab, eventually, grpo, sft
from tests.operations_kit import Learner, Ops


async def test_the_relay_keeps_the_order_over_an_outage(lab: Lab) -> None:
    lab.request(sft("acme/one"))
    lab.request(sft("acme/two"))
    sent: list[int] = []
    up = [False]

    async def publish(row: OutboxRow) -> None:
        if not up[0] or (len(sent) == 3 and up.pop()):
            raise ConnectionError("the bus is away")
        sent.append(row.seq)

    relay = Relay(lab.database, publish, lab.clock)
    for _ in range(3):
        with pytest.raises(ConnectionError):
            await relay.publish_batch()
    assert sent == []
    up[0] = True
    with pytest.raises((ConnectionError, IndexError)):
        await relay.publish_batch()
    up[:] = [True]
    assert [row.published_at is not None for row in lab.rows(OutboxRow)] == [True] * 3 + [False] * 3
    sent_before = list(sent)
    sent.clear()
    await relay.publish_batch()
    assert sent_before + sent == [row.seq for row in lab.rows(OutboxRow)]


async def test_the_relay_ends_when_it_is_cancelled(lab: Lab) -> None:
    async def publish(row: OutboxRow) -> None:
        return None

    relay = Relay(lab.database, publish, lab.clock)
    task = asyncio.create_task(relay.run())
    lab.request(sft())
    relay.wake()
    await eventually(lambda: all(row.published_at for row in lab.rows(OutboxRow)))
    relay.wake()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)


def test_the_last_two_checkpoints_and_the_aliased_ones_stay(lab: Lab) -> None:
    body = sft(steps=6, promote_to=None)
    body["method"]["save_every"] = 2
    run_id = lab.request(body)
    lab.finish(run_id)
    move = aliases.Move("acme/adder", "live", "acme/adder@1", "ann", "manual")
    lab.database.write_now(aliases.move, move, "tiny-llama", lab.clock())
    freed = lab.database.write_now(retention.thin, run_id)
    kept = {row.step: row.has_optimizer for row in lab.rows(CheckpointRow)}
    assert kept == {2: True, 4: False, 5: True, 6: True}
    named = {row.key for row in lab.rows(FileRow)}
    assert freed
    assert not named & set(freed)
    for row in lab.rows(CheckpointRow):
        assert {ref["key"] for ref in row.files.values()} <= named
        assert "adapter.safetensors" in row.files
    assert lab.database.write_now(retention.thin, run_id) == []


async def test_only_what_no_row_names_and_is_old_is_swept(lab: Lab) -> None:
    store = MemoryStore()
    run_id = lab.request(sft(steps=1))
    lab.finish(run_id)
    active = lab.request(grpo("acme/other"))
    for row in lab.rows(FileRow):
        await store.put(row.key, b"named")
    orphan, pending = f"attempts/{run_id}/update-1/a9/x", f"attempts/{active}/rollout-1/a1/x"
    for key in (orphan, pending, "blobs/sha256/" + "0" * 64, "data/acme/never-registered"):
        await store.put(key, b"x")
    lab.clock.now = (datetime.now(UTC) + timedelta(hours=1)).timestamp()
    assert await sweep_once(lab.database, store, 86400, lab.clock) == []
    lab.clock.now += 86400
    assert await sweep_once(lab.database, store, 86400, lab.clock) == [orphan, "data/acme/never-registered"]
    for row in lab.rows(FileRow):
        assert await store.size(row.key) is not None


async def test_blobs_of_a_model_are_swept_while_it_is_open_but_not_while_it_exports(lab: Lab) -> None:
    """prime-rl#1857: a sweep deletes what is being made."""
    ops, store = Ops(lab, session_ttl_s=1e12, result_ttl_s=3600.0), MemoryStore()
    model_id = ops.opened()
    data = b"a large payload"
    kept = await store.put(keys.blob(hashlib.sha256(data).hexdigest()), data)
    ops.submit_file(model_id, 1, "forward", kept)
    Learner(ops).drain(model_id)
    lab.clock.now = (datetime.now(UTC) + timedelta(days=2)).timestamp()
    assert await sweep_once(lab.database, store, 86400, lab.clock) == []
    ops.look()
    ops.save(model_id, 2, "x")
    Learner(ops).drain(model_id)
    assert await sweep_once(lab.database, store, 86400, lab.clock) == []
    ops.export(model_id)
    assert await sweep_once(lab.database, store, 86400, lab.clock) == [kept.key]


def _replica(name: str, **other: object) -> Replica:
    fields = {
        "replica": name,
        "boot_id": "b",
        "url": "http://x",
        "base": TINY,
        "token": "tiny-llama",
        "engine": "fake",
        "dtype": "float32",
        "max_rank": 16,
        "slots": 1,
        "max_resident": 1,
        "at": 0.0,
        **other,
    }
    return Replica.model_validate(fields)


def test_silent_replicas_have_nothing_ready() -> None:
    replicas = Replicas()
    replicas.heard("a", _replica("a", ready=[ReadyRevision(revision="p/q@1", adapter_sha256="x")]), 100.0)
    replicas.heard("b", _replica("b", max_rank=8, failed=[FailedRevision(revision="p/q@1", reason="no")]), 110.0)
    both = replicas.now(112.0)
    assert (both.ready, both.failed, both.max_rank) == ({"p/q@1": ("a",)}, {}, {TINY: 8})
    later = replicas.now(116.0)
    assert later.ready == {}
    assert later.failed == {"p/q@1": "no (replica b)"}
    replicas.heard("c", _replica("c"), 116.0)
    assert replicas.now(116.0).failed == {}, "another replica of the base may still load it"
    replicas.gone("b")
    assert replicas.now(116.0).failed == {}
