"""What must not stop a catalog: a run that cannot be read, a dead letter of work in hand, a shared wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mint_schemas import Envelope
from mint_schemas.cloudevents import run_id_for
from sqlalchemy.orm import Session

from services.catalog import commands, orders, plan, runs
from services.catalog.config import CatalogSettings
from services.catalog.drive import Driver
from services.catalog.handlers import TRAIN, Handlers
from services.catalog.moves import Mover
from services.catalog.outbox import Relay
from services.catalog.tables import CheckpointRow, CommandRow, FileRow, OutboxRow, PrewarmRow, RevisionRow, RunRow
from services.catalog.validate import Validator
from shared.bus.received import DEAD_REASON, DEAD_SUBJECT, Received
from shared.catalog.api import MoveAlias
from shared.errors import Fatal, Refused
from shared.residency import Desired, ReadyRevision, Replica
from shared.store.memory import MemoryStore
from tests.catalog_flows import dpo
from tests.catalog_kit import TINY, Lab, eventually, put_nothing, sft
from tests.operations_kit import Learner, Ops


async def _nowhere(token: str, wanted: Desired) -> None:
    return None


@pytest.fixture
def driver(lab: Lab) -> Driver:
    return Driver(lab.database, lab.bases, MemoryStore(), CatalogSettings(), lab.clock, _nowhere, lambda: None)


@pytest.fixture
def handlers(lab: Lab, driver: Driver) -> Handlers:
    validator = Validator(lab.database, MemoryStore(), lab.bases, driver.readiness)
    return Handlers(lab.database, driver, validator, lab.bases, lab.clock)


def _dead(type_: str, sent_to: str, body: bytes, reason: str = "gave up") -> Received:
    headers = {DEAD_REASON: reason, DEAD_SUBJECT: f"{sent_to}.tiny-llama"}
    return Received(Envelope(type_, "acme/shop", "7"), body, "tiny-llama", "mint.v1.dead.x.y.tiny-llama", 1, headers)


def _spoil(session: Session, run_id: str) -> None:
    """As if an older build, with an older contract, had accepted it."""
    run = runs.find(session, run_id)
    assert run is not None
    run.request = {**run.request, "method": {"kind": "forgotten"}}


async def test_a_dead_export_of_a_model_fails_its_save_and_nothing_else(lab: Lab, handlers: Handlers) -> None:
    ops = Ops(lab, session_ttl_s=1e9)
    model_id = ops.opened()
    view = ops.save(model_id, 1, "x")
    Learner(ops).drain(model_id)
    command = lab.open(ops.model(model_id).run_id)
    body = f'{{"command_id": "{command}"}}'.encode()
    await handlers.dead(_dead("mint.v1.export.requested", "mint.v1.export.requested", body, "no such tensor"))
    failure = ops.view(view.request_id).failure
    assert failure is not None
    assert "no such tensor" in failure.message
    assert ops.run(model_id).state == "running"


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
async def test_the_checkpoints_of_a_model_go_however_it_ended(lab: Lab, handlers: Handlers, state: Any) -> None:
    ops = Ops(lab, session_ttl_s=1e9)
    model_id = ops.opened()
    ops.submit(model_id, 1, "optim_step")
    Learner(ops).drain(model_id)
    run_id = ops.model(model_id).run_id

    def end(session: Session) -> None:
        run = runs.find(session, run_id)
        assert run is not None
        runs.end(session, run, state, "", lab.bases, 0.0)

    lab.database.write_now(end)
    assert len(lab.rows(CheckpointRow)) == 1
    envelope, body = Envelope(f"mint.v1.run.{state}", "mint/catalog", "1"), f'{{"run_id": "{run_id}"}}'.encode()
    await handlers.event(Received(envelope, body, "tiny-llama", f"mint.v1.run.{state}.tiny-llama", 1, {}))
    assert lab.rows(CheckpointRow) == []


async def test_a_dead_sample_request_fails_the_sample(lab: Lab, handlers: Handlers) -> None:
    ops = Ops(lab, session_ttl_s=1e9)
    view = ops.submit_sample(ops.new_sampler(ops.session(), base=TINY).sampler_id)
    body = f'{{"request_id": "{view.request_id}", "base": "{TINY}"}}'.encode()
    await handlers.dead(_dead("mint.v1.sample.requested", "mint.v1.sample.requested", body, "no worker has it"))
    failure = ops.view(view.request_id).failure
    assert failure is not None
    assert failure.message == "it could not be sampled: no worker has it"


async def test_a_model_whose_base_is_gone_ends_and_says_so(lab: Lab, driver: Driver) -> None:
    ops = Ops(lab, session_ttl_s=1e9)
    model_id = ops.opened()
    view = ops.submit(model_id, 1)
    del lab.bases[TINY]
    await driver.look()
    failure = ops.view(view.request_id).failure
    assert failure is not None
    assert "not configured any more" in failure.message
    assert ops.run(model_id).state == "failed"


async def test_a_run_that_cannot_be_read_holds_up_no_other(lab: Lab, driver: Driver) -> None:
    spoilt = lab.request(sft("acme/one"))
    other = lab.request(sft("acme/two", steps=1))
    lab.database.write_now(_spoil, spoilt)
    first = lab.open(other)
    assert first is not None
    lab.commit(first, lab.take(first).epoch)
    await driver.look()
    assert lab.open(other) == f"{other}:export:1"
    assert lab.run(spoilt).state == "failed"
    assert "not valid any more" in lab.run(spoilt).outcome


async def test_a_command_that_cannot_be_read_fails_its_run(lab: Lab, driver: Driver) -> None:
    run_id = lab.request(sft())

    def spoil(session: Session) -> None:
        row = session.get(CommandRow, lab.open(run_id))
        assert row is not None
        row.body = {"kind": "forgotten"}

    lab.database.write_now(spoil)
    lab.clock.now += 1000
    await driver.look()
    assert lab.run(run_id).state == "failed"


async def test_a_row_that_can_never_be_published_holds_up_no_other(lab: Lab) -> None:
    lab.request(sft())
    rows = [row.seq for row in lab.rows(OutboxRow)]
    sent: list[int] = []

    async def publish(row: OutboxRow) -> None:
        if row.seq == rows[0]:
            raise Fatal("a body that breaks its contract")
        sent.append(row.seq)

    relay = Relay(lab.database, publish, lab.clock)
    assert await relay.publish_batch() == len(rows) - 1
    assert sent == rows[1:]
    assert [row.seq for row in lab.rows(OutboxRow) if row.published_at is None] == rows[:1]
    assert await relay.publish_batch() == 0


async def test_an_error_of_one_run_holds_up_no_other(lab: Lab, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def advance(run_id: str) -> None:
        seen.append(run_id)
        if len(seen) == 1:
            raise KeyError("unforeseen")

    runs_ = [lab.request(sft("acme/one")), lab.request(sft("acme/two"))]
    monkeypatch.setattr(driver, "advance", advance)
    await driver.advance_all()
    assert seen == runs_


def test_a_queued_request_that_is_not_valid_any_more_fails_alone(lab: Lab) -> None:
    first, queued = lab.request(sft(steps=1)), lab.request(sft())
    lab.database.write_now(_spoil, queued)
    lab.finish(first)
    assert lab.run(first).state == "completed"
    assert lab.run(queued).state == "failed"
    assert "not valid any more" in lab.run(queued).outcome


async def test_a_dead_letter_fails_its_run_unless_the_command_is_being_worked_on(lab: Lab, handlers: Handlers) -> None:
    run_id = lab.request(sft())
    command = lab.open(run_id)
    assert command is not None
    letter = _dead("mint.v1.update.requested", "mint.v1.update.requested", f'{{"command_id": "{command}"}}'.encode())
    lab.take(command)
    await handlers.dead(letter)
    assert lab.run(run_id).state == "running", "a second delivery gave up while the first is at work"
    lab.clock.now += lab.rules.ttl_s + 1
    await handlers.dead(letter)
    assert lab.run(run_id).state == "failed"


async def test_a_request_under_another_type_is_answered(lab: Lab, handlers: Handlers) -> None:
    await handlers.dead(_dead("mint.v1.train.request", TRAIN, b"{}", "ce-type and subject must agree"))
    run = lab.run(run_id_for("acme/shop", "7"))
    assert (run.state, run.outcome) == ("failed", "ce-type and subject must agree")


def test_a_command_that_is_done_is_never_waited_for_again(lab: Lab) -> None:
    """A result that is not found would otherwise be asked for at every look, for ever."""
    run_id = lab.request(sft())
    lab.work(run_id)

    def again(session: Session) -> None:
        run = runs.find(session, run_id)
        assert run is not None
        commands.issue(session, run, orders.update(session, run, plan.Update(1, False)), 1, lab.clock(), 120.0)

    with pytest.raises(Fatal, match="is committed already"):
        lab.database.write_now(again)


def test_pairs_of_an_accepted_request_are_named(lab: Lab) -> None:
    lab.request(dpo())
    assert "data/acme/pairs" in {row.key for row in lab.rows(FileRow)}


def test_data_of_an_accepted_request_is_named(lab: Lab) -> None:
    ref = put_nothing("data/acme/x", b"lines")
    body = sft()
    body["method"]["data"] = {"kind": "jsonl", "data": ref.model_dump()}
    lab.request(body)
    assert [row.key for row in lab.rows(FileRow)] == [ref.key]


async def test_a_move_that_gives_up_leaves_the_wait_of_another_alone(lab: Lab, driver: Driver) -> None:
    lab.finish(lab.request(sft(steps=1, promote_to=None)))
    mover = Mover(lab.database, driver, lab.bases, lab.clock)

    def move(alias: str, timeout_s: float) -> asyncio.Task[Any]:
        wanted = MoveAlias(revision="acme/adder@1", actor="ann", timeout_s=timeout_s)
        return asyncio.create_task(mover.move("acme/adder", alias, wanted))

    long = move("live", 60.0)
    await eventually(lambda: len(lab.rows(PrewarmRow)) == 1)
    short = move("canary", 1.0)
    await asyncio.sleep(0.05)
    lab.clock.now += 2
    with pytest.raises(Refused, match="was not moved"):
        await short
    (waiting,) = lab.rows(PrewarmRow)
    assert waiting.until > lab.clock() + 50
    row = lab.rows(RevisionRow)[0]
    ready = ReadyRevision(revision=row.revision, adapter_sha256=row.adapter_sha256)
    driver.replicas.heard("a", _replica(ready), lab.clock())
    assert (await long).version == 1
    assert lab.rows(PrewarmRow) == []
    assert len(lab.rows(RunRow)) == 1


def _replica(ready: ReadyRevision) -> Replica:
    return Replica(
        replica="r",
        boot_id="b",
        url="http://r",
        base=TINY,
        token="tiny-llama",
        engine="fake",
        dtype="float32",
        max_rank=16,
        slots=1,
        max_resident=1,
        at=0.0,
        ready=(ready,),
    )
