"""What clients ask first: flags, tokens, base models; sessions; and what is not offered, by name."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from services.gateway.tinker.rest.unsupported import UNSUPPORTED
from tests.unit.gateway.kit import BASE, Kit
from tests.unit.gateway.tinker.kit import Scene


async def test_flags_promise_only_what_is_here(scene: Scene) -> None:
    flags = (await scene.post("client/config", {"sdk_version": "0.38.0"})).json()
    assert flags["use_pyqwest_transport"] is False
    assert flags["proto_compress_fwdbwd"] is True
    assert flags["sample_use_retrieve_futures"] is True
    assert flags["sample_join_sampling_session"] is True
    assert not flags["custom_loss_server_side"]
    dynamic = (await scene.post("client/dynamic_config", {"sdk_version": "0.38.0"})).json()
    assert dynamic["sample_cancel_enabled"] is True


@pytest.mark.parametrize(("key", "exchanged"), [("tml-dev", False), ("key-root", True)])
async def test_only_keys_that_clients_do_not_send_as_they_are_are_exchanged(
    kit: Kit, key: str, exchanged: bool
) -> None:
    async with kit.http(key) as http:
        answer = await http.post("/api/v1/client/config", json={"sdk_version": "0.22.0", "newer": 1})
    assert answer.json()["pjwt_auth_enabled"] is exchanged


async def test_a_token_stands_for_its_key(scene: Scene) -> None:
    jwt = (await scene.post("auth/token", {})).json()["jwt"]
    claims = json.loads(base64.urlsafe_b64decode(jwt.split(".")[1] + "=="))
    assert claims["exp"] > claims["iat"]
    assert (claims["sub"][:4], claims["org_id"]) == ("key:", "acme")
    async with scene.kit.http("") as http:
        ours = {"x-api-key": jwt}
        info = await http.post("/api/v1/get_info", json={"model_id": scene.model_id}, headers=ours)
        newer = await http.post("/api/v1/auth/token", json={}, headers=ours)
        forged = await http.post("/api/v1/get_info", json={}, headers={"x-api-key": jwt[:-6] + "AAAAAA"})
    assert info.json()["model_id"] == scene.model_id
    assert newer.status_code == 200
    assert forged.status_code == 401
    assert 'error="invalid_token"' in forged.headers["www-authenticate"]


async def test_base_models_are_named_with_their_context(scene: Scene) -> None:
    answer = await scene.http.get("/api/v1/get_server_capabilities")
    assert answer.json() == {"supported_models": [{"model_name": BASE, "max_context_length": 512, "sampleable": False}]}
    assert (await scene.http.get("/api/v1/healthz")).json() == {"status": "ok"}


async def test_telemetry_is_taken_whatever_is_in_it(scene: Scene) -> None:
    answer = await scene.post("telemetry", {"events": [{"any": "thing"}], "platform": "x", "session_id": "y"})
    assert answer.json() == {"status": "accepted"}


async def test_a_session_keeps_what_its_client_said(scene: Scene) -> None:
    body: dict[str, Any] = {"tags": ["a"], "user_metadata": {"n": 1, "t": "x"}, "sdk_version": "0.38.0"}
    answer = await scene.post("create_session", body | {"display_name": "mine", "project_id": None})
    view = scene.kit.operations.session_views[answer.json()["session_id"]]
    assert view.tenant == "acme"
    assert view.user_metadata == {"n": "1", "t": "x", "display_name": "mine"}


@pytest.mark.parametrize("value", ["x" * 20_000, ["x" * 10_000, "y" * 10_000], "\ud800"])
async def test_metadata_that_cannot_be_kept_is_refused(scene: Scene, value: Any) -> None:
    """It is shown with each session and model, in lists too."""
    wrong = json.dumps({"tags": [], "user_metadata": {"notes": value}}).encode()
    as_json = {"content-type": "application/json"}
    answer = await scene.post("create_session", wrong, as_json)
    assert answer.status_code == 422
    assert "user_metadata" in answer.json()["error"]
    wrong = json.dumps(scene.model(5) | {"user_metadata": {"notes": value}}).encode()
    assert (await scene.post("create_model", wrong, as_json)).status_code == 422
    assert len(scene.kit.operations.session_views) == len(scene.kit.operations.model_views) == 1


async def test_a_key_of_all_tenants_has_sessions_of_the_local_tenant(kit: Kit) -> None:
    async with kit.http("tml-dev") as http:
        await http.post("/api/v1/create_session", json={"tags": []})
    assert [view.tenant for view in kit.operations.session_views.values()] == ["local"]


async def test_a_finished_session_has_no_heartbeat(scene: Scene) -> None:
    ref = {"session_id": scene.session_id, "type": "session_heartbeat"}
    assert (await scene.post("session_heartbeat", ref)).json() == {"type": "session_heartbeat"}
    end = {"reason": {"type": "success"}, "detail": "done"}
    assert (await scene.post(f"sessions/{scene.session_id}/finish", end)).status_code == 204
    assert (await scene.post("session_heartbeat", ref)).status_code == 410


async def test_another_tenants_session_and_model_do_not_exist(scene: Scene) -> None:
    async with scene.kit.http("key-beta") as http:
        for path, body in (
            ("session_heartbeat", {"session_id": scene.session_id}),
            ("create_model", scene.model(7)),
            ("get_info", {"model_id": scene.model_id}),
            ("unload_model", {"model_id": scene.model_id}),
            ("optim_step", {"model_id": scene.model_id, "seq_id": 1, "adam_params": {}}),
        ):
            answer = await http.post(f"/api/v1/{path}", json=body)
            assert answer.status_code == 404, path
            assert answer.json()["category"] == "user"
    assert scene.kit.operations.submits == []


@pytest.mark.parametrize(("method", "path", "what"), [row[:3] for row in UNSUPPORTED] + [("POST", "/nothing", "route")])
async def test_what_is_not_offered_says_so_by_name(scene: Scene, method: str, path: str, what: str) -> None:
    answer = await scene.http.request(method, f"/api/v1{path}", json={})
    assert answer.status_code in (400, 404)
    assert what in answer.json()["error"]


async def test_a_project_is_refused_by_name(scene: Scene) -> None:
    answer = await scene.post("create_session", {"tags": [], "project_id": "p"})
    assert answer.status_code == 400
    assert "project_id" in answer.json()["detail"]
