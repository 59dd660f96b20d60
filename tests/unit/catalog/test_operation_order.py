"""Operations go by number, whatever the order of arrival, the repetitions and the deaths of learners."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.catalog.operation_tables import OperationRow
from shared.errors import Refused
from tests.catalog_kit import Lab
from tests.operations_kit import Learner, Ops, saved, train

KINDS = ("forward", "forward_backward", "optim_step")


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, str]]:
    """Numbers 1 to n in any order, some of them again; between them learners come and die."""
    count = draw(st.integers(1, 7))
    kinds = [draw(st.sampled_from(KINDS)) for _ in range(count)]
    numbers = draw(st.permutations(range(1, count + 1)))
    again = draw(st.lists(st.sampled_from(numbers), max_size=4))
    submitted = [(number, kinds[number - 1]) for number in (*numbers, *again)]
    breaks = draw(st.lists(st.tuples(st.integers(0, len(submitted)), st.sampled_from(("drain", "die"))), max_size=4))
    for at, what in breaks:
        submitted.insert(at, (0, what))
    return submitted


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=arrivals())
def test_each_operation_is_done_once_in_order_whatever_happens(lab: Lab, events: list[tuple[int, str]]) -> None:
    """SkyRL#2048: chunks arrive out of order. SkyRL#2035: what comes again is applied once."""
    ops = Ops(lab)
    model_id = ops.opened()
    ids: dict[int, str] = {}
    learner = Learner(ops)
    for number, what in events:
        if what == "drain":
            learner.drain(model_id)
        elif what == "die":
            # It commits the first of what it took, and is never heard of again.
            taken = learner.take(model_id)
            if taken.status == "granted":
                learner.execute(taken, most=1)
            lab.clock.now += 31
            learner = Learner(ops, f"w{len(learner.done)}-{lab.clock.now}", done=learner.done)
        else:
            view = ops.submit(model_id, number, what)
            assert ids.setdefault(number, view.request_id) == view.request_id
    learner.drain(model_id)
    assert learner.done == sorted(ids)
    assert all(ops.view(request_id).state == "done" for request_id in ids.values())
    stored = [row for row in lab.rows(OperationRow) if row.model_id == model_id and row.kind != "create_model"]
    assert len(stored) == len(ids)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=st.sets(st.integers(1, 8), min_size=1))
def test_what_is_behind_a_gap_waits_then_fails_and_names_it(lab: Lab, numbers: set[int]) -> None:
    ops = Ops(lab, operation_gap_s=120.0)
    model_id = ops.opened()
    ids = {number: ops.submit(model_id, number).request_id for number in numbers}
    missing = next(number for number in range(1, 10) if number not in numbers)
    learner = Learner(ops)
    learner.drain(model_id)
    before, behind = [n for n in sorted(numbers) if n < missing], [n for n in sorted(numbers) if n > missing]
    assert learner.done == before
    lab.clock.now += 119
    ops.look()
    assert all(ops.view(ids[number]).failure is None for number in numbers)
    lab.clock.now += 2
    ops.look()
    for number in behind:
        failure = ops.view(ids[number]).failure
        assert failure is not None
        assert failure.category == "user"
        assert f"operation {number} waits for {missing}, which never came" in failure.message
    if behind:
        with pytest.raises(Refused, match="was passed over"):
            ops.submit(model_id, missing)
    following = ops.submit(model_id, max(behind, default=missing - 1) + 1).request_id
    learner.drain(model_id)
    assert ops.view(following).state == "done"


def test_the_same_again_is_the_same_operation_and_another_content_is_refused(lab: Lab) -> None:
    """SkyRL#2035: a retried request is applied again."""
    ops = Ops(lab)
    model_id = ops.opened()
    first = ops.submit(model_id, 1)
    Learner(ops).drain(model_id)
    again = ops.submit(model_id, 1)
    assert (again.request_id, again.state) == (first.request_id, "done")
    with pytest.raises(Refused, match="exists with another content") as refused:
        ops.submit(model_id, 1, payload=train(seed=5))
    assert (refused.value.code, refused.value.status) == ("other_payload", 409)


def test_what_its_client_does_not_number_comes_behind_what_was_accepted(lab: Lab) -> None:
    ops = Ops(lab)
    model_id = ops.opened()
    third = ops.submit(model_id, 3)
    unnumbered = [ops.submit(model_id, 0, "forward", key=f"k{n}") for n in range(2)]
    assert ops.submit(model_id, 0, "forward", key="k0").request_id == unnumbered[0].request_id
    for number in (4, 1, 2):
        ops.submit(model_id, number)
    taken = Learner(ops).take(model_id)
    assert [operation.seq_id for operation in taken.operations] == [1, 2, 3, 3, 3, 4]
    ids = [operation.request_id for operation in taken.operations[2:5]]
    assert ids == [third.request_id, *(view.request_id for view in unnumbered)]


def test_what_is_not_allowed_is_stored_as_failed_and_uses_its_number(lab: Lab) -> None:
    ops = Ops(lab)
    model_id = ops.opened()
    failed = ops.submit(model_id, 1, "forward_backward", failure={"message": "NaN weights", "category": "user"})
    assert failed.failure is not None
    ops.submit(model_id, 2, "optim_step")
    learner = Learner(ops)
    learner.drain(model_id)
    assert learner.done == [2]
    again = ops.submit(model_id, 1, "forward_backward", failure={"message": "NaN weights", "category": "user"})
    assert again.request_id == failed.request_id


def test_a_failed_save_needs_no_payload(lab: Lab) -> None:
    ops = Ops(lab)
    model_id = ops.opened()
    view = ops.submit(model_id, 1, "save_weights", failure={"message": "no such path", "category": "user"})
    assert view.state == "failed"


@pytest.mark.parametrize("number", [-1, 2**63])
def test_numbers_that_cannot_be_are_refused(lab: Lab, number: int) -> None:
    ops = Ops(lab)
    with pytest.raises(Refused, match="is not allowed"):
        ops.submit(ops.opened(), number)


def test_numbers_far_ahead_of_the_work_are_held_back(lab: Lab) -> None:
    ops = Ops(lab, operation_backlog=10)
    model_id = ops.opened()
    ops.submit(model_id, 10)
    with pytest.raises(Refused, match="ahead of the work") as refused:
        ops.submit(model_id, 11)
    assert refused.value.status == 429


def test_a_cancelled_operation_holds_up_nothing(lab: Lab) -> None:
    ops = Ops(lab)
    model_id = ops.opened()
    first, second = ops.submit(model_id, 1), ops.submit(model_id, 2)
    assert ops.cancel(first.request_id).failure is not None
    learner = Learner(ops)
    learner.drain(model_id)
    assert learner.done == [2]
    assert ops.cancel(second.request_id).state == "done"


def test_what_a_learner_has_taken_is_not_cancelled(lab: Lab) -> None:
    ops = Ops(lab)
    model_id = ops.opened()
    view = ops.submit(model_id, 1)
    learner = Learner(ops)
    taken = learner.take(model_id)
    assert ops.cancel(view.request_id).state == "running"
    learner.execute(taken)
    assert ops.view(view.request_id).state == "done"


def test_operations_of_another_tenant_are_not_there(lab: Lab) -> None:
    ops = Ops(lab)
    model_id = ops.opened()
    with pytest.raises(Refused) as refused:
        ops.submit(model_id, 1, tenant="other")
    assert (refused.value.code, refused.value.status) == ("not_found", 404)


def test_operations_of_unloaded_models_are_forgotten_long_after(lab: Lab) -> None:
    ops = Ops(lab, session_ttl_s=1e9, result_ttl_s=3600.0)
    gone, open_ = ops.opened(), ops.opened()
    for model_id in (gone, open_):
        ops.submit(model_id, 1, "forward")
        Learner(ops).drain(model_id)
    ops.submit(gone, 0, "unload_model")
    for _ in range(2):
        lab.clock.now += 7 * 86400 + 3601
        ops.look()
    assert {row.model_id for row in lab.rows(OperationRow)} == {open_}
    with pytest.raises(Refused, match="was passed over"):
        ops.submit(open_, 1, "optim_step", key="another")


def test_results_expire_and_say_so_while_what_a_state_needs_stays(lab: Lab) -> None:
    ops = Ops(lab, result_ttl_s=3600.0, session_ttl_s=1e9)
    model_id = ops.opened()
    for number, kind in enumerate(("forward_backward", "optim_step", "forward_backward"), 1):
        ops.submit(model_id, number, kind)
    learner = Learner(ops)
    views = learner.drain(model_id)
    assert saved(ops.view(views[0].request_id)).metrics == {"loss:sum": 1.0}
    lab.clock.now += 3601
    ops.look()
    assert [ops.view(view.request_id).expired for view in views] == [True, True, False]
    ops.submit(model_id, 4)
    taken = Learner(ops, "fresh").take(model_id)
    assert [operation.request_id for operation in taken.replay] == [views[2].request_id]
    assert taken.replay[0].payload.inline is not None
