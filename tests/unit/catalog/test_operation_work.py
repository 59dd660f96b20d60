"""Leases, commits and states: whatever dies where, each operation has one outcome and a state is never made twice."""

from __future__ import annotations

import pytest

from services.catalog import retention
from services.catalog.operation_tables import OperationRow
from services.catalog.tables import CheckpointRow, JournalRow
from shared.catalog.operations import CommitOperation, Failure
from shared.errors import Refused
from shared.operations.state import state_id
from tests.catalog_kit import Lab
from tests.operations_kit import Learner, Ops

REQUESTED = "mint.v1.operations.requested"


@pytest.fixture
def ops(lab: Lab) -> Ops:
    return Ops(lab, session_ttl_s=1e9)


def _refused(ops: Ops, request: CommitOperation) -> str:
    with pytest.raises(Refused) as refused:
        ops.commit(request)
    assert refused.value.status == 409
    return refused.value.code


def test_a_commit_whose_answer_was_lost_gets_what_won(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    ops.submit(model_id, 1)
    ops.submit(model_id, 2, "optim_step")
    learner = Learner(ops)
    taken = learner.take(model_id)
    requests = [learner.request(taken, operation, 0) for operation in taken.operations]
    first = [ops.commit(request) for request in requests]
    lost = requests[1].model_copy(update={"failure": Failure(message="never mind"), "result": None})
    assert ops.commit(requests[0]) == first[0]
    assert ops.commit(lost) == first[1]
    assert [row.step for row in lab.rows(CheckpointRow)] == [1]


def test_of_two_learners_the_one_with_the_old_epoch_commits_nothing(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    ops.submit(model_id, 1)
    slow, quick = Learner(ops, "slow"), Learner(ops, "quick")
    old = slow.take(model_id)
    assert quick.take(model_id).status == "busy"
    lab.clock.now += 31
    new = quick.take(model_id)
    assert (new.status, new.epoch) == ("granted", old.epoch + 1)
    assert _refused(ops, slow.request(old, old.operations[0], 0)) == "stale_epoch"
    assert not ops.renew(ops.model(model_id).policy, "slow", old.epoch).held
    (view,) = quick.execute(new)
    assert view.state == "done"


def test_an_operation_is_committed_in_its_turn_only(ops: Ops) -> None:
    model_id = ops.opened()
    ops.submit(model_id, 1)
    ops.submit(model_id, 2)
    learner = Learner(ops)
    taken = learner.take(model_id)
    assert _refused(ops, learner.request(taken, taken.operations[1], 0)) == "out_of_order"


def test_taking_again_under_the_lease_goes_on_with_its_epoch(ops: Ops) -> None:
    model_id = ops.opened()
    for number in range(1, 4):
        ops.submit(model_id, number)
    learner = Learner(ops)
    first = learner.take(model_id, limit=2)
    learner.execute(first)
    second = learner.take(model_id, limit=2, epoch=first.epoch)
    assert [operation.seq_id for operation in second.operations] == [3]
    assert second.epoch == first.epoch
    assert second.state_id == learner.held[ops.model(model_id).policy]


def test_a_learner_that_was_started_again_goes_on_at_once_and_is_counted(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    view = ops.submit(model_id, 1)
    for _ in range(5):
        old = Learner(ops).take(model_id)
        assert old.status == "granted"
    learner = Learner(ops)
    assert _refused(ops, learner.request(old, old.operations[0], 0).model_copy(update={"epoch": 1})) == "stale_epoch"
    assert learner.take(model_id, epoch=1).status == "busy"
    assert learner.take(model_id).status == "idle"
    assert ops.view(view.request_id).state == "failed"


def test_a_learner_without_the_state_gets_what_makes_it(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    kinds = ("forward_backward", "optim_step", "forward_backward", "forward", "forward_backward", "optim_step")
    ids = [ops.submit(model_id, number, kind).request_id for number, kind in enumerate(kinds, 1)]
    learner = Learner(ops)
    taken = learner.take(model_id)
    assert (taken.start, taken.step, taken.replay) == (None, 0, ())
    learner.execute(taken, most=5)
    lab.clock.now += 31
    other = Learner(ops, "other").take(model_id)
    assert other.step == 1
    assert other.start is not None
    assert other.start.step == 1
    assert not other.fresh_optimizer
    assert [operation.request_id for operation in other.replay] == [ids[2], ids[4]]
    assert [operation.request_id for operation in other.operations] == [ids[5]]
    run_id = ops.model(model_id).run_id
    assert other.state_id == state_id(run_id, 1, [ids[2], ids[4]]) == learner.held[ops.model(model_id).policy]
    assert all(ops.view(request_id).state == "done" for request_id in ids[:5])


def test_what_failed_adds_no_gradients(ops: Ops) -> None:
    model_id = ops.opened()
    bad, good = ops.submit(model_id, 1), ops.submit(model_id, 2)
    ops.submit(model_id, 3, "optim_step")
    learner = Learner(ops)
    taken = learner.take(model_id)
    failed = learner.request(taken, taken.operations[0], 0)
    why = Failure(message="tokens beyond the vocabulary")
    view = ops.commit(failed.model_copy(update={"result": None, "failure": why}))
    assert (view.state, view.failure) == ("failed", why)
    ops.commit(learner.request(taken, taken.operations[1], 0))
    following = learner.take(model_id, epoch=taken.epoch)
    assert [operation.request_id for operation in following.replay] == [good.request_id]
    assert bad.request_id not in {operation.request_id for operation in following.operations}


def test_a_training_checkpoint_follows_the_one_before_it(ops: Ops) -> None:
    model_id = ops.opened()
    for number in (1, 2):
        ops.submit(model_id, number, "optim_step")
    learner = Learner(ops)
    taken = learner.take(model_id)
    ops.commit(learner.request(taken, taken.operations[0], 0))
    assert _refused(ops, learner.request(taken, taken.operations[1], 0)) == "wrong_step"
    assert ops.commit(learner.request(taken, taken.operations[1], 1)).state == "done"
    assert ops.model(model_id).step == 2


def test_an_optimizer_step_is_a_fact_of_the_run(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    ops.submit(model_id, 1, "optim_step")
    Learner(ops).drain(model_id)
    (fact,) = [row for row in lab.rows(JournalRow) if row.type == "mint.v1.policy.updated"]
    assert (fact.body["step"], fact.body["adapter_changed"], fact.body["metrics"]) == (1, True, {"grad_norm": 1.0})


def test_what_takes_its_learner_down_again_and_again_fails_and_the_rest_goes_on(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    poison, fine = ops.submit(model_id, 1), ops.submit(model_id, 2)
    for attempt in range(5):
        assert Learner(ops, f"w{attempt}").take(model_id).status == "granted"
        lab.clock.now += 31
    learner = Learner(ops, "survivor")
    learner.drain(model_id)
    failure = ops.view(poison.request_id).failure
    assert failure is not None
    assert (failure.category, learner.done) == ("server", [2])
    assert "taken 5 times without a result" in failure.message
    assert ops.view(fine.request_id).state == "done"


def test_takes_that_were_given_back_do_not_count_and_reasons_are_kept(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    view = ops.submit(model_id, 1)
    policy = ops.model(model_id).policy
    for _ in range(9):
        taken = ops.take(policy)
        ops.release(policy, "w1", taken.epoch)
    for _ in range(5):
        taken = ops.take(policy)
        assert taken.status == "granted"
        ops.release(policy, "w1", taken.epoch, failure="the store is away")
    assert ops.take(policy).status == "idle"
    failure = ops.view(view.request_id).failure
    assert failure is not None
    assert failure.message.endswith("the last attempt said: the store is away")


def test_one_message_is_under_way_while_no_learner_works(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    policy = ops.model(model_id).policy
    ops.submit(model_id, 2)
    assert ops.messages(REQUESTED) == []
    ops.submit(model_id, 1)
    ops.submit(model_id, 3)
    (message,) = ops.messages(REQUESTED)
    assert (message.ce_id, message.body["policy"], message.replay) == (f"{policy}:2", policy, None)
    learner = Learner(ops)
    taken = learner.take(model_id)
    ops.submit(model_id, 4)
    learner.execute(taken)
    assert len(ops.messages(REQUESTED)) == 1, "a working learner asks by itself"
    ops.release(policy, "w1", taken.epoch)
    assert [row.ce_id for row in ops.messages(REQUESTED)] == [f"{policy}:2", f"{policy}:4"]


def test_a_look_sends_again_what_waits_in_silence_ever_more_patiently(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    ops.submit(model_id, 1)
    ops.take(ops.model(model_id).policy)
    ops.look()
    assert len(ops.messages(REQUESTED)) == 1, "its learner may still be alive"
    lab.clock.now += 31
    ops.look()
    ops.look()
    assert [row.replay for row in ops.messages(REQUESTED)] == [None, 1]
    lab.clock.now += 31
    ops.look()
    assert len(ops.messages(REQUESTED)) == 2
    lab.clock.now += 30
    ops.look()
    assert [row.replay for row in ops.messages(REQUESTED)] == [None, 1, 2]


def test_old_training_checkpoints_go_but_the_state_stays(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    for number in range(1, 6):
        ops.submit(model_id, number, "optim_step")
    Learner(ops).drain(model_id)
    freed = lab.database.write_now(retention.thin, ops.model(model_id).run_id)
    assert freed
    assert [row.step for row in lab.rows(CheckpointRow)] == [4, 5]
    ops.submit(model_id, 6)
    taken = Learner(ops, "other").take(model_id)
    assert taken.start is not None
    assert "optimizer.safetensors" in taken.start.files


def test_nothing_is_taken_of_a_policy_that_is_no_model(lab: Lab, ops: Ops) -> None:
    assert ops.take("acme/adder").status == "idle"
    assert lab.rows(OperationRow) == []
