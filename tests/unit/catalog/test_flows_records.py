"""Whole runs whose records get several optimizer steps, and whose rollouts lag behind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from services.catalog import commands, leases, retention, runs
from services.catalog.residency import desired
from services.catalog.tables import CheckpointRow, CommandRow, FileRow, OutboxRow, RevisionRow
from shared.catalog.api import CommitAnswer, LeaseRequest, Result, UpdateResult
from tests.catalog_flows import dpo, finish_choosing, opened, rollouts, updates, with_method, work_on
from tests.catalog_kit import TINY, Lab, grpo, put_nothing, sft

ADDER = "acme/adder"


def _stale(steps: int, staleness: int, **other: Any) -> dict[str, Any]:
    return with_method(grpo(steps=steps), staleness=staleness, **other)


def test_a_record_gets_epochs_times_minibatches_steps_and_one_revision(lab: Lab) -> None:
    run_id = lab.request(with_method(grpo(steps=8), epochs=2, minibatches=2))
    assert lab.finish(run_id) == [
        "rollout:1", "update:1", "update:2", "update:3", "update:4", "export:4",
        "rollout:5", "update:5", "update:6", "update:7", "update:8", "export:8",
    ]  # fmt: skip
    asked = updates(lab, run_id)
    assert [(body.record_step, body.epoch, body.minibatch) for body in asked] == [
        (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (5, 0, 0), (5, 0, 1), (5, 1, 0), (5, 1, 1),
    ]  # fmt: skip
    assert [body.export for body in asked] == [False, False, False, True] * 2
    keys = [body.record.key for body in asked if body.record]
    assert [key.split("/")[2] for key in keys] == ["rollout-1"] * 4 + ["rollout-5"] * 4
    asked_for = [(body.step, body.record, body.revision) for body in rollouts(lab, run_id)]
    assert asked_for == [(1, 1, None), (5, 2, f"{ADDER}@1")]
    assert [(row.revision, row.step) for row in lab.rows(RevisionRow)] == [(f"{ADDER}@1", 4), (f"{ADDER}@2", 8)]
    assert lab.run(run_id).outcome == f"promoted: {ADDER}:live is {ADDER}@2"


@pytest.mark.parametrize("seed", range(4))
def test_a_stale_record_names_the_revision_after_record_r_1_s(lab: Lab, seed: int) -> None:
    """r ≤ s + 1: what the run starts from; then the revision after record r − 1 − s, in whatever order workers end."""
    lab.finish(lab.request(sft(steps=1)))
    run_id = lab.request(_stale(12, 2, epochs=2))
    done = finish_choosing(lab, run_id, random.Random(seed).choice)
    assert lab.run(run_id).outcome == f"promoted: {ADDER}:live is {ADDER}@7"
    assert [name for name in done if name.startswith("update")] == [f"update:{step}" for step in range(1, 13)]
    sampled = [(body.step, body.revision) for body in rollouts(lab, run_id)]
    assert sampled == [
        (1, f"{ADDER}@1"), (3, f"{ADDER}@1"), (5, f"{ADDER}@1"),
        (7, f"{ADDER}@2"), (9, f"{ADDER}@3"), (11, f"{ADDER}@4"),
    ]  # fmt: skip
    digests = {row.revision: row.adapter_sha256 for row in lab.rows(RevisionRow)}
    assert all(body.adapter_sha256 == digests[body.revision or ""] for body in rollouts(lab, run_id))


def test_up_to_s_rollouts_are_open_beside_the_update(lab: Lab) -> None:
    run_id = lab.request(_stale(6, 2))
    assert opened(lab, run_id) == ["rollout:1", "rollout:2", "rollout:3"]
    work_on(lab, run_id, "rollout:2")
    assert opened(lab, run_id) == ["rollout:1", "rollout:3"]
    work_on(lab, run_id, "rollout:1")
    assert sorted(opened(lab, run_id)) == ["rollout:3", "update:1"]
    work_on(lab, run_id, "update:1")
    assert sorted(opened(lab, run_id)) == ["export:1", "rollout:3"]
    work_on(lab, run_id, "export:1")
    assert sorted(opened(lab, run_id)) == ["rollout:3", "rollout:4", "update:2"]
    finish_choosing(lab, run_id, min)
    assert lab.run(run_id).state == "completed"


def test_several_workers_hold_leases_of_one_run(lab: Lab) -> None:
    run_id = lab.request(_stale(6, 2))
    work_on(lab, run_id, "rollout:1")
    names = opened(lab, run_id)
    epochs = {name: lab.take(f"{run_id}:{name}", f"worker of {name}").epoch for name in names}
    assert len(epochs) == 3
    assert [lab.take(f"{run_id}:{name}").status for name in names] == ["busy"] * 3
    for name, epoch in epochs.items():
        assert isinstance(lab.commit(f"{run_id}:{name}", epoch, f"worker of {name}"), CommitAnswer)


def _counts(lab: Lab) -> tuple[int, ...]:
    return tuple(len(lab.rows(table)) for table in (OutboxRow, CommandRow, CheckpointRow, RevisionRow))


def test_with_staleness_every_command_delivered_twice_is_done_once(lab: Lab) -> None:
    """SkyRL#2035. A worker that lost its lease commits nothing; whoever comes late gets what won."""
    run_id = lab.request(_stale(6, 2))
    choose = random.Random(5).choice
    while names := opened(lab, run_id):
        command_id = f"{run_id}:{choose(names)}"
        old = lab.take(command_id, "w1").epoch
        lab.clock.now += 31
        new = lab.take(command_id, "w2").epoch
        assert getattr(lab.commit(command_id, old, "w1"), "code", "") == "stale_epoch"
        won = lab.commit(command_id, new, "w2")
        assert lab.commit(command_id, old, "w1") == lab.commit(command_id, new, "w2") == won
        again = lab.take(command_id, "w3")
        assert (again.status, again.event) == ("committed", getattr(won, "event", None))
        lab.advance(run_id)
        before = _counts(lab)
        lab.advance(run_id)
        assert _counts(lab) == before
    assert lab.run(run_id).state == "completed"
    assert [row.step for row in lab.rows(CheckpointRow)] == [1, 2, 3, 4, 5, 6]
    assert [row.number for row in lab.rows(RevisionRow)] == [1, 2, 3, 4, 5, 6]
    assert [row.kind for row in lab.rows(CommandRow)].count("rollout") == 6
    assert [row.takes for row in lab.rows(CommandRow)] == [2] * 18


def test_a_catalog_that_restarts_anywhere_asks_for_nothing_twice(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole, parts = Lab(tmp_path / "whole"), Lab(tmp_path / "parts")
    run_id = whole.request(_stale(6, 2, epochs=2), id="same")
    expected = finish_choosing(whole, run_id, min)
    assert parts.request(_stale(6, 2, epochs=2), id="same") == run_id
    done = []
    while names := opened(parts, run_id):
        done.append(min(names))
        command_id = f"{run_id}:{done[-1]}"
        parts.commit(command_id, parts.take(command_id).epoch)
        parts.close()
        parts = Lab(tmp_path / "parts")
        parts.advance(run_id)
        before = _counts(parts)
        parts.advance(run_id)
        assert _counts(parts) == before
    assert done == expected
    seeds = [{row.command_id: row.body.get("seed") for row in lab.rows(CommandRow)} for lab in (whole, parts)]
    assert seeds[0] == seeds[1]
    assert [body.revision for body in rollouts(parts, run_id)] == [body.revision for body in rollouts(whole, run_id)]
    whole.close()
    parts.close()


def test_silent_commands_are_sent_again_each_by_its_own_silence(lab: Lab) -> None:
    run_id = lab.request(_stale(6, 2))
    epoch = lab.take(f"{run_id}:rollout:2").epoch
    lab.clock.now += 20
    request = LeaseRequest(command_id=f"{run_id}:rollout:2", worker="w1", epoch=epoch)
    assert lab.database.write_now(leases.renew, request, lab.rules, lab.clock()).held
    lab.clock.now += 101
    sent = lab.database.write_now(commands.reissue_silent, lab.clock(), 120.0)
    assert sorted(sent) == [f"{run_id}:rollout:1", f"{run_id}:rollout:3"]


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_an_ended_run_closes_every_open_command(lab: Lab, end: Any) -> None:
    run_id, following = lab.request(_stale(6, 2)), lab.request(sft())
    work_on(lab, run_id, "rollout:1")
    held = {name: lab.take(f"{run_id}:{name}").epoch for name in opened(lab, run_id)}
    assert len(held) == 3
    lab.database.write_now(lambda s: runs.end(s, runs.find(s, run_id), end, "enough", lab.bases, lab.clock()))
    assert opened(lab, run_id) == []
    for name, epoch in held.items():
        assert getattr(lab.commit(f"{run_id}:{name}", epoch), "code", "") == "run_ended"
        assert lab.take(f"{run_id}:{name}").status == "closed"
    assert lab.run(following).state == "running"


def test_a_rollout_that_waits_for_its_revision_holds_up_no_update(lab: Lab) -> None:
    lab.unready = {f"{ADDER}@1", f"{ADDER}@2"}
    run_id = lab.request(_stale(6, 2))
    for name in ("rollout:1", "rollout:2", "update:1", "export:1"):
        work_on(lab, run_id, name)
    assert sorted(opened(lab, run_id)) == ["rollout:3", "update:2"]
    assert lab.run(run_id).waiting_for == f"{ADDER}@1"
    since = lab.run(run_id).waiting_since
    lab.clock.now += 100
    for name in ("rollout:3", "update:2", "export:2"):
        work_on(lab, run_id, name)
    assert opened(lab, run_id) == ["update:3"]
    assert (lab.run(run_id).waiting_for, lab.run(run_id).waiting_since) == (f"{ADDER}@1", since)
    held = lab.database.read_now(desired, TINY, lab.clock())
    assert {entry.revision for entry in held.entries} == {f"{ADDER}@1", f"{ADDER}@2"}
    lab.unready = {f"{ADDER}@2"}
    lab.advance(run_id)
    assert sorted(opened(lab, run_id)) == ["rollout:4", "update:3"]
    assert lab.run(run_id).waiting_for == f"{ADDER}@2"
    lab.clock.now += 901
    lab.advance(run_id)
    assert lab.run(run_id).state == "failed"
    assert f"{ADDER}@2 was ready on 0 of 1" in lab.run(run_id).outcome
    assert opened(lab, run_id) == []


def test_what_open_rollouts_sample_with_stays_resident(lab: Lab) -> None:
    run_id = lab.request(_stale(6, 2))
    for name in ("rollout:1", "rollout:2", "rollout:3", "update:1", "export:1", "update:2", "export:2"):
        work_on(lab, run_id, name)
    assert sorted(opened(lab, run_id)) == ["rollout:4", "rollout:5", "update:3"]
    assert {body.step: body.revision for body in rollouts(lab, run_id)}[4] == f"{ADDER}@1"
    held = lab.database.read_now(desired, TINY, lab.clock())
    assert [(entry.revision, entry.priority) for entry in held.entries] == [(f"{ADDER}@1", 0), (f"{ADDER}@2", 0)]


@pytest.mark.parametrize(
    ("body", "refers"),
    [
        (dpo(steps=2), True),
        (with_method(grpo(steps=2), kl={"coefficient": 0.1}), True),
        (grpo(steps=2), False),
        (sft(steps=2), False),
    ],
)
def test_the_reference_is_the_starting_revisions_checkpoint(lab: Lab, body: dict[str, Any], refers: bool) -> None:
    """Frozen for the run: every step measures its distance from the same files."""
    fresh = lab.request({**body, "policy": "acme/new"})
    lab.finish(fresh)
    assert [update.reference for update in updates(lab, fresh)] == [None, None]
    parent = lab.request(sft(steps=3))
    lab.finish(parent)
    run_id = lab.request(body)
    lab.finish(run_id)
    references = [update.reference for update in updates(lab, run_id)]
    if not refers:
        assert references == [None, None]
        return
    reference, again = references
    assert reference is not None
    assert reference == again
    assert reference.step == 3
    assert set(reference.files) == {"adapter.safetensors", "state.json", "probe.json"}
    assert reference.files["adapter.safetensors"].key.startswith(f"attempts/{parent}/update-3/")


def test_a_reference_keeps_its_files_while_a_run_uses_it(lab: Lab) -> None:
    """Retention drops what only the next step of the parent's own run could use, never the adapter."""

    def passing(result: Result) -> Result:
        if not isinstance(result, UpdateResult):
            return result
        names = ("gradients.safetensors", "old_logprobs.safetensors")
        files = dict(result.checkpoint.files)
        prefix = files["adapter.safetensors"].key.rsplit("/", 1)[0]
        files |= {name: put_nothing(f"{prefix}/{name}", name.encode()) for name in names}
        return result.model_copy(update={"checkpoint": result.checkpoint.model_copy(update={"files": files})})

    lab.worker.change = passing
    parent = lab.request(with_method(sft(steps=6, promote_to=None), save_every=2))
    lab.finish(parent)
    run_id = lab.request(dpo(steps=2, parent=f"{ADDER}@1"))
    lab.database.write_now(retention.thin, parent)
    lab.finish(run_id)
    kept = {row.step: set(row.files) for row in lab.rows(CheckpointRow) if row.run_id == parent}
    assert set(kept) == {2, 4, 5, 6}
    assert kept[2] == {"adapter.safetensors", "state.json", "probe.json"}
    assert {"optimizer.safetensors", "gradients.safetensors", "old_logprobs.safetensors"} <= kept[6]
    named = {row.key for row in lab.rows(FileRow)}
    for update in updates(lab, run_id):
        assert update.reference is not None
        assert {ref.key for ref in update.reference.files.values()} <= named
    first = updates(lab, run_id)[0].start
    assert first is not None
    assert set(first.files) == {"adapter.safetensors", "state.json", "probe.json"}
    second = updates(lab, run_id)[1].start
    assert second is not None
    assert {"optimizer.safetensors", "gradients.safetensors", "old_logprobs.safetensors"} <= set(second.files)


@pytest.mark.parametrize(("rate", "fails"), [(0.0, False), (1e-4, True), (None, True)])
def test_the_rate_that_the_step_used_says_whether_bytes_must_change(lab: Lab, rate: float | None, fails: bool) -> None:
    def change(result: Result) -> Result:
        if not isinstance(result, UpdateResult):
            return result
        metrics = {"grad_norm": 0.5} if rate is None else {"grad_norm": 0.5, "learning_rate": rate}
        return result.model_copy(update={"adapter_changed": False, "metrics": metrics})

    lab.worker.change = change
    run_id = lab.request(with_method(sft(steps=1), optimizer={"learning_rate": 1e-3}))
    lab.finish(run_id)
    assert (lab.run(run_id).state == "failed") == fails
    assert ("left the adapter's bytes unchanged" in lab.run(run_id).outcome) == fails
