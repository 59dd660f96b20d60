"""The internal API over its routes: resolution, pages, refusals, files before rows."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from mint_schemas.commands import CheckpointRef
from mint_schemas.common import FileRef

from services.catalog.config import CatalogSettings
from services.catalog.drive import Driver
from services.catalog.moves import Mover
from services.catalog.parts import Parts
from services.catalog.routes_policies import policy_routes
from services.catalog.routes_runs import run_routes
from services.catalog.routes_work import work_routes
from services.catalog.validate import Validator
from services.catalog.waiting import Waiters
from shared.catalog.api import CommitRequest, MoveAlias, PinPolicy, TakeRequest, UpdateResult, ValidateRequest
from shared.catalog.client import CatalogClient
from shared.errors import Refused
from shared.residency import Desired
from shared.store.memory import MemoryStore
from tests.catalog_kit import TINY, Lab, grpo, sft


class Api:
    def __init__(self, lab: Lab) -> None:
        self.store = MemoryStore()
        self.desired: list[tuple[str, Desired]] = []
        driver = Driver(lab.database, lab.bases, self.store, CatalogSettings(), lab.clock, self._write, lambda: None)
        mover = Mover(lab.database, driver, lab.bases, lab.clock)
        validator = Validator(lab.database, self.store, lab.bases, driver.readiness)
        waiters = Waiters(lab.database)
        parts = Parts(lab.database, driver, validator, mover, self.store, lab.bases, lab.rules, lab.clock, waiters)
        app = FastAPI()
        for router in (work_routes(parts), run_routes(parts), policy_routes(parts)):
            app.include_router(router)
        self.driver = driver
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://catalog")
        self.client = CatalogClient("http://catalog", transport=httpx.ASGITransport(app))

    async def _write(self, token: str, wanted: Desired) -> None:
        self.desired.append((token, wanted))


@pytest.fixture
async def api(lab: Lab) -> AsyncIterator[Api]:
    api = Api(lab)
    yield api
    await api.http.aclose()
    await api.client.close()


async def _refusal(work: object) -> Refused:
    with pytest.raises(Refused) as caught:
        await work  # type: ignore[misc]
    return caught.value


async def test_base_names_resolve_first_and_exactly(lab: Lab, api: Api) -> None:
    found = await api.client.resolve(TINY)
    assert (found.base, found.revision, found.policy) == (TINY, None, None)
    refused = await _refusal(api.client.resolve("tiny/Llama"))
    assert (refused.status, refused.near) == (404, [TINY])


async def test_references_resolve_to_revisions_or_near_matches(lab: Lab, api: Api) -> None:
    lab.finish(lab.request(sft()))
    by_alias, by_number = await api.client.resolve("acme/adder"), await api.client.resolve("acme/adder@1")
    assert by_alias.revision == by_number.revision == "acme/adder@1"
    assert (by_alias.alias, by_alias.alias_version, by_number.alias) == ("live", 1, None)
    unknown = await _refusal(api.client.resolve("acme/addr"))
    assert (unknown.code, unknown.near) == ("unknown_reference", ["acme/adder"])
    number = await _refusal(api.client.resolve("acme/adder@7"))
    assert (number.code, number.near) == ("unknown_revision", ["acme/adder@1"])
    alias = await _refusal(api.client.resolve("acme/adder:canary"))
    assert (alias.code, alias.near) == ("unknown_alias", ["acme/adder:live"])
    assert "its aliases: live → acme/adder@1" in str(alias)
    assert (await _refusal(api.client.resolve("gpt-4"))).status == 404


async def test_pages_hold_every_row_once(lab: Lab, api: Api) -> None:
    ids = [lab.request(sft(f"acme/p{number}")) for number in range(5)]
    seen, cursor = [], None
    while True:
        page = await api.client.runs(limit=2, cursor=cursor)
        seen += [run.run_id for run in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
        lab.request(sft("acme/late"), id="late")
    assert seen == ids[::-1]
    names, page2 = [], await api.client.policies(limit=4)
    names = [p.policy for p in page2.items]
    page3 = await api.client.policies(limit=4, cursor=page2.next_cursor)
    assert [*names, *(p.policy for p in page3.items)] == ["acme/late", *(f"acme/p{n}" for n in range(5))]
    assert (await _refusal(api.client.runs(cursor="%%%"))).status == 400


async def test_a_cursor_of_no_list_is_refused(api: Api) -> None:
    for cursor in ("!", "eA", base64.urlsafe_b64encode(b"9" * 30).decode()):
        assert (await _refusal(api.client.runs(cursor=cursor))).status == 400


async def test_refusals_have_a_code_and_words(api: Api) -> None:
    missing = await api.http.get("/internal/v1/runs/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    bad = await api.http.post("/internal/v1/commands/take", json={"worker": "w"})
    assert bad.status_code == 400
    assert "command_id" in bad.json()["error"]["message"]
    assert (await _refusal(api.client.policy("acme/none"))).status == 404
    assert (await _refusal(api.client.moves("acme/none"))).status == 404


async def test_dry_run_validates_without_a_run(api: Api) -> None:
    good = await api.client.validate(ValidateRequest(request=grpo()))
    assert good.ok
    bad = await api.client.validate(ValidateRequest(request=grpo(steps=0), tenant="acme"))
    assert not bad.ok
    assert (await api.client.runs()).items == []


async def test_files_come_before_the_row(lab: Lab, api: Api) -> None:
    run_id = lab.request(sft())
    command_id = f"{run_id}:update:1"
    epoch = (await api.client.take(TakeRequest(command_id=command_id, worker="w1"))).epoch
    result = lab.worker.result(lab.body(command_id), lab.bases[TINY])
    assert isinstance(result, UpdateResult)
    request = CommitRequest(command_id=command_id, worker="w1", epoch=epoch, result=result)
    refused = await _refusal(api.client.commit(request))
    assert (refused.status, refused.code) == (409, "files_missing")
    for ref in result.checkpoint.files.values():
        await api.store.put(ref.key, f"{command_id} {ref.key.rsplit('/', 1)[1]}".encode())
    event = (await api.client.commit(request)).event
    assert (event.type, event.id, event.token) == ("mint.v1.policy.updated", command_id, "tiny-llama")


async def test_a_result_may_not_name_another_runs_files(lab: Lab, api: Api) -> None:
    run_id = lab.request(sft())
    epoch = (await api.client.take(TakeRequest(command_id=f"{run_id}:update:1", worker="w1"))).epoch
    await api.store.put("attempts/other/x", b"x")
    ref = FileRef(key="attempts/other/x", sha256="0" * 64, size=1)
    files = {"adapter.safetensors": ref, "state.json": ref}
    result = UpdateResult(checkpoint=CheckpointRef(files=files, step=1), adapter_changed=True, metrics={}, seconds=0)
    request = CommitRequest(command_id=f"{run_id}:update:1", worker="w1", epoch=epoch, result=result)
    assert "neither a file of run" in str(await _refusal(api.client.commit(request)))


async def test_desired_residency_follows_from_the_rows(lab: Lab, api: Api) -> None:
    lab.finish(lab.request(sft()))
    run_id = lab.request(grpo(steps=3))
    await api.driver.refresh_residency()
    wanted = api.desired[-1][1]
    assert [(e.revision, e.priority, e.keep) for e in wanted.entries] == [("acme/adder@1", 0, True)]
    for _ in range(3):
        lab.work(run_id)
    await api.driver.refresh_residency()
    wanted = api.desired[-1][1]
    assert [(e.revision, e.priority, e.keep, e.pinned) for e in wanted.entries] == [
        ("acme/adder@2", 0, True, False), ("acme/adder@1", 3, False, False),
    ]  # fmt: skip
    assert (await api.client.pin("acme/adder", PinPolicy(pinned=True))).pinned
    pinned = api.desired[-1][1].entries[-1]
    assert (pinned.revision, pinned.priority, pinned.keep, pinned.pinned) == ("acme/adder@1", 2, True, True)
    assert not (await api.client.pin("acme/adder", PinPolicy(pinned=False))).pinned
    assert api.desired[-1][1] == wanted
    count = len(api.desired)
    await api.driver.refresh_residency()
    assert len(api.desired) == count, "written only when it changed"


async def test_moves_check_the_version_and_the_target(lab: Lab, api: Api) -> None:
    lab.finish(lab.request(sft()))
    stale = MoveAlias(revision="acme/adder@1", actor="ann", expected_version=0)
    refused = await _refusal(api.client.move_alias("acme/adder", "live", stale))
    assert (refused.status, refused.code) == (409, "alias_moved")
    unknown = MoveAlias(revision="acme/adder@9", actor="ann")
    assert (await _refusal(api.client.move_alias("acme/adder", "live", unknown))).status == 404
    named = MoveAlias(revision="acme/adder", actor="ann")
    assert (await _refusal(api.client.move_alias("acme/adder", "live", named))).status == 400
    with pytest.raises(Refused, match="is not an alias name"):
        await api.client.move_alias("acme/adder", "LIVE", MoveAlias(revision="acme/adder@1", actor="ann"))


async def test_data_is_registered_once_it_is_stored(api: Api) -> None:
    ref = FileRef(key="data/acme/x", sha256="1" * 64, size=2)
    assert (await _refusal(api.client.register_data("acme", ref))).status == 409
    await api.store.put(ref.key, b"ab")
    assert await api.client.register_data("acme", ref) == ref
    assert await api.client.data("acme", ref.sha256) == ref
    assert (await _refusal(api.client.data("other", ref.sha256))).status == 404
