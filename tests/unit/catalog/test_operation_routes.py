"""The routes, through the client: every method, errors in words, and waiting that ends with the commit."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from mint_schemas.common import FileRef
from mint_schemas.training import Lora

from services.catalog import notices
from services.catalog.config import CatalogSettings
from services.catalog.drive import Driver
from services.catalog.moves import Mover
from services.catalog.parts import Parts
from services.catalog.routes_operations import operation_routes
from services.catalog.routes_paths import path_routes
from services.catalog.routes_policies import policy_routes
from services.catalog.routes_sessions import session_routes
from services.catalog.routes_work import work_routes
from services.catalog.validate import Validator
from services.catalog.waiting import Waiters
from shared.catalog import operations as ops
from shared.catalog.api import CommitRequest, TakeRequest
from shared.catalog.client import CatalogClient
from shared.catalog.operations_client import OperationsClient
from shared.errors import Refused
from shared.operations.content import keep
from shared.operations.payload import AdamPayload, LoadPayload, SavePayload, digest, encode
from shared.residency import Desired
from shared.store.memory import MemoryStore
from tests.catalog_kit import TINY, Lab, eventually, open_commands
from tests.operations_kit import Learner, Ops, content, sample, saved, train, work_through

TENANT = "acme"


class Api:
    def __init__(self, lab: Lab) -> None:
        self.lab, self.store = lab, MemoryStore()
        self.driver = Driver(lab.database, lab.bases, self.store, CatalogSettings(), lab.clock, _nowhere, lambda: None)
        mover = Mover(lab.database, self.driver, lab.bases, lab.clock)
        validator = Validator(lab.database, self.store, lab.bases, self.driver.readiness)
        self.waiters = Waiters(lab.database)
        lab.database.committed = self.waiters.committed
        around = (self.store, lab.bases, lab.rules, lab.clock, self.waiters)
        parts = Parts(lab.database, self.driver, validator, mover, *around)
        self.app = app = FastAPI()
        for routes in (work_routes, session_routes, operation_routes, path_routes, policy_routes):
            app.include_router(routes(parts))
        self.client = OperationsClient("http://catalog", transport=httpx.ASGITransport(app))
        self.catalog = CatalogClient("http://catalog", transport=httpx.ASGITransport(app))

    async def opened(self) -> str:
        session = await self.client.new_session(ops.NewSession(tenant=TENANT))
        request = ops.NewModel(
            tenant=TENANT, session_id=session.session_id, model_seq_id=0, base=TINY, lora=Lora(rank=8)
        )
        view = await self.client.new_model(request)
        assert view.model_id is not None
        return view.model_id

    async def submit(self, model_id: str, number: int, kind: ops.OperationKind, data: bytes) -> ops.OperationView:
        request = ops.Submit(
            tenant=TENANT, model_id=model_id, seq_id=number, kind=kind, digest=digest(data), payload=content(data)
        )
        return await self.client.submit(request)

    async def work(self, model_id: str) -> None:
        """A learner does what waits, and its files are in the store."""
        policy = (await self.client.model(model_id, TENANT)).policy
        await work_through(self.client, self.store, policy, "w1")

    async def export(self, model_id: str) -> None:
        """An exporter does what is open."""
        run_id = (await self.client.model(model_id)).run_id
        (command_id,) = self.lab.database.read_now(open_commands, run_id)
        made: list[tuple[str, bytes]] = []

        def put(key: str, data: bytes) -> FileRef:
            made.append((key, data))
            return FileRef(key=key, sha256=hashlib.sha256(data).hexdigest(), size=len(data))

        self.lab.worker.put = put
        taken = await self.catalog.take(TakeRequest(command_id=command_id, worker="e1"))
        result = self.lab.worker.result(self.lab.body(command_id), self.lab.bases[TINY])
        for key, data in made:
            await self.store.put(key, data)
        request = CommitRequest(command_id=command_id, worker="e1", epoch=taken.epoch, result=result)
        await self.catalog.commit(request)


async def _nowhere(token: str, wanted: Desired) -> None:
    return None


@pytest.fixture
async def api(lab: Lab) -> AsyncIterator[Api]:
    api = Api(lab)
    yield api
    await api.client.close()
    await api.catalog.close()


async def _refusal(work: object) -> Refused:
    with pytest.raises(Refused) as caught:
        await work  # type: ignore[misc]
    return caught.value


async def test_from_a_session_to_a_sample_of_what_was_trained(api: Api) -> None:
    model_id = await api.opened()
    session_id = model_id.split(":")[0]
    await api.submit(model_id, 1, "forward_backward", encode(train()))
    await api.submit(model_id, 2, "optim_step", encode(AdamPayload()))
    kept = await api.submit(model_id, 3, "save_weights", encode(SavePayload("weights", "w")))
    save = await api.submit(model_id, 4, "save_sampler_weights", encode(SavePayload("sampler_weights", "s")))
    await api.work(model_id)
    await api.export(model_id)
    assert saved(await api.client.operation(kept.request_id, TENANT)).path == f"tinker://{model_id}/weights/w"
    path = saved(await api.client.operation(save.request_id, TENANT)).path
    sampler = await api.client.new_sampler(
        ops.NewSampler(tenant=TENANT, session_id=session_id, sampling_session_seq_id=0, path=path)
    )
    assert await api.client.sampler(sampler.sampler_id, TENANT) == sampler
    data = encode(sample())
    asked = ops.SubmitSample(
        tenant=TENANT, sampling_session_id=sampler.sampler_id, seq_id=1, digest=digest(data), payload=content(data)
    )
    view = await api.client.submit_sample(asked)
    taken = await api.client.take_sample(ops.TakeSample(request_id=view.request_id, worker="r1"))
    assert (taken.revision, taken.payload) == (sampler.revision, content(data))
    assert [item.path for item in (await api.client.paths(TENANT, model_id)).items] == [
        f"tinker://{model_id}/weights/w",
        path,
    ]
    (revision,) = (await api.catalog.revisions((await api.client.model(model_id)).policy)).items
    assert revision.revision == sampler.revision


async def test_whoever_waits_hears_of_the_commit_at_once(api: Api) -> None:
    model_id = await api.opened()
    view = await api.submit(model_id, 1, "forward", encode(train()))
    waiting = asyncio.create_task(api.client.operation(view.request_id, TENANT, wait_s=30))
    await eventually(lambda: view.request_id in api.waiters._events)
    assert (await api.client.operation(view.request_id, TENANT, wait_s=0.01)).state == "queued"
    await api.work(model_id)
    async with asyncio.timeout(10):
        assert (await waiting).state == "done"
    assert api.waiters._events == {}


async def test_what_another_process_commits_is_seen_too(lab: Lab, api: Api) -> None:
    model_id = await api.opened()
    view = await api.submit(model_id, 1, "forward", encode(train()))
    lab.database.committed = None
    net = asyncio.create_task(api.waiters.run())
    waiting = asyncio.create_task(api.client.operation(view.request_id, TENANT, wait_s=30))
    await eventually(lambda: view.request_id in api.waiters._events)
    await api.client.cancel(view.request_id, ops.Caller(tenant=TENANT))
    async with asyncio.timeout(10):
        assert (await waiting).state == "failed"
    net.cancel()
    with pytest.raises(asyncio.CancelledError):
        await net


async def test_large_payloads_are_files_that_are_there_first(api: Api) -> None:
    model_id = await api.opened()
    data = encode(train()) + b" " * 40_000
    kept = await keep(api.store, data)
    assert kept.file is not None
    fields = {"tenant": TENANT, "model_id": model_id, "seq_id": 1, "kind": "forward", "digest": digest(data)}
    missing = kept.file.model_copy(update={"key": kept.file.key[:-1] + "x"})
    refused = await _refusal(
        api.client.submit(ops.Submit.model_validate({**fields, "payload": ops.Content(file=missing)}))
    )
    assert (refused.code, refused.status) == ("files_missing", 409)
    view = await api.client.submit(ops.Submit.model_validate({**fields, "payload": kept}))
    assert view.state == "queued"


async def test_payloads_that_cannot_be_read_are_refused(api: Api) -> None:
    model_id = await api.opened()
    for data in (b"", b"nonsense", encode(AdamPayload())):
        refused = await _refusal(api.submit(model_id, 1, "load_weights", data))
        assert refused.status == 400


async def test_a_commit_that_names_files_which_are_not_there_is_refused(lab: Lab, api: Api) -> None:
    model_id = await api.opened()
    await api.submit(model_id, 1, "optim_step", encode(AdamPayload()))
    policy = (await api.client.model(model_id)).policy
    taken = await api.client.take(ops.TakeOperations(policy=policy, worker="w1"))
    request = Learner(Ops(lab)).request(taken, taken.operations[0], 0)
    refused = await _refusal(api.client.commit(request))
    assert (refused.code, refused.status) == ("files_missing", 409)


async def test_paths_are_changed_copied_and_deleted(api: Api) -> None:
    model_id, other = await api.opened(), await api.opened()
    await api.submit(model_id, 1, "save_weights", encode(SavePayload("weights", "w")))
    await api.work(model_id)
    path, copy = f"tinker://{model_id}/weights/w", f"tinker://{other}/weights/w"
    await api.client.change_path(ops.ChangePath(tenant=TENANT, path=path, published=True))
    assert (await api.client.resolve_path(path, "other")).published
    await api.client.copy_path(ops.CopyPath(tenant=TENANT, source=path, target=copy))
    await api.client.delete_path(path, TENANT)
    assert (await _refusal(api.client.resolve_path(path, TENANT))).status == 404
    assert (await api.client.paths(TENANT)).total == 1
    load = await api.submit(other, 1, "load_weights", encode(LoadPayload(copy)))
    assert load.state == "queued"


async def test_sessions_and_models_are_listed_renewed_and_finished(api: Api) -> None:
    model_id = await api.opened()
    session_id = model_id.split(":")[0]
    assert (await api.client.heartbeat(session_id, ops.Caller(tenant=TENANT))).state == "open"
    assert (await api.client.session(session_id, TENANT)).model_ids == (model_id,)
    assert (await api.client.sessions(TENANT)).total == (await api.client.models(TENANT)).total == 1
    assert (await api.client.sessions("other")).items == []
    view = await api.client.finish_session(session_id, ops.FinishSession(tenant=TENANT, reason="done"))
    assert (view.state, (await api.client.session(session_id, TENANT)).state) == ("finished", "finished")
    assert (await api.client.model(model_id, TENANT)).state == "unloaded"
    refused = await _refusal(api.client.heartbeat(session_id, ops.Caller(tenant=TENANT)))
    assert (refused.code, refused.status) == ("session_ended", 410)


async def test_what_nobody_needs_any_more_is_told_behind_the_commit(lab: Lab, api: Api) -> None:
    told: list[str] = []
    lab.database.committed = lambda info: told.extend(notices.freed_in(info))
    model_id = await api.opened()
    await api.submit(model_id, 1, "save_weights", encode(SavePayload("weights", "w")))
    await api.work(model_id)
    path = f"tinker://{model_id}/weights/w"
    checkpoint = (await api.client.resolve_path(path)).checkpoint
    assert checkpoint is not None
    await api.client.delete_path(path, TENANT)
    assert sorted(told) == sorted(ref.key for ref in checkpoint.files.values())
    await api.driver.remove(told)
    assert [await api.store.size(key) for key in told] == [None] * len(told)


@pytest.mark.parametrize("field", ["sdk_version", "tags", "user_metadata"])
async def test_a_nul_is_refused_whatever_the_database(api: Api, field: str) -> None:
    """PostgreSQL would fail at it, and the client ask again and again."""
    value = {"sdk_version": "a\0", "tags": ("a", "b\0"), "user_metadata": {"b": "\\\0"}}[field]
    with pytest.raises(Refused, match="NUL character") as caught:
        await api.client.new_session(ops.NewSession.model_validate({"tenant": TENANT, field: value}))
    assert caught.value.status == 400
    spelled = await api.client.new_session(ops.NewSession(tenant=TENANT, tags=("\\u0000", "\\\\u0000")))
    assert spelled.tags == ("\\u0000", "\\\\u0000")
