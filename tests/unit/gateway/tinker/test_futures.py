"""retrieve_future: holds, encodings, failures that end, parts that are away, clients that have gone."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from mint_schemas.common import FileRef

from services.gateway.tinker.futures import METADATA_BYTES
from shared.catalog.operations import Content, Failure
from shared.errors import Fatal, Outage
from shared.operations.payload import AdamPayload, TrainResult, encode
from shared.store.port import StoreUnavailable
from tests.unit.gateway.kit import Client, Kit
from tests.unit.gateway.tinker.kit import TAKES_PROTOBUF, Scene, datum, train


async def posted(scene: Scene, seq_id: int = 1) -> Any:
    return await scene.post("forward_backward", train(scene.model_id, seq_id, [datum([1, 2])]))


async def test_a_result_is_readable_again(scene: Scene) -> None:
    answer = await posted(scene)
    assert (await scene.retrieve(answer)).json() == (await scene.retrieve(answer)).json()


@pytest.mark.parametrize(
    ("accept", "protobuf"),
    [
        ("application/json", False),
        ("*/*", False),
        ("application/x-protobuf", True),
        ("application/x-protobuf, application/json", True),
        ("application/json, application/x-protobuf;q=0", False),
        ("APPLICATION/X-PROTOBUF", True),
    ],
)
async def test_the_client_chooses_the_encoding(scene: Scene, accept: str, protobuf: bool) -> None:
    result = await scene.retrieve(await posted(scene), {"accept": accept})
    assert (result.headers["content-type"] == "application/x-protobuf") is protobuf


async def test_what_has_no_protobuf_is_json_for_everyone(scene: Scene) -> None:
    await posted(scene)
    step = await scene.post("optim_step", {"model_id": scene.model_id, "seq_id": 2, "adam_params": {}})
    assert (await scene.retrieve(step, TAKES_PROTOBUF)).json() == {"metrics": {"grad_norm:mean": 1.0}}


@pytest.mark.parametrize("category", ["user", "server", "unknown"])
async def test_a_failure_is_an_answer(scene: Scene, category: Any) -> None:
    scene.kit.operations.answers["forward_backward"] = Failure(message="the loss is not finite", category=category)
    result = await scene.retrieve(await posted(scene), TAKES_PROTOBUF)
    assert result.status_code == 200
    assert result.json() == {"error": "the loss is not finite", "category": category}


async def test_an_expired_result_is_gone(scene: Scene) -> None:
    answer = await posted(scene)
    views = scene.kit.operations.views
    request_id = answer.json()["request_id"]
    views[request_id] = views[request_id].model_copy(update={"expired": True, "result": None})
    assert (await scene.retrieve(answer)).status_code == 410


async def test_an_unknown_or_foreign_future_is_404(scene: Scene) -> None:
    answer = await posted(scene)
    assert (await scene.post("retrieve_future", {"request_id": "nothing"})).status_code == 404
    async with scene.kit.http("key-beta") as http:
        foreign = await http.post("/api/v1/retrieve_future", json={"request_id": answer.json()["request_id"]})
    assert foreign.status_code == 404


@pytest.mark.parametrize("state", ["active", "paused_capacity", "paused_rate_limit"])
async def test_what_is_not_done_says_why(scene: Scene, state: Any) -> None:
    scene.kit.operations.held = True
    answer = await posted(scene)
    request_id = answer.json()["request_id"]
    views = scene.kit.operations.views
    views[request_id] = views[request_id].model_copy(update={"queue": state})
    result = await scene.retrieve(answer)
    assert result.json() == {"type": "try_again", "request_id": request_id, "queue_state": state}


async def test_a_held_future_answers_when_it_is_done() -> None:
    kit = Kit(gateway_keys={"key-acme": "acme"}, gateway_hold_s=40)
    async with kit.http("key-acme") as http:
        scene = Scene(kit, http)
        await scene.begin()
        kit.operations.held = True
        waits = asyncio.create_task(scene.retrieve(await posted(scene)))
        await kit.operations.waits.wait()
        kit.operations.held = False
        await kit.operations.work()
        assert (await waits).json()["metrics"] == {"loss:sum": 1.0}


async def test_nothing_is_held_for_a_client_that_has_gone() -> None:
    kit = Kit(gateway_hold_s=40)
    async with kit.http() as http:
        scene = Scene(kit, http)
        await scene.begin()
        kit.operations.held = True
        answer = await posted(scene)
    body = json.dumps({"request_id": answer.json()["request_id"]}).encode()
    client = Client(kit.app, "/api/v1/retrieve_future", body)
    running = asyncio.create_task(client.run())
    await kit.operations.waits.wait()
    assert kit.operations.waiting == 1
    client.gone.set()
    await running
    assert kit.operations.waiting == 0


async def test_a_catalog_that_is_away_makes_clients_wait(scene: Scene) -> None:
    answer = await posted(scene)
    scene.kit.operations.down = Outage("the catalog does not answer")
    result = await scene.retrieve(answer)
    assert result.json()["type"] == "try_again"
    assert result.json()["queue_state"] == "paused_capacity"
    scene.kit.operations.down = None
    assert (await scene.retrieve(answer)).json()["metrics"]


@pytest.mark.parametrize("error", [Fatal("the catalog answered with what this build does not know"), KeyError("slip")])
async def test_what_nobody_foresaw_is_a_failure_and_no_5xx(scene: Scene, error: Exception) -> None:
    """Clients repeat a 5xx at once and for ever."""
    answer = await posted(scene)
    scene.kit.operations.down = error
    found = await scene.retrieve(answer)
    assert (found.status_code, found.json()["category"]) == (200, "server")
    assert answer.json()["request_id"] in found.json()["error"]


async def test_a_store_that_is_away_makes_clients_wait(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.tinker.futures.PAUSE_S", 0.0)
    data = encode(TrainResult((np.zeros(1, np.float32),), {}))
    scene.kit.operations.answers["forward_backward"] = Content(file=await scene.kit.store.put("k", data))
    answer = await posted(scene)

    async def away(ref: FileRef) -> bytes:
        raise StoreUnavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(scene.kit.store, "get", away)
        assert (await scene.retrieve(answer)).json()["type"] == "try_again"
    assert (await scene.retrieve(answer)).json()["loss_fn_outputs"]


BROKEN = {
    "lost": Content(file=FileRef(key="blobs/sha256/none", sha256="0" * 64, size=3)),
    "other bytes": Content(file=FileRef(key="k", sha256="0" * 64, size=3)),
    "no result at all": Content(inline=base64.b64encode(b"nonsense")),
    "a payload": Content(inline=base64.b64encode(encode(AdamPayload()))),
    "nowhere": Content(),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("headers", [{}, TAKES_PROTOBUF])
async def test_a_result_that_cannot_be_read_fails_for_good(scene: Scene, name: str, headers: dict[str, str]) -> None:
    await scene.kit.store.put("k", b"abc")
    scene.kit.operations.answers["forward_backward"] = BROKEN[name]
    result = await scene.retrieve(await posted(scene), headers)
    assert result.status_code == 200
    assert result.json()["category"] == "server"


async def test_a_large_result_is_announced_first_to_who_asks_for_that(scene: Scene) -> None:
    logprobs = np.arange(METADATA_BYTES // 4, dtype=np.float32)
    data = encode(TrainResult((logprobs,), {"loss:sum": 1.0}))
    scene.kit.operations.answers["forward_backward"] = Content(file=await scene.kit.store.put("big", data))
    answer = await posted(scene)
    announced = await scene.retrieve(answer, TAKES_PROTOBUF, allow_metadata_only=True)
    assert announced.json() == {"status": "complete_metadata", "response_payload_size": len(data)}
    whole = await scene.retrieve(answer, TAKES_PROTOBUF, allow_metadata_only=False)
    assert len(whole.content) > METADATA_BYTES


async def test_a_long_result_is_compressed_for_who_takes_that(scene: Scene) -> None:
    logprobs = np.full(20_000, -0.5, np.float32)
    scene.kit.operations.answers["forward_backward"] = TrainResult((logprobs,), {"loss:sum": 1.0})
    answer = await posted(scene)
    body = {"request_id": answer.json()["request_id"]}
    headers = {"accept-encoding": "gzip, zstd", "accept": "application/x-protobuf"}
    async with scene.http.stream("POST", "/api/v1/retrieve_future", json=body, headers=headers) as response:
        assert response.headers["content-encoding"] == "zstd"
        raw = b"".join([part async for part in response.aiter_raw()])
    plain = await scene.retrieve(answer, {"accept": "application/x-protobuf", "accept-encoding": "gzip"})
    assert pa.CompressedInputStream(pa.BufferReader(raw), "zstd").read() == plain.content
    assert len(raw) < len(plain.content) / 10


async def test_a_logprob_that_is_no_number_is_null_in_json(scene: Scene) -> None:
    scene.kit.operations.answers["forward_backward"] = Content(
        inline=base64.b64encode(encode(TrainResult((np.array([np.nan], np.float32),), {})))
    )
    result = await scene.retrieve(await posted(scene))
    assert result.json()["loss_fn_outputs"][0]["logprobs"]["data"] == [None]
