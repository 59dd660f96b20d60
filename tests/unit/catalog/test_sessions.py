"""Sessions and models: begun once, renewed by signs of life, over when silent or finished."""

from __future__ import annotations

from typing import Any

import pytest
from mint_schemas.training import Lora

from services.catalog import models, residency, runs, sessions, upkeep, views
from services.catalog.operation_tables import ModelRow, OperationRow
from services.catalog.tables import JournalRow, RunRow
from shared.errors import Refused
from tests.catalog_kit import TINY, Lab, sft
from tests.operations_kit import Learner, Ops, saved


@pytest.fixture
def ops(lab: Lab) -> Ops:
    return Ops(lab)


def _state(ops: Ops, session_id: str) -> str:
    return str(ops.lab.database.read_now(sessions.show, session_id, None).state)


def _heartbeat(ops: Ops, session_id: str, tenant: str | None = None) -> Any:
    return ops.write(sessions.heartbeat, session_id, tenant, ops.now())


def test_a_model_is_a_policy_and_a_run_that_is_active(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    view = ops.model(model_id)
    assert view.policy.startswith("acme/tinker-")
    run = ops.run(model_id)
    assert (run.method, run.state, run.active_policy, run.policy) == ("tinker", "running", view.policy, view.policy)
    shown = lab.database.read_now(views.run_view, run)
    assert (shown.method, shown.request["model_id"]) == ("tinker", model_id)


def test_the_driver_leaves_a_model_s_run_alone(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    ops.submit(model_id, 1, "optim_step")
    Learner(ops).drain(model_id)
    lab.advance(ops.model(model_id).run_id)
    assert ops.run(model_id).state == "running"
    assert lab.database.read_now(residency.desired, TINY, ops.now()).entries == ()


def test_a_model_again_is_the_same_and_with_other_settings_is_refused(lab: Lab, ops: Ops) -> None:
    session_id = ops.session()
    first, again = ops.new_model(session_id), ops.new_model(session_id)
    assert (first.request_id, first.state) == (again.request_id, "done")
    with pytest.raises(Refused) as refused:
        ops.new_model(session_id, lora=Lora(rank=4))
    assert (refused.value.code, refused.value.status) == ("other_payload", 409)
    assert len(lab.rows(ModelRow)) == len(lab.rows(RunRow)) == 1


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"base": "tiny/lama"}, "did you mean tiny/llama"),
        ({"lora": Lora(rank=64)}, "above the maximum of 32"),
        ({"lora": Lora(target_modules=("router",))}, "router cannot be trained"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(lab: Lab, ops: Ops, other: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        ops.new_model(ops.session(), **other)
    assert lab.rows(ModelRow) == []


def test_train_unembed_is_recorded_and_the_answer_says_that_it_is_not_trained(ops: Ops) -> None:
    view = ops.new_model(ops.session(), train_unembed=True)
    assert "not trained" in saved(view).note
    assert ops.model(view.model_id or "").train_unembed


def test_a_session_lives_while_anything_is_heard_of_it(lab: Lab, ops: Ops) -> None:
    silent, beating = ops.session(), ops.session()
    working = ops.opened()
    for number in range(1, 4):
        lab.clock.now += 250
        _heartbeat(ops, beating)
        ops.submit(working, number)
        ops.look()
    assert [_state(ops, each) for each in (silent, beating, working.split(":")[0])] == ["expired", "open", "open"]
    with pytest.raises(Refused) as refused:
        _heartbeat(ops, silent)
    assert (refused.value.code, refused.value.status) == ("session_ended", 410)


def test_time_in_which_the_catalog_was_away_ends_no_session(lab: Lab, ops: Ops) -> None:
    session_id = ops.session()
    lab.clock.now += 10_000
    assert ops.write(upkeep.end_silent, ops.rules, ops.now() - 599, ops.now()) == []
    assert ops.write(upkeep.end_silent, ops.rules, ops.now() - 600, ops.now()) == [session_id]


def test_a_finished_session_takes_nothing_more_and_its_idle_models_are_unloaded(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    session_id = model_id.split(":")[0]
    ops.finish(session_id)
    ops.finish(session_id)
    assert (_state(ops, session_id), ops.model(model_id).state) == ("finished", "unloaded")
    assert (ops.run(model_id).state, ops.run(model_id).active_policy) == ("completed", None)
    for work in (lambda: ops.submit(model_id, 1), lambda: ops.new_model(session_id, 1)):
        with pytest.raises(Refused) as refused:
            work()
        assert refused.value.status == 410
    assert [row.type for row in lab.rows(JournalRow)] == ["mint.v1.run.running", "mint.v1.run.completed"]


def test_what_was_accepted_before_the_end_is_still_done(ops: Ops) -> None:
    model_id = ops.opened()
    ids = [ops.submit(model_id, 1).request_id, ops.save(model_id, 2, "last").request_id]
    ops.finish(model_id.split(":")[0])
    assert ops.run(model_id).state == "running"
    Learner(ops).drain(model_id)
    assert ops.run(model_id).state == "running"
    ops.export(model_id)
    assert [ops.view(request_id).state for request_id in ids] == ["done", "done"]
    assert ops.run(model_id).state == "completed"


def test_unloading_comes_behind_what_was_accepted_and_is_one_operation(ops: Ops) -> None:
    model_id = ops.opened()
    ops.submit(model_id, 1)
    unload = ops.submit(model_id, 0, "unload_model", key="unload_model")
    assert unload.state == "queued"
    assert ops.submit(model_id, 0, "unload_model", key="unload_model").request_id == unload.request_id
    with pytest.raises(Refused, match="is unloaded"):
        ops.submit(model_id, 2)
    learner = Learner(ops)
    learner.drain(model_id)
    assert learner.done == [1]
    assert ops.view(unload.request_id).state == "done"
    assert ops.model(model_id).state == "unloaded"


def test_cancelling_the_run_ends_the_model_and_what_waits(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    view = ops.submit(model_id, 1)
    learner = Learner(ops)
    taken = learner.take(model_id)
    policy = ops.model(model_id).policy

    def cancel(session: Any) -> None:
        run = runs.find(session, taken.run_id)
        assert run is not None
        runs.end(session, run, "cancelled", "cancelled by ann", lab.bases, ops.now())

    lab.database.write_now(cancel)
    failure = ops.view(view.request_id).failure
    assert failure is not None
    assert "cancelled by ann" in failure.message
    assert ops.renew(policy, "w1", taken.epoch).cancelled
    assert ops.commit(learner.request(taken, taken.operations[0], 0)).failure == failure


def test_a_run_of_events_on_its_policy_waits_for_the_model(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    policy = ops.model(model_id).policy
    run_id = lab.request(sft(policy))
    assert lab.run(run_id).state == "queued"
    ops.submit(model_id, 0, "unload_model")
    assert lab.run(run_id).state == "running"


def test_another_tenant_sees_neither_session_nor_model(ops: Ops) -> None:
    model_id = ops.opened()
    session_id = model_id.split(":")[0]
    for work in (
        lambda: _heartbeat(ops, session_id, "other"),
        lambda: ops.lab.database.read_now(models.show, model_id, "other"),
        lambda: ops.new_model(session_id, 3, tenant="other"),
    ):
        with pytest.raises(Refused) as refused:
            work()
        assert refused.value.status == 404
    assert ops.lab.database.read_now(sessions.list_sessions, "other", 10, 0).total == 0
    assert ops.lab.database.read_now(models.list_models, "acme", 10, 0).total == 1


def test_a_tenant_that_cannot_have_policies_has_no_session(ops: Ops) -> None:
    for tenant in ("Tiny", "a/b", "", "tiny"):
        with pytest.raises(Refused):
            ops.session(tenant)


def test_the_first_seed_of_a_model_follows_from_its_name(lab: Lab, ops: Ops) -> None:
    session_id = ops.session()
    ids = [ops.new_model(session_id, number, seed=None).model_id for number in range(2)]
    seeds = {row.seed for row in lab.rows(ModelRow)}
    assert len(seeds) == len(ids)
    assert lab.rows(OperationRow)[0].state == "done"
