"""Paths: who sees them, what they keep, and how they go."""

from __future__ import annotations

from typing import Any

import pytest
from mint_schemas.training import Lora

from services.catalog import imports, path_changes, paths
from services.catalog.operation_tables import PathRow
from services.catalog.tables import FileRow, RevisionRow
from shared.adapters import layout
from shared.adapters.manifest import Manifest, TensorSpec
from shared.catalog.operations import ChangePath, CopyPath, ImportPath, OperationView
from shared.errors import Refused
from shared.operations.payload import LoadPayload, SavePayload
from tests.catalog_kit import TINY, Lab, put_nothing, sft, sha
from tests.operations_kit import TENANT, Learner, Ops, saved


@pytest.fixture
def ops(lab: Lab) -> Ops:
    return Ops(lab, session_ttl_s=1e9)


def _saved(ops: Ops, name: str = "x", **other: Any) -> tuple[str, str]:
    """(model, path) of a saved training checkpoint after one step."""
    model_id = ops.opened()
    ops.submit(model_id, 1, "optim_step")
    view = ops.submit(model_id, 2, "save_weights", SavePayload("weights", name, **other))
    Learner(ops).drain(model_id)
    return model_id, str(saved(ops.view(view.request_id)).path)


def _change(ops: Ops, path: str, tenant: str = TENANT, **what: Any) -> Any:
    return ops.write(path_changes.change, ChangePath(path=path, tenant=tenant, **what), ops.now())


def _status(work: Any, *args: Any) -> int:
    with pytest.raises(Refused) as refused:
        work(*args)
    return refused.value.status


def _fails(view: OperationView) -> str:
    assert view.failure is not None
    assert view.failure.category == "user"
    return view.failure.message


def test_a_saved_training_checkpoint_has_a_path(ops: Ops) -> None:
    model_id, path = _saved(ops)
    assert path == f"tinker://{model_id}/weights/x"
    found = ops.resolve(path)
    assert (found.kind, found.has_optimizer, found.revision, found.base) == ("weights", True, None, TINY)
    assert found.checkpoint is not None
    assert found.size_bytes == sum(ref.size for ref in found.checkpoint.files.values())


@pytest.mark.parametrize(
    "text",
    [
        "tinker://a/weights/..",
        "tinker://a/weights/../b",
        "tinker://../weights/b",
        "tinker://a/models/b",
        "tinker://a/weights/b/c",
        "tinker://a/weights/",
        "weights/a",
        "",
        "tinker://a/weights/b c",
        "tinker://a/weights/" + "x" * 201,
    ],
)
def test_what_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="is no path"):
        paths.parse(text)


@pytest.mark.parametrize("name", ["..", "a/b", "a..b", ".hidden", "", "x" * 201])
def test_names_that_cannot_be_fail_when_they_are_submitted_and_hold_up_nothing(ops: Ops, name: str) -> None:
    model_id = ops.opened()
    assert "name" in _fails(ops.submit(model_id, 1, "save_weights", SavePayload("weights", name)))
    ops.submit(model_id, 2)
    learner = Learner(ops)
    learner.drain(model_id)
    assert learner.done == [2]


def test_another_tenant_finds_what_is_published_and_nothing_else(ops: Ops) -> None:
    _, path = _saved(ops)
    assert _status(ops.resolve, path, "other") == 404
    assert _status(_change, ops, path, "other") == 404
    _change(ops, path, published=True)
    assert ops.resolve(path, "other").published
    with pytest.raises(Refused) as refused:
        _change(ops, path, "other", published=False)
    assert refused.value.status == 404
    _change(ops, path, published=False)
    assert _status(ops.resolve, path, "other") == 404


def test_a_path_expires_and_its_files_go(lab: Lab, ops: Ops) -> None:
    _, path = _saved(ops, ttl_s=60.0)
    checkpoint = ops.resolve(path).checkpoint
    assert checkpoint is not None
    keys = {ref.key for ref in checkpoint.files.values()}
    assert keys <= {row.key for row in lab.rows(FileRow)}
    lab.clock.now += 61
    assert _status(ops.resolve, path) == 404
    ops.look()
    assert lab.rows(PathRow) == []
    assert not keys & {row.key for row in lab.rows(FileRow)}


def test_an_expiry_can_be_taken_away(lab: Lab, ops: Ops) -> None:
    _, path = _saved(ops, ttl_s=60.0)
    assert _change(ops, path, ttl_s=0).expires_at is None
    lab.clock.now += 61
    assert ops.resolve(path).path == path


def test_a_copy_shares_the_files_and_each_goes_alone(lab: Lab, ops: Ops) -> None:
    _, path = _saved(ops)
    target = f"tinker://{ops.opened()}/weights/copy"
    ops.write(path_changes.copy, CopyPath(source=path, target=target, tenant=TENANT), ops.rules, ops.now())
    assert ops.resolve(target).checkpoint == ops.resolve(path).checkpoint
    ops.write(path_changes.delete, path, TENANT, ops.rules, ops.now())
    assert _status(ops.resolve, path) == 404
    checkpoint = ops.resolve(target).checkpoint
    assert checkpoint is not None
    assert {ref.key for ref in checkpoint.files.values()} <= {row.key for row in lab.rows(FileRow)}


def test_a_copy_takes_no_name_that_is_taken_and_no_foreign_model(ops: Ops) -> None:
    model_id, path = _saved(ops)
    again = CopyPath(source=path, target=path, tenant=TENANT)
    assert _status(ops.write, path_changes.copy, again, ops.rules, ops.now()) == 409
    foreign = ops.opened("other")
    copy = CopyPath(source=path, target=f"tinker://{foreign}/weights/x", tenant=TENANT)
    assert _status(ops.write, path_changes.copy, copy, ops.rules, ops.now()) == 404
    other_kind = CopyPath(source=path, target=f"tinker://{model_id}/sampler_weights/x", tenant=TENANT)
    assert _status(ops.write, path_changes.copy, other_kind, ops.rules, ops.now()) == 400


def test_a_load_gets_its_checkpoint_when_it_is_accepted(lab: Lab, ops: Ops) -> None:
    _, path = _saved(ops)
    for optimizer in (True, False):
        other = ops.opened()
        ops.submit(other, 1, "load_weights", LoadPayload(path, optimizer))
        taken = Learner(ops, other).take(other)
        (operation,) = taken.operations
        assert operation.reference is not None
        assert operation.has_optimizer is optimizer
        assert ("optimizer.safetensors" in operation.reference.files) is optimizer
    waiting = ops.opened()
    ops.submit(waiting, 1, "load_weights", LoadPayload(path, True))
    ops.write(path_changes.delete, path, TENANT, ops.rules, ops.now())
    (operation,) = Learner(ops, "late").take(waiting).operations
    assert operation.reference is not None
    assert {ref.key for ref in operation.reference.files.values()} <= {row.key for row in lab.rows(FileRow)}


def test_loading_puts_the_model_into_a_state_of_its_own(ops: Ops) -> None:
    _, path = _saved(ops)
    model_id = ops.opened()
    ops.submit(model_id, 1)
    ops.submit(model_id, 2, "load_weights", LoadPayload(path, True))
    Learner(ops).drain(model_id)
    ops.submit(model_id, 3)
    taken = Learner(ops, "other").take(model_id)
    assert (taken.step, taken.replay) == (1, ())


def test_loads_that_do_not_fit_fail(ops: Ops) -> None:
    _, path = _saved(ops)
    small = ops.new_model(ops.session(), lora=Lora(rank=4)).model_id
    assert small is not None
    assert "they must be equal" in _fails(ops.submit(small, 1, "load_weights", LoadPayload(path)))
    foreign = ops.opened("other")
    assert "there is no path" in _fails(ops.submit(foreign, 1, "load_weights", LoadPayload(path)))
    assert "is no path" in _fails(ops.submit(foreign, 2, "load_weights", LoadPayload("tinker://x/weights/../y")))


def test_a_model_begins_from_a_path_with_or_without_optimizer(ops: Ops) -> None:
    _, path = _saved(ops)
    session_id = ops.session()
    for number, optimizer in enumerate((True, False)):
        model_id = ops.new_model(session_id, number, path=path, optimizer=optimizer).model_id
        assert model_id is not None
        ops.submit(model_id, 1)
        taken = Learner(ops).take(model_id)
        assert taken.start is not None
        assert ("optimizer.safetensors" in taken.start.files) is optimizer
        assert taken.fresh_optimizer is not optimizer


def test_what_events_made_can_be_loaded_by_run_and_step(lab: Lab, ops: Ops) -> None:
    body = {**sft(), "lora": {"rank": 8}}
    run_id = lab.request(body)
    lab.finish(run_id)
    path = f"tinker://{run_id}/weights/2"
    found = ops.resolve(path)
    assert (found.revision, found.has_optimizer) == ("acme/adder@1", True)
    assert _status(ops.resolve, path, "other") == 404
    assert _status(ops.resolve, f"tinker://{run_id}/weights/9") == 404
    model_id = ops.new_model(ops.session(), path=path, optimizer=True).model_id
    assert model_id is not None
    assert ops.run(model_id).parent == "acme/adder@1"


def _import(name: str = "mine", seed: str = "a", tenant: str = TENANT) -> ImportPath:
    names = (layout.CONFIG_FILE, layout.TENSOR_FILE, "adapter.safetensors", "state.json")
    files = {file: put_nothing(f"blobs/sha256/{sha(seed + file)}", f"{seed} {file}".encode()) for file in names}
    serving = {file: files[file] for file in names[:2]}
    manifest = Manifest(
        revision="",
        policy="",
        base=TINY,
        base_sha256=sha(TINY),
        tokenizer_sha256=sha("tokenizer"),
        chat_template_sha256=sha("template"),
        rank=8,
        alpha=16,
        use_rslora=False,
        target_modules=("q_proj",),
        tensors=(TensorSpec(name="x", shape=(1,), dtype="F32"),),
        files=serving,
        adapter_sha256=layout.adapter_sha256({file: ref.sha256 for file, ref in serving.items()}),
        parent=None,
        run_id="",
        step=0,
        zero_delta=False,
        probe=None,
    )
    return ImportPath(
        session_id=None, base=TINY, name=name, files=files, manifest=manifest, digest=sha(seed), tenant=tenant
    )


def _imported(ops: Ops, request: ImportPath) -> Any:
    return ops.write(imports.import_path, request, ops.rules, ops.now())


def test_an_imported_adapter_is_a_revision_that_can_be_trained_on(lab: Lab, ops: Ops) -> None:
    view = _imported(ops, _import())
    path = saved(view).path
    found = ops.resolve(path)
    (row,) = lab.rows(RevisionRow)
    assert (found.revision, row.manifest["run_id"], row.manifest["revision"]) == (
        row.revision,
        row.run_id,
        row.revision,
    )
    lora = Lora(rank=8, alpha=16, target_modules=("q_proj",))
    model_id = ops.new_model(ops.session(), lora=lora, path=path).model_id
    assert model_id is not None
    assert ops.run(found.model_id).state == "completed"


def test_an_import_again_is_the_same_and_another_under_its_name_is_refused(ops: Ops) -> None:
    first = _imported(ops, _import())
    assert _imported(ops, _import()).request_id == first.request_id
    assert _status(_imported, ops, _import(seed="b")) == 409
    assert _imported(ops, _import(tenant="other")).request_id != first.request_id
    ops.write(path_changes.delete, saved(first).path, TENANT, ops.rules, ops.now())
    assert _imported(ops, _import(seed="b")).request_id != first.request_id


def test_an_import_whose_manifest_says_something_else_is_refused(ops: Ops) -> None:
    request = _import()
    wrong = request.model_copy(update={"manifest": request.manifest.model_copy(update={"adapter_sha256": sha("z")})})
    with pytest.raises(Refused, match="adapter_sha256"):
        _imported(ops, wrong)


def test_a_name_that_expired_is_taken_anew_without_what_it_was(lab: Lab, ops: Ops) -> None:
    """Whoever read the old weights must not read the new ones, and the old revision goes as if the look had come."""
    model_id = ops.opened()
    ops.submit(model_id, 1, "optim_step")
    ops.save(model_id, 2, "x", ttl_s=60.0)
    Learner(ops).drain(model_id)
    ops.export(model_id)
    path = f"tinker://{model_id}/sampler_weights/x"
    _change(ops, path, published=True)
    lab.clock.now += 61
    ops.submit(model_id, 3, "optim_step")
    ops.save(model_id, 4, "x")
    Learner(ops).drain(model_id)
    ops.export(model_id)
    assert not ops.resolve(path).published
    assert _status(ops.resolve, path, "other") == 404
    assert [row.ephemeral for row in lab.rows(RevisionRow)] == [True, False]


def test_an_import_into_a_session_of_another_tenant_is_refused(ops: Ops) -> None:
    for session_id in (ops.session("other"), "no-such-session"):
        assert _status(_imported, ops, _import().model_copy(update={"session_id": session_id})) == 404
