"""Sampler saves: from a committed training checkpoint through the export to a path or a sampler."""

from __future__ import annotations

from typing import Any

import pytest

from services.catalog import aliases, path_changes, retention, sampler_saves
from services.catalog.operation_tables import FileUseRow
from services.catalog.tables import CheckpointRow, CommandRow, FileRow, RevisionRow
from shared.catalog.api import ExportResult
from shared.errors import Refused
from shared.operations.payload import SavePayload
from tests.catalog_kit import Lab, sft
from tests.operations_kit import TENANT, Learner, Ops, saved


@pytest.fixture
def ops(lab: Lab) -> Ops:
    return Ops(lab, session_ttl_s=1e9)


def _trained(ops: Ops) -> str:
    """A model after its first optimizer step."""
    model_id = ops.opened()
    ops.submit(model_id, 1)
    ops.submit(model_id, 2, "optim_step")
    Learner(ops).drain(model_id)
    return model_id


def test_a_named_save_is_done_once_its_revision_is_registered(lab: Lab, ops: Ops) -> None:
    model_id = _trained(ops)
    view = ops.save(model_id, 3, "first")
    ops.submit(model_id, 4)
    learner = Learner(ops)
    learner.drain(model_id)
    assert (ops.view(view.request_id).state, learner.done) == ("running", [3, 4])
    ops.export(model_id)
    done = ops.view(view.request_id)
    path = f"tinker://{model_id}/sampler_weights/first"
    assert saved(done).path == path
    found = ops.resolve(path)
    (row,) = lab.rows(RevisionRow)
    assert (found.revision, row.step, row.ephemeral) == (f"{ops.model(model_id).policy}@1", 1, False)
    assert found.checkpoint is not None
    assert found.size_bytes == row.adapter_bytes
    assert ops.run(model_id).state == "running"


def test_an_ephemeral_save_gives_a_sampler_and_a_revision_that_expires(lab: Lab, ops: Ops) -> None:
    model_id = _trained(ops)
    view = ops.save(model_id, 3)
    Learner(ops).drain(model_id)
    ops.export(model_id)
    sampler_id = saved(ops.view(view.request_id)).sampling_session_id
    (row,) = lab.rows(RevisionRow)
    assert row.ephemeral
    assert row.expires_at == lab.clock.now + ops.rules.ephemeral_ttl_s
    sample = ops.submit_sample(sampler_id)
    taken = ops.take_sample(sample.request_id)
    assert (taken.revision, taken.adapter_sha256) == (row.revision, row.adapter_sha256)
    with pytest.raises(Refused, match="is ephemeral"):
        lab.database.read_now(aliases.check_target, row.policy, row.revision)


def test_saves_of_one_state_share_a_revision_and_a_name_keeps_it(lab: Lab, ops: Ops) -> None:
    model_id = _trained(ops)
    views = [ops.save(model_id, 3), ops.save(model_id, 4, "kept"), ops.save(model_id, 5)]
    learner = Learner(ops)
    learner.drain(model_id)
    assert [row.kind for row in lab.rows(CommandRow)] == ["export"]
    ops.export(model_id)
    late = ops.save(model_id, 6, "late")
    learner.drain(model_id)
    assert all(ops.view(view.request_id).state == "done" for view in (*views, late))
    (row,) = lab.rows(RevisionRow)
    assert (row.ephemeral, row.expires_at) == (False, None)


def test_a_save_before_the_first_step_is_of_the_fresh_adapter(lab: Lab, ops: Ops) -> None:
    model_id = ops.opened()
    view = ops.save(model_id, 1, "fresh")
    ops.submit(model_id, 2, "optim_step")
    learner = Learner(ops)
    learner.drain(model_id)
    ops.export(model_id)
    assert ops.view(view.request_id).state == "done"
    assert [row.step for row in lab.rows(CheckpointRow)] == [0, 1]
    assert [row.step for row in lab.rows(RevisionRow)] == [0]
    assert ops.model(model_id).step == 1


def test_a_save_of_another_state_than_the_model_s_is_refused(ops: Ops) -> None:
    model_id = _trained(ops)
    ops.save(model_id, 3, "x")
    learner = Learner(ops)
    taken = learner.take(model_id)
    request = learner.request(taken, taken.operations[0], 0)
    with pytest.raises(Refused, match="is not the state") as refused:
        ops.commit(request)
    assert refused.value.code == "wrong_step"


def test_a_taken_name_is_a_user_error_and_the_same_number_again_is_not(ops: Ops) -> None:
    model_id = _trained(ops)
    first = ops.save(model_id, 3, "x")
    learner = Learner(ops)
    learner.drain(model_id)
    ops.export(model_id)
    assert ops.save(model_id, 3, "x").request_id == first.request_id
    second = ops.save(model_id, 4, "x")
    learner.drain(model_id)
    failure = ops.view(second.request_id).failure
    assert failure is not None
    assert failure.category == "user"
    assert "exists already" in failure.message


def test_overwriting_moves_the_name_and_leaves_the_revision(lab: Lab, ops: Ops) -> None:
    model_id = _trained(ops)
    ops.save(model_id, 3, "x")
    learner = Learner(ops)
    learner.drain(model_id)
    ops.export(model_id)
    ops.submit(model_id, 4, "optim_step")
    ops.save(model_id, 5, "x", overwrite=True)
    learner.drain(model_id)
    ops.export(model_id)
    policy = ops.model(model_id).policy
    assert ops.resolve(f"tinker://{model_id}/sampler_weights/x").revision == f"{policy}@2"
    assert [(row.revision, row.ephemeral) for row in lab.rows(RevisionRow)] == [
        (f"{policy}@1", False),
        (f"{policy}@2", False),
    ]


def test_a_failed_export_fails_its_saves_with_the_reason_and_the_model_goes_on(lab: Lab, ops: Ops) -> None:
    model_id = _trained(ops)
    view = ops.save(model_id, 3, "x")
    learner = Learner(ops)
    learner.drain(model_id)
    (command,) = lab.rows(CommandRow)

    def fail(session: Any) -> None:
        row = session.get(CommandRow, command.command_id)
        sampler_saves.export_failed(session, ops.run(model_id), row, "a tensor is not finite", ops.rules, ops.now())

    lab.database.write_now(fail)
    failure = ops.view(view.request_id).failure
    assert failure is not None
    assert failure.category == "server"
    assert "step 1 could not be exported: a tensor is not finite" in failure.message
    again = ops.save(model_id, 4, "x")
    learner.drain(model_id)
    ops.export(model_id)
    assert ops.view(again.request_id).state == "done"


def test_an_export_of_something_else_fails_the_save_and_not_the_model(lab: Lab, ops: Ops) -> None:
    model_id = _trained(ops)
    view = ops.save(model_id, 3, "x")
    learner = Learner(ops)
    learner.drain(model_id)

    def change(result: Any) -> Any:
        assert isinstance(result, ExportResult)
        return result.model_copy(update={"content": result.content.model_copy(update={"rank": 4})})

    lab.worker.change = change
    ops.export(model_id)
    failure = ops.view(view.request_id).failure
    assert failure is not None
    assert "rank" in failure.message
    assert ops.run(model_id).state == "running"
    ops.submit(model_id, 4)
    learner.drain(model_id)
    assert learner.done == [3, 4]


def test_an_expired_revision_goes_with_its_files_and_the_others_stay(lab: Lab, ops: Ops) -> None:
    model_id = _trained(ops)
    learner = Learner(ops)
    ops.save(model_id, 3)
    learner.drain(model_id)
    ops.export(model_id)
    ops.submit(model_id, 4, "optim_step")
    ops.save(model_id, 5, "kept")
    learner.drain(model_id)
    ops.export(model_id)
    gone, kept = lab.rows(RevisionRow)
    lab.clock.now += ops.rules.ephemeral_ttl_s + 1
    ops.look()
    assert [row.revision for row in lab.rows(RevisionRow)] == [kept.revision]
    named = {row.key for row in lab.rows(FileRow)}
    blobs = {ref["key"] for ref in gone.manifest["files"].values()}
    assert not blobs & named
    assert {ref["key"] for ref in kept.manifest["files"].values()} <= named
    assert {row.holder for row in lab.rows(FileUseRow) if row.holder.startswith("revision:")} == {
        f"revision:{kept.revision}"
    }
    ops.save(model_id, 6)
    learner.drain(model_id)
    assert lab.rows(RevisionRow)[-1].number == 2, "the state is exported already"


def test_use_keeps_an_ephemeral_revision_and_the_end_of_its_session_ends_it(lab: Lab, ops: Ops) -> None:
    """prime-rl#1857: a sweep deletes what is in use."""
    model_id = _trained(ops)
    view = ops.save(model_id, 3)
    Learner(ops).drain(model_id)
    ops.export(model_id)
    sampler_id = saved(ops.view(view.request_id)).sampling_session_id
    lab.clock.now += ops.rules.ephemeral_ttl_s - 1
    sample = ops.submit_sample(sampler_id)
    lab.clock.now += 2
    ops.look()
    assert len(lab.rows(RevisionRow)) == 1
    ops.cancel(sample.request_id)
    ops.finish(model_id.split(":")[0])
    lab.clock.now += ops.rules.grace_s + 1
    ops.look()
    assert lab.rows(RevisionRow) == []


def test_the_adapter_of_a_saved_state_stays_to_be_loaded(lab: Lab, ops: Ops) -> None:
    model_id = _trained(ops)
    ops.save(model_id, 3, "x")
    learner = Learner(ops)
    learner.drain(model_id)
    ops.export(model_id)
    for number in range(4, 8):
        ops.submit(model_id, number, "optim_step")
    learner.drain(model_id)
    lab.database.write_now(retention.thin, ops.model(model_id).run_id)
    found = ops.resolve(f"tinker://{model_id}/sampler_weights/x")
    assert found.checkpoint is not None
    assert set(found.checkpoint.files) == {"adapter.safetensors", "state.json"}
    named = {row.key for row in lab.rows(FileRow)}
    assert {ref.key for ref in found.checkpoint.files.values()} <= named


def test_a_sampling_session_is_not_given_out_again_for_other_weights(ops: Ops) -> None:
    model_id = _trained(ops)
    payload = SavePayload("sampler_weights", "", sampling_session_seq_id=1)
    first = ops.submit(model_id, 3, "save_sampler_weights", payload)
    again = ops.submit(model_id, 4, "save_sampler_weights", payload)
    ops.submit(model_id, 5, "optim_step")
    other = ops.submit(model_id, 6, "save_sampler_weights", payload)
    Learner(ops).drain(model_id)
    ops.export(model_id)
    ops.export(model_id)
    assert saved(ops.view(first.request_id)) == saved(ops.view(again.request_id))
    failure = ops.view(other.request_id).failure
    assert failure is not None
    assert "exists with another content" in failure.message


def test_a_save_that_outlives_its_session_leaves_its_revision_the_grace_alone(lab: Lab, ops: Ops) -> None:
    model_id = _trained(ops)
    ops.save(model_id, 3)
    Learner(ops).drain(model_id)
    ops.finish(model_id.split(":")[0])
    ops.export(model_id)
    (row,) = lab.rows(RevisionRow)
    assert row.expires_at == lab.clock.now + ops.rules.grace_s


def test_a_revision_that_a_run_continues_stays_as_long_as_the_run_goes_on(lab: Lab, ops: Ops) -> None:
    model_id = _trained(ops)
    ops.save(model_id, 3)
    Learner(ops).drain(model_id)
    ops.export(model_id)
    parent = f"{ops.model(model_id).policy}@1"
    refused = lab.run(lab.request({**sft(), "parent": parent}))
    assert (refused.state, "ephemeral" in refused.outcome) == ("failed", True)
    ops.save(model_id, 4, "kept")
    Learner(ops).drain(model_id)
    run_id = lab.request({**sft(), "parent": parent})
    assert lab.run(run_id).state == "running"
    ops.write(path_changes.delete, f"tinker://{model_id}/sampler_weights/kept", TENANT, ops.rules, ops.now())
    lab.clock.now += ops.rules.grace_s + 1
    ops.look()
    assert [row.revision for row in lab.rows(RevisionRow)] == [parent]
    lab.finish(run_id)
    ops.look()
    assert parent not in [row.revision for row in lab.rows(RevisionRow)]
