"""What operations cost after very many of them, and what an outage of the catalog itself must not end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event

from services.catalog import drive, ephemeral, notices, order, retention, sampler_saves, samples, upkeep
from services.catalog.config import CatalogSettings
from services.catalog.drive import Driver
from services.catalog.operation_tables import ModelRow, OperationRow
from services.catalog.tables import CheckpointRow, FileRow, LeaseRow, RevisionRow
from shared.errors import Refused
from shared.residency import Desired
from shared.store.memory import MemoryStore
from tests.catalog_kit import TINY, Lab, sft
from tests.operations_kit import Learner, Ops


@pytest.fixture
def ops(lab: Lab) -> Ops:
    return Ops(lab, session_ttl_s=1e9)


@contextmanager
def plans(lab: Lab) -> Iterator[list[str]]:
    """How the database goes about each query within."""
    found: list[str] = []

    def explain(connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        if statement.startswith("SELECT"):
            plan = connection.connection.cursor()
            found.extend(row[3] for row in plan.execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall())
            plan.close()

    event.listen(lab.database.engine, "before_cursor_execute", explain)
    try:
        yield found
    finally:
        event.remove(lab.database.engine, "before_cursor_execute", explain)


def _model(session: Any, model_id: str) -> ModelRow:
    (row,) = session.query(ModelRow).filter_by(model_id=model_id)
    found: ModelRow = row
    return found


def test_what_is_asked_at_each_step_walks_over_what_is_open_alone(lab: Lab, ops: Ops) -> None:
    """By an index that holds more than the model, the tenant or the sampler."""
    model_id = ops.opened()
    run = ops.run(model_id)

    def ask(session: Any) -> None:
        model = _model(session, model_id)
        order.ready(session, model, 32)
        order.in_state(session, model)
        order.open_count(session, model)
        sampler_saves.settle(session, run, ops.rules, ops.now())

    with plans(lab) as found:
        lab.database.read_now(ask)
        ops.submit_sample(ops.new_sampler(ops.session(), base=TINY).sampler_id)
    of_operations = [plan for plan in found if "operations" in plan and "_autoindex_" not in plan]
    wide = ("ix_operations_open", "ix_operations_in_state", "ix_operations_tenant_kind_state", "state_kind")
    assert len(of_operations) >= 5
    assert [plan for plan in found if "operations" in plan and plan.endswith(("(model_id=?)", "(tenant=?)"))] == []
    assert all(any(name in plan for name in wide) for plan in of_operations), of_operations


def test_the_sweep_of_revisions_scans_no_table(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    ops.save(model_id, 1)
    Learner(ops).drain(model_id)
    ops.export(model_id)
    lab.clock.now += 1e6
    with plans(lab) as found:
        assert len(lab.database.write_now(ephemeral.sweep, ops.now())) == 1
    # An empty list of values is written as a subquery.
    empty = ("SCAN CONSTANT ROW", "SCAN (subquery")
    assert [plan for plan in found if plan.startswith("SCAN") and not plan.startswith(empty)] == []


def test_an_open_sample_keeps_its_revision_from_the_sweep(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    view = ops.save(model_id, 1)
    Learner(ops).drain(model_id)
    ops.export(model_id)
    sampler_id = f"{ops.model(model_id).session_id}:sample:1"
    waiting = ops.submit_sample(sampler_id)
    lab.clock.now += 1e6
    assert lab.database.write_now(ephemeral.sweep, ops.now()) == []
    ops.cancel(waiting.request_id)
    assert len(lab.database.write_now(ephemeral.sweep, ops.now())) == 1
    assert ops.view(view.request_id).state == "done"


def test_a_gap_is_not_counted_while_the_catalog_was_away(lab: Lab, ops: Ops) -> None:
    """Who is away cannot be sent the missing number."""
    model_id = ops.opened()
    behind = ops.submit(model_id, 2)
    lab.clock.now += 1000
    back = ops.now()
    assert ops.write(upkeep.fail_gaps, ops.rules, back, ops.now()) == []
    lab.clock.now += ops.rules.operation_gap_s - 1
    assert ops.write(upkeep.fail_gaps, ops.rules, back, ops.now()) == []
    assert ops.view(behind.request_id).failure is None
    lab.clock.now += 2
    assert ops.write(upkeep.fail_gaps, ops.rules, back, ops.now()) == [model_id]
    assert ops.view(behind.request_id).failure is not None


def test_a_learner_that_lost_its_lease_does_not_take_what_another_committed_for_its_own(lab: Lab, ops: Ops) -> None:
    """It would go on from its own bytes of a step that another's stand for."""
    model_id = ops.opened()
    ops.submit(model_id, 1, "optim_step")
    slow, quick = Learner(ops, "slow"), Learner(ops, "quick")
    old = slow.take(model_id)
    request = slow.request(old, old.operations[0], 0)
    lab.clock.now += 31
    quick.execute(quick.take(model_id))
    with pytest.raises(Refused) as refused:
        ops.commit(request)
    assert refused.value.code == "stale_epoch"


def test_a_slot_that_holds_the_state_gets_no_payloads_to_replay(ops: Ops) -> None:
    model_id = ops.opened()
    for number in range(1, 4):
        ops.submit(model_id, number)
    learner = Learner(ops)
    first = learner.take(model_id, limit=2)
    learner.execute(first)
    policy = ops.model(model_id).policy
    held, other = learner.held[policy], "0" * 64
    for holds, whole in ((held, False), (other, True), ("", True)):
        taken = ops.take(policy, epoch=first.epoch, holds=holds)
        assert taken.state_id == held
        assert [operation.request_id for operation in taken.replay] == [it.request_id for it in first.operations]
        assert {operation.payload.inline is not None for operation in taken.replay} == {whole}
        assert all(operation.payload.inline is not None for operation in taken.operations)


def test_operations_without_numbers_are_bounded_too(lab: Lab) -> None:
    ops = Ops(lab, operation_backlog=3)
    model_id = ops.opened()
    for key in range(3):
        ops.submit(model_id, 0, "forward", key=f"k{key}")
    with pytest.raises(Refused, match="are open, which is the most") as refused:
        ops.submit(model_id, 0, "forward", key="k3")
    assert refused.value.status == 429
    assert ops.submit(model_id, 0, "forward", key="k0").state == "queued"
    Learner(ops).drain(model_id)
    ops.submit(model_id, 0, "forward", key="k3")


def test_a_sample_of_a_base_that_is_gone_fails(lab: Lab, ops: Ops) -> None:
    """Nobody takes it any more, and its client would wait for ever."""
    view = ops.submit_sample(ops.new_sampler(ops.session(), base=TINY).sampler_id)
    lab.clock.now += 1000
    ops.rules = replace(ops.rules, bases={})
    ops.look()
    failure = ops.view(view.request_id).failure
    assert failure is not None
    assert failure.category == "server"
    assert TINY in failure.message


async def _nowhere(token: str, wanted: Desired) -> None: ...


async def test_one_look_lets_go_of_more_results_than_one_transaction_does(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or more would come than go."""
    monkeypatch.setattr(upkeep, "BATCH", 2)
    ops = Ops(lab)
    model_id = ops.opened()
    for number in range(1, 8):
        ops.submit(model_id, number, "forward")
    Learner(ops).drain(model_id)
    driver = Driver(lab.database, lab.bases, MemoryStore(), CatalogSettings(), lab.clock, _nowhere, lambda: None)
    lab.clock.now += 86_401
    await driver.look()
    forwards = [row for row in lab.rows(OperationRow) if row.kind == "forward"]
    assert [row.expired for row in forwards] == [True] * 7


def test_a_look_leaves_models_alone_that_nothing_waits_for(lab: Lab, ops: Ops) -> None:
    """Thousands may be open; those of a base that is gone end, and saves that wait are settled."""
    idle, saving, run = ops.opened(), ops.opened(), lab.request(sft())
    ops.save(saving, 1)
    Learner(ops).drain(saving)
    looked = lab.database.read_now(drive._unfinished, lab.bases)
    assert sorted(looked) == sorted([ops.model(saving).run_id, run])
    assert ops.model(idle).run_id in lab.database.read_now(drive._unfinished, {})


def test_thinning_looks_no_more_at_what_it_thinned(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    for number in range(1, 11, 2):
        ops.submit(model_id, number, "optim_step")
        ops.save(model_id, number + 1)
        Learner(ops).drain(model_id)
        ops.export(model_id)
    run_id = ops.model(model_id).run_id
    assert lab.database.write_now(retention.thin, run_id)
    kept = {row.step: row.has_optimizer for row in lab.rows(CheckpointRow)}
    assert kept == {1: False, 2: False, 3: False, 4: True, 5: True}
    assert lab.database.read_now(retention._undecided, run_id) == []
    lab.clock.now += 1e6
    assert len(lab.database.write_now(ephemeral.sweep, ops.now())) == 5
    assert [row.step for row in lab.rows(CheckpointRow)] == [4, 5]


@pytest.mark.parametrize("thinned", [False, True])
def test_what_a_session_leaves_behind_goes_with_its_revisions(lab: Lab, ops: Ops, thinned: bool) -> None:
    """A model that is unloaded says nothing more that would have its training checkpoints looked at."""
    told: list[str] = []
    lab.database.committed = lambda info: told.extend(notices.freed_in(info))
    model_id = ops.opened()
    ops.submit(model_id, 1, "optim_step")
    ops.save(model_id, 2)
    Learner(ops).drain(model_id)
    ops.export(model_id)
    ops.finish(model_id.split(":")[0])
    if thinned:
        lab.database.write_now(retention.thin, ops.model(model_id).run_id)
    (row,) = lab.rows(CheckpointRow)
    keys = {ref["key"] for ref in row.files.values()}
    assert keys
    lab.clock.now += ops.rules.grace_s + 1
    ops.look()
    assert (lab.rows(RevisionRow), lab.rows(CheckpointRow)) == ([], [])
    assert keys <= set(told)
    assert not keys & {row.key for row in lab.rows(FileRow)}


def test_an_unloaded_model_keeps_the_adapters_of_its_revisions_alone(lab: Lab, ops: Ops) -> None:
    """Nothing goes on from its state, and models come and go by the thousand."""
    model_id = ops.opened()
    for number in range(1, 6):
        ops.submit(model_id, number, "optim_step")
    ops.save(model_id, 6, "kept")
    Learner(ops).drain(model_id)
    ops.export(model_id)
    ops.submit(model_id, 7, "optim_step")
    Learner(ops).drain(model_id)
    ops.submit(model_id, 0, "unload_model")
    assert ops.model(model_id).state == "unloaded"
    lab.database.write_now(retention.thin, ops.model(model_id).run_id)
    (row,) = lab.rows(CheckpointRow)
    assert row.step == 5
    assert not {"optimizer.safetensors", "gradients.safetensors"} & row.files.keys()
    path = ops.resolve(f"tinker://{model_id}/sampler_weights/kept")
    assert path.checkpoint is not None
    assert path.checkpoint.files.keys() == row.files.keys()


def test_no_lease_of_a_sample_outlives_it(lab: Lab, ops: Ops) -> None:
    view = ops.submit_sample(ops.new_sampler(ops.session(), base=TINY).sampler_id)
    ops.take_sample(view.request_id)
    lab.clock.now += 31
    lab.database.write_now(samples.dead, view.request_id, "nobody can", ops.now())
    assert ops.view(view.request_id).state == "failed"
    assert lab.rows(LeaseRow) == []
