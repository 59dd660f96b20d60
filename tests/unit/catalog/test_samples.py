"""Samplers and samples: fixed when they are made, taken by one worker, committed once, bounded."""

from __future__ import annotations

from typing import Any

import pytest

from services.catalog import ended_samples, operation_work, path_changes, samplers, samples
from services.catalog.tables import LeaseRow
from shared.catalog.operations import (
    AwaitSamples,
    ChangePath,
    CommitOperation,
    CopyPath,
    Failure,
    OperationsLease,
    SamplerJoined,
    SamplesEnded,
    SampleTaken,
)
from shared.errors import Refused
from shared.operations.payload import StepResult, encode
from tests.catalog_kit import TINY, Lab, sft
from tests.operations_kit import Learner, Ops, content, saved

REQUESTED = "mint.v1.sample.requested"


@pytest.fixture
def ops(lab: Lab) -> Ops:
    return Ops(lab, session_ttl_s=1e9)


def _sampler(ops: Ops) -> str:
    return ops.new_sampler(ops.session(), base=TINY).sampler_id


def _outcome(request_id: str, taken: SampleTaken, worker: str = "r1", **other: Any) -> CommitOperation:
    fields: dict[str, Any] = {"result": content(encode(StepResult({}))), **other}
    return CommitOperation(request_id=request_id, worker=worker, epoch=taken.epoch, **fields)


def _code(work: Any, *args: Any, **kwargs: Any) -> tuple[str, int]:
    with pytest.raises(Refused) as refused:
        work(*args, **kwargs)
    return refused.value.code, refused.value.status


def test_a_sample_is_announced_taken_and_committed_once(lab: Lab, ops: Ops) -> None:
    view = ops.submit_sample(_sampler(ops))
    (message,) = ops.messages(REQUESTED)
    assert message.body == {"request_id": view.request_id, "base": TINY}
    taken = ops.take_sample(view.request_id)
    assert (taken.status, taken.tenant, taken.base, taken.revision) == ("granted", "acme", TINY, None)
    assert ops.take_sample(view.request_id, "r2").status == "busy"
    done = ops.commit(_outcome(view.request_id, taken))
    late = _outcome(view.request_id, taken, result=None, failure=Failure(message="late"))
    assert ops.commit(late) == done
    assert ops.take_sample(view.request_id).status == "closed"
    assert lab.rows(LeaseRow) == []


def test_of_two_workers_the_one_with_the_old_epoch_commits_nothing(lab: Lab, ops: Ops) -> None:
    view = ops.submit_sample(_sampler(ops))
    old = ops.take_sample(view.request_id)
    lab.clock.now += 31
    new = ops.take_sample(view.request_id, "r2")
    assert _code(ops.commit, _outcome(view.request_id, old)) == ("stale_epoch", 409)
    assert ops.commit(_outcome(view.request_id, new, "r2")).state == "done"


@pytest.mark.parametrize("named", ["policy", "request_id", "resource"])
def test_the_lease_of_a_sample_is_renewed_and_released_by_its_name(ops: Ops, named: str) -> None:
    view = ops.submit_sample(_sampler(ops))
    taken = ops.take_sample(view.request_id)
    where = {
        "policy": {"policy": view.request_id},
        "request_id": {"policy": "", "request_id": view.request_id},
        "resource": {"policy": f"operation:{view.request_id}"},
    }[named]
    lease = OperationsLease(worker="r1", epoch=taken.epoch, **where)
    assert ops.write(operation_work.renew, lease, ops.rules, ops.now()).held
    ops.write(operation_work.release, lease, ops.rules, ops.now())
    assert ops.take_sample(view.request_id, "r2").status == "granted"


def test_the_same_number_is_the_same_sample_and_another_content_is_refused(ops: Ops) -> None:
    sampler_id = _sampler(ops)
    first = ops.submit_sample(sampler_id, 10**18)
    assert ops.submit_sample(sampler_id, 10**18).request_id == first.request_id
    assert _code(ops.submit_sample, sampler_id, 10**18, seed=2) == ("other_payload", 409)
    assert len(ops.messages(REQUESTED)) == 1


def test_a_tenant_may_have_so_many_open(lab: Lab) -> None:
    ops = Ops(lab, sample_backlog=2)
    mine, theirs = _sampler(ops), ops.new_sampler(ops.session("other"), base=TINY).sampler_id
    views = [ops.submit_sample(mine, number) for number in range(2)]
    assert _code(ops.submit_sample, mine, 2) == ("too_many_samples", 429)
    ops.submit_sample(theirs)
    ops.commit(_outcome(views[0].request_id, ops.take_sample(views[0].request_id)))
    ops.submit_sample(mine, 2)


def test_a_sampler_again_is_the_same_and_with_another_subject_is_refused(ops: Ops) -> None:
    session_id = ops.session()
    first = ops.new_sampler(session_id, 1, base=TINY)
    assert ops.new_sampler(session_id, 1, base=TINY) == first
    assert _code(ops.new_sampler, session_id, 1, path="tinker://a/sampler_weights/b")[1] == 409
    assert _code(ops.new_sampler, session_id, 2) == ("invalid_request", 400)
    assert _code(ops.new_sampler, session_id, 2, base="tiny/lama")[1] == 404


def test_a_sampler_is_of_a_revision_by_path_or_by_name(lab: Lab, ops: Ops) -> None:
    lab.finish(lab.request(sft()))
    session_id = ops.session()
    assert ops.new_sampler(session_id, 1, base="acme/adder").revision == "acme/adder@1"
    assert _code(ops.new_sampler, ops.session("other"), 1, base="acme/adder")[1] == 404
    model_id = ops.opened()
    ops.save(model_id, 1, "x")
    Learner(ops).drain(model_id)
    ops.export(model_id)
    path = f"tinker://{model_id}/sampler_weights/x"
    assert ops.new_sampler(session_id, 2, path=path).revision == f"{ops.model(model_id).policy}@1"
    direct = ops.submit_sample(None, path=path, tenant="acme")
    assert ops.take_sample(direct.request_id).revision == f"{ops.model(model_id).policy}@1"


def test_another_tenants_weights_are_sampled_with_while_they_are_published_or_copied(ops: Ops) -> None:
    model_id = ops.opened()
    ops.save(model_id, 1, "x")
    Learner(ops).drain(model_id)
    ops.export(model_id)
    path, theirs = f"tinker://{model_id}/sampler_weights/x", ops.opened("other")
    copy = f"tinker://{theirs}/sampler_weights/x"

    def publish(published: bool) -> None:
        ops.write(path_changes.change, ChangePath(path=path, tenant="acme", published=published), ops.now())

    publish(True)
    session_id = ops.session("other")
    borrowed = ops.new_sampler(session_id, 1, path=path).sampler_id
    ops.write(path_changes.copy, CopyPath(tenant="other", source=path, target=copy), ops.rules, ops.now())
    copied = ops.new_sampler(session_id, 2, path=copy).sampler_id
    own = ops.new_sampler(ops.session(), 3, path=path).sampler_id
    first = ops.submit_sample(borrowed, 0)
    publish(False)
    assert _code(ops.submit_sample, borrowed, 1) == ("not_found", 404)
    assert ops.submit_sample(borrowed, 0) == first
    assert [ops.submit_sample(sampler_id).state for sampler_id in (copied, own)] == ["queued", "queued"]


def test_a_session_that_is_over_samples_no_more(ops: Ops) -> None:
    session_id = ops.session()
    sampler_id = ops.new_sampler(session_id, base=TINY).sampler_id
    ops.finish(session_id)
    assert _code(ops.submit_sample, sampler_id) == ("session_ended", 410)


def test_an_expired_revision_is_not_sampled_with(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    view = ops.save(model_id, 1)
    Learner(ops).drain(model_id)
    ops.export(model_id)
    sampler_id = saved(ops.view(view.request_id)).sampling_session_id
    lab.clock.now += ops.rules.ephemeral_ttl_s
    assert _code(ops.submit_sample, sampler_id) == ("expired", 410)


def test_what_takes_its_worker_down_again_and_again_fails(lab: Lab, ops: Ops) -> None:
    view = ops.submit_sample(_sampler(ops))
    for attempt in range(5):
        assert ops.take_sample(view.request_id, f"r{attempt}").status == "granted"
        lab.clock.now += 31
    assert ops.take_sample(view.request_id).status == "closed"
    failure = ops.view(view.request_id).failure
    assert failure is not None
    assert failure.category == "server"


def test_a_look_sends_silent_samples_again_ever_more_patiently(lab: Lab, ops: Ops) -> None:
    view = ops.submit_sample(_sampler(ops))
    replays: list[int | None] = []
    for _ in range(9):
        lab.clock.now += 61
        ops.look()
        replays = [row.replay for row in ops.messages(REQUESTED)]
    assert replays == [None, 1, 2]
    ops.take_sample(view.request_id)
    lab.clock.now += 25
    ops.look()
    assert len(ops.messages(REQUESTED)) == 3


def test_a_dead_letter_fails_a_sample_that_nobody_works_on(ops: Ops) -> None:
    sampler_id = _sampler(ops)
    held, free = ops.submit_sample(sampler_id, 1), ops.submit_sample(sampler_id, 2)
    ops.take_sample(held.request_id)
    for view in (held, free):
        ops.write(samples.dead, view.request_id, "no worker has the base", ops.now())
    assert ops.view(held.request_id).state == "running"
    failure = ops.view(free.request_id).failure
    assert failure is not None
    assert "no worker has the base" in failure.message


def _ended(ops: Ops, sampler: str, **asked: Any) -> SamplesEnded:
    found: SamplesEnded = ops.lab.database.read_now(ended_samples.ended, sampler, AwaitSamples(**asked))
    return found


def _done(ops: Ops, sampler: str, number: int, **other: Any) -> str:
    view = ops.submit_sample(sampler, number)
    ops.commit(_outcome(view.request_id, ops.take_sample(view.request_id), **other))
    return view.request_id


def test_samples_that_ended_are_named_once_in_the_order_of_their_ends(ops: Ops) -> None:
    sampler, other = _sampler(ops), _sampler(ops)
    waiting = ops.submit_sample(sampler, 0)
    assert _ended(ops, sampler) == SamplesEnded(cursor=0)
    second = _done(ops, sampler, 1)
    _done(ops, other, 0)
    failed = _done(ops, sampler, 2, result=None, failure=Failure(message="no"))
    found = _ended(ops, sampler)
    assert [(item.request_id, item.failed) for item in found.items] == [(second, False), (failed, True)]
    assert [item.size is not None for item in found.items] == [True, False]
    ops.cancel(waiting.request_id)
    behind = _ended(ops, sampler, after=found.cursor)
    assert [item.request_id for item in behind.items] == [waiting.request_id]
    assert _ended(ops, sampler, after=behind.cursor) == SamplesEnded(cursor=behind.cursor)


def test_a_page_ends_where_the_next_one_begins(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_samples, "PAGE", 2)
    sampler = _sampler(ops)
    ids = [_done(ops, sampler, number) for number in range(5)]
    found, cursor = [], 0
    for _ in range(3):
        page = _ended(ops, sampler, after=cursor)
        found += [item.request_id for item in page.items]
        cursor = page.cursor
    assert found == ids


def test_a_range_of_numbers_has_its_own_samples_and_passes_over_the_others(ops: Ops) -> None:
    sampler = _sampler(ops)
    _done(ops, sampler, 1)
    mine = _done(ops, sampler, 11)
    _done(ops, sampler, 2)
    found = _ended(ops, sampler, first=10, last=19)
    assert ([item.request_id for item in found.items], found.cursor) == ([mine], 3)
    assert _ended(ops, sampler, first=20, last=29).items == ()


def test_a_cursor_from_the_future_of_an_older_state_begins_again(ops: Ops) -> None:
    sampler = _sampler(ops)
    request_id = _done(ops, sampler, 1)
    found = _ended(ops, sampler, after=40)
    assert ([item.request_id for item in found.items], found.cursor) == ([request_id], 1)


def test_clients_that_join_are_counted_and_strangers_are_not(ops: Ops) -> None:
    sampler = _sampler(ops)

    def join(tenant: str | None) -> int:
        joined: SamplerJoined = ops.write(samplers.join, sampler, tenant, ops.now())
        return joined.client

    assert [join("acme"), join(None)] == [1, 2]
    assert _code(join, "beta") == ("not_found", 404)
    assert _code(_ended, ops, sampler, tenant="beta") == ("not_found", 404)
    assert join("acme") == 3
