"""Keys: every route asks for one, the local key works on loopback only."""

from __future__ import annotations

import openai
import pytest

from services.gateway.config import GatewaySettings
from services.gateway.identity import Keys
from shared.errors import Fatal
from tests.unit.gateway.kit import BASE, TOKENS, Kit

ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/acme/adder"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/anything"),
    ("POST", "/mint/v1/runs"),
    ("GET", "/mint/v1/runs"),
    ("GET", "/mint/v1/runs/x"),
    ("GET", "/mint/v1/runs/x/progress"),
    ("POST", "/mint/v1/data"),
    ("GET", "/mint/v1/status"),
    ("GET", "/mint/v1/revisions/acme/adder/1/archive"),
    ("DELETE", "/mint/v1/anything"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("key", ["", "wrong"])
async def test_no_route_answers_without_a_known_key(kit: Kit, method: str, path: str, key: str) -> None:
    async with kit.http(key) as http:
        answer = await http.request(method, path, content=b"{broken", headers={"content-type": "application/json"})
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert kit.catalog.calls == []


async def test_the_openai_package_sees_its_own_error(kit: Kit) -> None:
    with pytest.raises(openai.AuthenticationError, match="not known"):
        await kit.openai("sk-wrong").models.list()


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("127.0.0.1", {}, 200),
        ("127.8.9.1", {}, 200),
        ("::1", {}, 200),
        ("::ffff:127.0.0.1", {}, 200),
        ("10.0.0.7", {}, 401),
        ("testclient", {}, 401),
        ("127.0.0.1", {"x-forwarded-for": "127.0.0.1"}, 200),
        ("127.0.0.1", {"x-forwarded-for": "203.0.113.5"}, 401),
        ("127.0.0.1", {"x-forwarded-for": "127.0.0.1, 203.0.113.5"}, 401),
        ("127.0.0.1", {"forwarded": "for=203.0.113.5"}, 401),
        ("10.0.0.7", {"x-forwarded-for": "127.0.0.1"}, 401),
    ],
)
async def test_the_local_key_works_from_loopback_only(
    kit: Kit, host: str, headers: dict[str, str], status: int
) -> None:
    async with kit.http(host=host) as http:
        assert (await http.get("/v1/models", headers=headers)).status_code == status


async def test_a_tenants_key_works_from_anywhere_in_either_header(kit: Kit) -> None:
    async with kit.http("key-acme", host="203.0.113.5") as http:
        assert (await http.get("/v1/models")).status_code == 200
    async with kit.http("", host="203.0.113.5") as http:
        assert (await http.get("/v1/models", headers={"x-api-key": "key-acme"})).status_code == 200


async def test_the_local_key_can_be_switched_off() -> None:
    async with Kit(gateway_local_key="").http() as http:
        assert (await http.get("/v1/models")).status_code == 401


async def test_a_request_id_is_kept_or_made(kit: Kit) -> None:
    async with kit.http() as http:
        kept = await http.get("/v1/models", headers={"x-request-id": "mine-1"})
        made = await http.get("/v1/models", headers={"x-request-id": "not allowed\t!"})
        refused = await http.post("/v1/completions", json={"model": BASE})
    assert kept.headers["x-request-id"] == "mine-1"
    assert made.headers["x-request-id"].startswith("req-")
    assert refused.status_code == 400
    assert refused.headers["x-request-id"].startswith("req-")


async def test_an_unknown_route_or_method_is_said_in_the_shape_of_its_api(kit: Kit) -> None:
    async with kit.http() as http:
        openai_shape = (await http.get("/v1/modls")).json()["error"]
        wrong_method = await http.put("/v1/models")
        mint_shape = (await http.get("/mint/v1/policys")).json()["error"]
    assert openai_shape["type"] == "invalid_request_error"
    assert openai_shape["message"] == "there is no route GET /v1/modls"
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "GET")
    assert wrong_method.json()["error"]["message"] == "PUT is not for /v1/models; GET is"
    assert set(mint_shape) == {"code", "message", "near"}


async def test_a_bug_tells_the_caller_its_request_id_and_nothing_else(kit: Kit) -> None:
    kit.sampler.failure = RuntimeError("secret detail")
    with pytest.raises(openai.InternalServerError) as caught:
        await kit.openai().completions.create(model=BASE, prompt="x")
    assert "secret" not in str(caught.value)
    assert caught.value.response.headers["x-request-id"] in str(caught.value)


async def test_a_body_beyond_the_bound_is_413_in_both_shapes() -> None:
    kit = Kit(gateway_max_json_bytes=1000)
    async with kit.http() as http:
        for path in ("/v1/completions", "/mint/v1/runs"):
            answer = await http.post(path, json={"model": BASE, "prompt": "x" * 1000})
            assert answer.status_code == 413
            assert "1000 bytes" in answer.json()["error"]["message"]
        assert (await http.post("/v1/completions", json={"model": BASE, "prompt": "x"})).status_code == 200


@pytest.mark.parametrize(
    ("host", "safe"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("gw.acme", False)]
)
def test_a_secret_that_everybody_knows_signs_for_this_machine_alone(host: str, safe: bool) -> None:
    known = GatewaySettings(host=host)
    if safe:
        assert known.signing_secret == known.s3_secret_key
    else:
        with pytest.raises(Fatal, match="MINT_GATEWAY_SECRET"):
            _ = known.signing_secret
    assert GatewaySettings(host=host, gateway_secret="ours").signing_secret == "ours"
    assert GatewaySettings(host=host, s3_secret_key="the store's").signing_secret == "the store's"


def test_a_key_for_what_is_no_tenant_stops_the_boot() -> None:
    with pytest.raises(Fatal, match="no tenant"):
        Keys({"k": "Acme Inc"}, "", tokens=TOKENS)
