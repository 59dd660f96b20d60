"""The gateway client: pages, streams, and failures in the gateway's own words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from cli.chat import complete, stream
from cli.errors import BAD_INPUT, FAILED, UNREACHABLE, CliError
from cli.gateway import Gateway, gateway_url, policy_path
from cli.stack.file import Stack, write_stack

Answer = Callable[[httpx.Request], httpx.Response]


def _gateway(answer: Answer) -> Gateway:
    return Gateway("http://gateway", transport=httpx.MockTransport(answer))


def _error(status: int, message: str, near: list[str] | None = None) -> Answer:
    return lambda request: httpx.Response(status, json={"error": {"code": "x", "message": message, "near": near or []}})


def test_pages_are_joined_up_to_the_limit() -> None:
    asked: list[dict[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        query = dict(request.url.params)
        asked.append(query)
        start = int(query.get("cursor", "0"))
        items = [{"n": n} for n in range(start, start + int(query["limit"]))]
        return httpx.Response(200, json={"items": items, "next_cursor": str(start + len(items))})

    with _gateway(answer) as gateway:
        assert [it["n"] for it in gateway.pages("/mint/v1/runs", 150, policy=None)] == list(range(150))
    assert asked == [{"limit": "100"}, {"limit": "50", "cursor": "100"}]


@pytest.mark.parametrize(
    ("status", "code"), [(400, BAD_INPUT), (404, BAD_INPUT), (422, BAD_INPUT), (500, FAILED), (503, UNREACHABLE)]
)
def test_a_refusal_keeps_the_gateways_words(status: int, code: int) -> None:
    with _gateway(_error(status, "rank 64 is above 32", ["acme/adder"])) as gateway, pytest.raises(CliError) as caught:
        gateway.get("/mint/v1/runs")
    assert str(caught.value) == "rank 64 is above 32 (did you mean acme/adder?)"
    assert caught.value.code == code


def test_an_answer_that_is_no_json_is_shown() -> None:
    with (
        _gateway(lambda request: httpx.Response(502, text="bad proxy")) as gateway,
        pytest.raises(CliError, match="502: bad proxy"),
    ):
        gateway.get("/mint/v1/runs")


def test_an_absent_gateway_is_named() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with _gateway(refuse) as gateway, pytest.raises(CliError, match="http://gateway does not answer") as caught:
        gateway.post("/mint/v1/runs", {})
    assert caught.value.code == UNREACHABLE


def test_server_sent_events_continue_behind_an_id() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["last-event-id"] == "7"
        return httpx.Response(
            200, text=': waiting\n\nid: 8\nevent: a\ndata: {"x":\ndata: 1}\n\nevent: end\ndata: {}\n\n'
        )

    with _gateway(answer) as gateway:
        events = list(gateway.events("/mint/v1/runs/r/progress", "7"))
    assert [(it.event, it.id, json.loads(it.data)) for it in events] == [("a", "8", {"x": 1}), ("end", "8", {})]


def test_a_chat_names_the_revision_that_answered() -> None:
    body = {"choices": [{"message": {"content": "46"}}]}
    headers = {"mint-revision": "acme/adder@3", "mint-adapter-sha256": "ab"}
    with _gateway(lambda request: httpx.Response(200, json=body, headers=headers)) as gateway:
        found = complete(gateway, {"model": "acme/adder"})
    assert (found["text"], found["revision"], found["adapter_sha256"]) == ("46", "acme/adder@3", "ab")


def test_a_stream_ends_at_done_and_raises_its_error() -> None:
    chunk = json.dumps({"choices": [{"delta": {"content": "4"}}]})
    text = f"data: {chunk}\n\ndata: {chunk}\n\ndata: [DONE]\n\n"
    with _gateway(lambda request: httpx.Response(200, text=text)) as gateway:
        assert "".join(stream(gateway, {})) == "44"
    text = f'data: {chunk}\n\ndata: {{"error": {{"message": "the engine went away"}}}}\n\n'
    with (
        _gateway(lambda request: httpx.Response(200, text=text)) as gateway,
        pytest.raises(CliError, match="went away"),
    ):
        list(stream(gateway, {}))


def test_an_upload_sends_the_file_and_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("{}\n")

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.params["tenant"] == "acme"
        return httpx.Response(201, json={"size": len(request.read())})

    with _gateway(answer) as gateway:
        assert gateway.upload(file, "acme") == {"size": 3}


def test_where_the_gateway_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINT_URL", raising=False)
    write_stack(tmp_path, Stack(ports={"gateway": 8700}))
    assert gateway_url(None, tmp_path) == "http://127.0.0.1:8700"
    monkeypatch.setenv("MINT_URL", "http://far/")
    assert gateway_url(None, tmp_path) == "http://far"
    assert gateway_url("http://given", tmp_path) == "http://given"
    monkeypatch.delenv("MINT_URL")
    with pytest.raises(CliError, match="mint up") as caught:
        gateway_url(None, tmp_path / "nothing")
    assert caught.value.code == UNREACHABLE


def test_names_are_quoted_into_paths() -> None:
    assert policy_path("acme/adder") == "/mint/v1/policies/acme/adder"
    assert policy_path("acme/../x") == "/mint/v1/policies/acme/..%2Fx"
