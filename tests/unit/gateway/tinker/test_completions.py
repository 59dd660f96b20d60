"""retrieve_futures: what of a sampling session is over, by cursor, held until there is something."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.gateway.tinker import completions
from shared.catalog.operations import Failure
from shared.errors import Outage
from tests.unit.gateway.tinker.kit import TAKES_PROTOBUF, Scene
from tests.unit.gateway.tinker.test_sampling import ask, sampler

CLIENT = 10**9


async def ended(scene: Scene, session: str, cursor: int = 0, clone: int = 0, **more: Any) -> dict[str, Any]:
    target = {"type": "sampling_session", "sampling_session_id": session, "cloned_sampler_id": clone}
    answer = await scene.post("retrieve_futures", {"target": target, "prev_cursor": cursor, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def sampled(scene: Scene, session: str, seq_id: int) -> Any:
    return (await scene.post("asample", ask(session, seq_id))).json()["request_id"]


async def test_each_sample_is_named_once_and_its_result_is_there(scene: Scene) -> None:
    session = await sampler(scene)
    first = [await sampled(scene, session, number) for number in range(2)]
    found = await ended(scene, session, timeout=0)
    assert [item["request_id"] for item in found["completions"]] == first
    assert {item["state"] for item in found["completions"]} == {"finished"}
    assert all(item["response_payload_uncompressed_size"] > 0 for item in found["completions"])
    third = await sampled(scene, session, 2)
    behind = await ended(scene, session, found["cursor"], retrieved_request_ids=first, timeout=None)
    assert [item["request_id"] for item in behind["completions"]] == [third]
    nothing = await ended(scene, session, behind["cursor"], timeout=0)
    assert nothing == {"completions": [], "cursor": behind["cursor"]}
    result = await scene.post("retrieve_future", {"request_id": first[0]}, TAKES_PROTOBUF)
    assert result.headers["content-type"] == "application/x-protobuf"


async def test_a_failed_sample_is_named_without_a_size(scene: Scene) -> None:
    scene.kit.operations.answers["sample"] = Failure(message="no", category="user")
    session = await sampler(scene)
    request_id = await sampled(scene, session, 0)
    found = await ended(scene, session)
    assert found["completions"] == [{"state": "failed", "request_id": request_id}]


async def test_each_client_of_a_session_hears_of_its_own(scene: Scene) -> None:
    session = await sampler(scene)
    joined = [await scene.post("join_sampling_session", {"sampling_session_id": session}) for _ in range(2)]
    assert [answer.json() for answer in joined] == [
        {"type": "join_sampling_session", "client_counter": number} for number in (1, 2)
    ]
    mine = await sampled(scene, session, 2 * CLIENT)
    await sampled(scene, session, CLIENT - 1)
    found = await ended(scene, session, clone=2)
    assert [item["request_id"] for item in found["completions"]] == [mine]
    assert (await ended(scene, session, clone=1, timeout=0))["completions"] == []


async def test_it_is_held_until_one_ends_and_no_longer_than_a_future_is(scene: Scene) -> None:
    session = await sampler(scene)
    scene.kit.operations.held = True
    request_id = await sampled(scene, session, 0)
    for timeout, held in ((None, 0.05), (3600.0, 0.05), (0.01, 0.01), (0, 0.0)):
        assert (await ended(scene, session, timeout=timeout))["completions"] == []
        assert scene.kit.operations.asked[-1].wait_s == pytest.approx(held, abs=0.005)
    scene.kit.operations.waits.clear()
    waiting = asyncio.create_task(ended(scene, session))
    await scene.kit.operations.waits.wait()
    scene.kit.operations.held = False
    await scene.kit.operations.work()
    assert [item["request_id"] for item in (await waiting)["completions"]] == [request_id]


async def test_a_catalog_that_is_away_is_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await sampler(scene)
    scene.kit.operations.down = Outage("the catalog does not answer")
    monkeypatch.setattr(completions, "PAUSE_S", 0.02)
    assert await ended(scene, session, cursor=7) == {"completions": [], "cursor": 7}
    assert await ended(scene, session, cursor=7, timeout=0) == {"completions": [], "cursor": 7}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"target": {"type": "training_run", "sampling_session_id": "x"}}, 422),
        ({"target": {"type": "sampling_session", "sampling_session_id": "nothing"}}, 404),
        ({"target": {"type": "sampling_session", "sampling_session_id": "../x"}}, 400),
        ({"prev_cursor": -1}, 422),
        ({"prev_cursor": 2**63}, 422),
        ({"timeout": -1}, 422),
        ({"other": 1}, 422),
    ],
)
async def test_what_cannot_be_answered_is_refused(scene: Scene, change: dict[str, Any], status: int) -> None:
    session = await sampler(scene)
    body = {"target": {"type": "sampling_session", "sampling_session_id": session}, "timeout": 0} | change
    answer = await scene.post("retrieve_futures", body)
    assert answer.status_code == status, answer.text
    assert answer.json()["category"] == "user"


async def test_another_tenants_session_does_not_exist(scene: Scene) -> None:
    session = await sampler(scene)
    async with scene.kit.http("key-beta") as http:
        stranger = Scene(scene.kit, http)
        target = {"type": "sampling_session", "sampling_session_id": session}
        asked = await stranger.post("retrieve_futures", {"target": target, "timeout": 0})
        joined = await stranger.post("join_sampling_session", {"sampling_session_id": session})
    assert (asked.status_code, joined.status_code) == (404, 404)
    assert scene.kit.operations.joined == {}
