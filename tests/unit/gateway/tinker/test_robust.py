"""Whatever is sent, the answer is a clear 4xx or a failure of the user's, and the next request is served."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pyarrow as pa
import pytest

from services.gateway.edge import LARGE_AT_A_TIME
from services.gateway.tinker.body import LARGE_BYTES
from services.gateway.tinker.routes import MESSAGE_BYTES
from tests.unit.gateway.kit import Kit
from tests.unit.gateway.tinker.kit import PROTOBUF, Scene, datum, proto, sampled, train

ZSTD = {"content-encoding": "zstd"}
MANY = 1_000_000
ROUNDS = 300


def packed(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def bomb(size: int) -> bytes:
    return packed(bytes(size))


BODIES: dict[str, tuple[bytes, dict[str, str], int]] = {
    "no protobuf": (b"\xff\xff\xff\xff", PROTOBUF, 422),
    "a cut protobuf": (proto(train("m", 1, [datum([1, 2])])).SerializeToString()[:-3], PROTOBUF, 422),
    "text that is no UTF-8": (b"\x0a\x02\xff\xfe", PROTOBUF, 422),
    "an empty protobuf": (b"", PROTOBUF, 422),
    "a group without end": (b"\x1b" * 1000, PROTOBUF, 422),
    "a field of 2**60 bytes": (b"\x1a" + b"\xff" * 8 + b"\x0f", PROTOBUF, 422),
    "a million data in protobuf": (b"\x1a\x00" * MANY, PROTOBUF, 413),
    "a million data in JSON": (b'{"forward_backward_input":{"data":[' + b"{}," * MANY + b"{}]}}", {}, 413),
    "no JSON": (b"{broken", {}, 422),
    "an empty body": (b"", {}, 422),
    "deep JSON": (b"[" * 100_000, {}, 422),
    "JSON that is a list": (b"[]", {}, 422),
    "no data": (b'{"forward_backward_input": {}}', {}, 422),
    "an unknown field": (b'{"forward_backward_input": {"data": []}, "learning_rate": 1}', {}, 422),
    "protobuf as JSON": (proto(train("m", 1, [datum([1])])).SerializeToString(), {}, 422),
    "no zstd": (b"\x00" * 100, PROTOBUF | ZSTD, 422),
    "a cut zstd": (packed(b"a" * 100_000)[:-4], PROTOBUF | ZSTD, 422),
    "an unknown compression": (b"", PROTOBUF | {"content-encoding": "br"}, 415),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_body_that_is_no_request_is_refused_in_words(scene: Scene, name: str) -> None:
    body, headers, status = BODIES[name]
    answer = await scene.post("forward_backward", body, {"content-type": "application/json"} | headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["category"] == "user"
    assert answer.json()["error"]
    await scene.next_is_served(1)


@pytest.mark.parametrize("path", ["forward_backward", "asample", "telemetry"])
async def test_a_zstd_bomb_stops_at_the_bound(path: str) -> None:
    kit = Kit(gateway_keys={"key-acme": "acme"}, gateway_max_json_bytes=1 << 20)
    async with kit.http("key-acme") as http:
        scene = Scene(kit, http)
        await scene.begin()
        body = bomb(64 << 20)
        assert len(body) < 1 << 20
        answer = await scene.post(path, body, {"content-type": "application/json"} | ZSTD)
        assert answer.status_code == 413
        assert "1048576" in answer.json()["error"]
        await scene.next_is_served(1)


async def test_a_body_beyond_the_bound_is_refused() -> None:
    kit = Kit(gateway_keys={"key-acme": "acme"}, gateway_max_json_bytes=1 << 12)
    async with kit.http("key-acme") as http:
        scene = Scene(kit, http)
        await scene.begin()
        answer = await scene.post("forward_backward", train(scene.model_id, 1, [datum(list(range(2000)))]))
        assert answer.status_code == 413
        await scene.next_is_served(1)


async def test_what_is_parsed_in_the_event_loop_is_small(scene: Scene) -> None:
    padding = b" " * MESSAGE_BYTES
    as_json = {"content-type": "application/json"}
    ref = json.dumps({"model_id": scene.model_id}).encode()
    assert (await scene.post("get_info", ref, as_json)).status_code == 200
    assert (await scene.post("get_info", ref + padding, as_json)).status_code == 413
    request = json.dumps(train(scene.model_id, 1, [datum([1, 2])])).encode()
    assert (await scene.post("forward_backward", request + padding, as_json)).status_code == 200


async def test_large_bodies_wait_for_their_turn_and_small_ones_do_not(scene: Scene) -> None:
    turns = scene.kit.gateway.large
    for _ in range(LARGE_AT_A_TIME):
        await turns.acquire()
    request = json.dumps(train(scene.model_id, 1, [datum([1, 2])])).encode() + b" " * LARGE_BYTES
    large = asyncio.create_task(scene.post("forward_backward", request, {"content-type": "application/json"}))
    for _ in range(5):
        assert (await scene.post("get_info", {"model_id": scene.model_id})).status_code == 200
    assert scene.kit.operations.submits == []
    turns.release()
    assert (await large).status_code == 200


async def test_numbers_beyond_the_bound_fail_as_the_users() -> None:
    kit = Kit(gateway_keys={"key-acme": "acme"}, gateway_max_numbers=100)
    async with kit.http("key-acme") as http:
        scene = Scene(kit, http)
        await scene.begin()
        failed = await scene.result("forward_backward", train(scene.model_id, 1, [datum(list(range(50)))]))
        assert failed["category"] == "user"
        assert "100 numbers" in failed["error"]
        await scene.next_is_served(2)


@pytest.mark.parametrize(
    "path",
    [
        "client/config",
        "create_session",
        "session_heartbeat",
        "create_model",
        "get_info",
        "unload_model",
        "optim_step",
        "save_weights",
        "save_weights_for_sampler",
        "load_weights",
        "create_sampling_session",
        "asample",
        "retrieve_future",
        "cancel_future",
        "sessions/x/finish",
    ],
)
async def test_every_route_refuses_what_is_no_message(scene: Scene, path: str) -> None:
    for body in (b"", b"{", b"[]", b"null", b'"x"', b'{"model_id": 5}', b"\xff", b"[" * 50_000):
        answer = await scene.post(path, body, {"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404, 422), body[:20]
        assert answer.status_code != 200 or path == "client/config", body[:20]
    await scene.next_is_served(1)


def mutated(body: bytes, chance: random.Random) -> bytes:
    """With a few bytes exchanged, cut out or doubled."""
    found = bytearray(body)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(found) or 1)
        match chance.randrange(4):
            case 0 if found:
                found[at] = chance.randrange(256)
            case 1:
                del found[at : at + chance.randint(1, 9)]
            case 2:
                found[at:at] = found[at : at + chance.randint(1, 30)]
            case _:
                found[at:at] = chance.randbytes(chance.randint(1, 6))
    return bytes(found)


@pytest.mark.parametrize("kind", ["protobuf", "json", "zstd"])
async def test_no_mutation_of_a_good_body_breaks_the_server(scene: Scene, kind: str) -> None:
    request = train(scene.model_id, 1, [datum([1, 2, 3]), sampled([4, 5])], "ppo", clip_low_threshold=0.5)
    body, headers = proto(request).SerializeToString(), PROTOBUF
    if kind == "json":
        body, headers = json.dumps(request).encode(), {"content-type": "application/json"}
    if kind == "zstd":
        body, headers = packed(body), PROTOBUF | ZSTD
    chance = random.Random(kind)
    for _ in range(ROUNDS):
        answer = await scene.post("forward_backward", mutated(body, chance), headers)
        assert answer.status_code < 500, answer.text
        assert "error" in answer.json() or "request_id" in answer.json()
    last: Any = max((seq for seq in scene.kit.operations.order), default=0)
    await scene.next_is_served(last + 1)
