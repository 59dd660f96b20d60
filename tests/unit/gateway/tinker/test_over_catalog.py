"""The gateway over the catalog itself: what the one sends is what the other keeps, in the same words."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from services.gateway.routes import routers
from shared.http import Traced
from tests.catalog_kit import TINY, Lab
from tests.unit.catalog.test_operation_routes import Api
from tests.unit.gateway.kit import Kit
from tests.unit.gateway.tinker.kit import PROTOBUF, TAKES_PROTOBUF, Scene, datum, proto, train


@dataclass
class Real(Scene):
    api: Api | None = None

    def model(self, number: int, **lora: Any) -> dict[str, Any]:
        return super().model(number, **lora) | {"base_model": TINY}

    async def done(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        """The result, after a learner did what waits."""
        answer = await self.post(path, body, headers)
        assert self.api is not None
        await self.api.work(self.model_id)
        return (await self.retrieve(answer)).json()


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[Real]:
    lab = Lab(tmp_path)
    api = Api(lab)
    kit = Kit(gateway_keys={"key-acme": "acme", "key-beta": "beta"}, gateway_hold_s=0.05)
    kit.app = FastAPI()
    kit.app.add_middleware(Traced)
    codec = next(iter(kit.gateway.codecs.values()))
    parts = replace(
        kit.gateway, operations=api.client, store=api.store, bases=lab.bases, codecs=dict.fromkeys(lab.bases, codec)
    )
    for router in routers(parts):
        kit.app.include_router(router)
    async with kit.http("key-acme") as http:
        found = Real(kit, http, api=api)
        await found.begin()
        yield found
    await api.client.close()
    await api.catalog.close()
    lab.close()


async def test_a_model_is_trained_saved_loaded_and_unloaded(real: Real) -> None:
    place = {"model_id": real.model_id}
    request = train(real.model_id, 1, [datum([1, 2, 3])])
    assert (await real.done("forward_backward", request))["metrics"]
    again = await real.post("forward_backward", proto(request).SerializeToString(), PROTOBUF)
    assert (await real.retrieve(again, TAKES_PROTOBUF)).headers["content-type"] == "application/x-protobuf"
    assert (await real.done("optim_step", place | {"seq_id": 2, "adam_params": {}})).keys() == {"metrics"}
    saved = await real.done("save_weights", place | {"seq_id": 3, "path": "one"})
    assert saved == {"type": "save_weights", "path": f"tinker://{real.model_id}/weights/one"}
    loaded = await real.done("load_weights", place | {"seq_id": 4, "path": saved["path"], "optimizer": True})
    assert "error" not in loaded
    begun = await real.post(
        "load_weights",
        {"session_id": real.session_id, "model_seq_id": 1, "path": saved["path"], "optimizer": False},
    )
    found = (await real.retrieve(begun)).json()
    assert (found["type"], found["model_id"]) == ("load_weights", f"{real.session_id}:train:1")
    assert "not trained" in found["note"]
    unloaded = await real.post("unload_model", place)
    assert (await real.post("unload_model", place)).json() == unloaded.json()
    assert (await real.retrieve(unloaded)).json() == {"type": "unload_model", "model_id": real.model_id}
    late = await real.post("optim_step", place | {"seq_id": 5, "adam_params": {}})
    assert late.status_code == 400


async def test_what_is_not_allowed_uses_its_number(real: Real) -> None:
    place = {"model_id": real.model_id}
    refused = [
        ("forward_backward", train(real.model_id, 1, [datum([1], [1, 2])])),
        ("load_weights", place | {"seq_id": 2, "path": f"tinker://{real.model_id}/weights/no", "optimizer": True}),
        ("save_weights", place | {"seq_id": 3, "path": "../x"}),
        ("optim_step", place | {"seq_id": 4, "adam_params": {"beta1": 2.0}}),
    ]
    for path, body in refused:
        failed = await real.result(path, body)
        assert failed["category"] == "user", failed
    assert (await real.done("forward_backward", train(real.model_id, 5, [datum([1])])))["metrics"]
    other = await real.post("forward_backward", train(real.model_id, 1, [datum([9])]))
    assert other.status_code == 409


async def test_a_gap_waits_and_a_foreign_model_is_unknown(real: Real) -> None:
    behind = await real.post("optim_step", {"model_id": real.model_id, "seq_id": 2, "adam_params": {}})
    assert (await real.retrieve(behind)).json()["type"] == "try_again"
    async with real.kit.http("key-beta") as http:
        stranger = Scene(real.kit, http, real.session_id, real.model_id)
        answer = await stranger.post("forward_backward", train(real.model_id, 1, [datum([1])]))
        future = await http.post("/api/v1/retrieve_future", json={"request_id": behind.json()["request_id"]})
    assert (answer.status_code, future.status_code) == (404, 404)
    await real.done("forward_backward", train(real.model_id, 1, [datum([1])]))
    assert (await real.retrieve(behind)).json().keys() == {"metrics"}


async def test_a_sampler_of_the_base_takes_samples(real: Real) -> None:
    body = {"session_id": real.session_id, "sampling_session_seq_id": 0, "base_model": TINY}
    session = (await real.post("create_sampling_session", body)).json()["sampling_session_id"]
    assert (await real.http.get(f"/api/v1/samplers/{session}")).json() == {"sampler_id": session, "base_model": TINY}
    ask = {
        "sampling_session_id": session,
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2, "stop": []},
    }
    first, again = [await real.post("asample", ask) for _ in range(2)]
    assert first.json() == again.json()
    assert (await real.retrieve(first)).json()["type"] == "try_again"
    assert (await real.post("cancel_future", {"request_id": first.json()["request_id"]})).status_code == 204
    assert (await real.retrieve(first)).json()["category"] == "user"


async def test_a_session_that_is_finished_takes_nothing_more(real: Real) -> None:
    end = await real.post(f"sessions/{real.session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    assert end.status_code == 204
    assert (await real.post("session_heartbeat", {"session_id": real.session_id})).status_code == 410
    step = await real.post("optim_step", {"model_id": real.model_id, "seq_id": 1, "adam_params": {}})
    assert step.status_code in (400, 410)
