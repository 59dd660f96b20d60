"""`mint key`: the key alone on standard output, everything about it on the other."""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx
import pytest

from cli import key_commands
from cli import main as command
from cli.errors import FAILED, CliError
from cli.gateway import Gateway

VIEW = {
    "key_id": "0123456789abcdef",
    "tenant": "acme",
    "label": "nightly",
    "kind": "sk",
    "created_at": "2026-01-02T03:04:05.000Z",
    "created_by": "key:local",
    "revoked_at": None,
    "revoked_by": None,
}
KEY = "sk-" + "x" * 43


class Asked:
    """A gateway that answers each path as told, and remembers what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, status: int, answer: Any) -> None:
        self.requests: list[tuple[str, str, Any]] = []

        def handle(request: httpx.Request) -> httpx.Response:
            body = json.loads(request.content) if request.content else None
            self.requests.append((request.method, request.url.raw_path.decode(), body))
            return httpx.Response(status, json=answer)

        def connect(url: object, data: object) -> Gateway:
            return Gateway("http://gateway", transport=httpx.MockTransport(handle))

        monkeypatch.setattr(key_commands, "connect", connect)


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["mint", "key", *arguments])
    with pytest.raises(SystemExit) as caught:
        command.main()
    assert caught.value.code == 0


def test_a_new_key_can_be_piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Asked(monkeypatch, 201, {**VIEW, "key": KEY})
    _run(monkeypatch, "create", "acme", "--label", "nightly", "--kind", "sk")
    shown = capsys.readouterr()
    assert shown.out == KEY + "\n"
    assert "0123456789abcdef of acme" in shown.err
    assert KEY not in shown.err
    assert asked.requests == [("POST", "/mint/v1/keys", {"tenant": "acme", "label": "nightly", "kind": "sk"})]


def test_the_list_names_keys_by_their_id(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ended = {**VIEW, "key_id": "f" * 16, "label": "", "revoked_at": "2026-02-02T03:04:05.000Z"}
    asked = Asked(monkeypatch, 200, {"items": [VIEW, ended], "next_cursor": None})
    _run(monkeypatch, "list", "--tenant", "acme")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["key", "0123456789abcdef", "f" * 16]
    assert lines[2].split()[-1] == "2026-02-02T03:04:05.000Z"
    _run(monkeypatch, "list", "--json")
    assert json.loads(capsys.readouterr().out) == [VIEW, ended]
    assert [path for _, path, _ in asked.requests] == [
        "/mint/v1/keys?limit=50&tenant=acme",
        "/mint/v1/keys?limit=50",
    ]


def test_revoking_says_whose_key_ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Asked(monkeypatch, 200, {**VIEW, "revoked_at": VIEW["created_at"], "revoked_by": "key:local"})
    _run(monkeypatch, "revoke", "0123456789abcdef")
    assert capsys.readouterr().out == "key 0123456789abcdef of acme revoked\n"
    assert asked.requests == [("DELETE", "/mint/v1/keys/0123456789abcdef", None)]


def test_a_tenants_key_is_told_in_the_gateways_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "keys are managed with a key of all tenants; this one acts for 'acme'"
    Asked(monkeypatch, 403, {"error": {"code": "forbidden", "message": words, "near": []}})
    with pytest.raises(CliError, match="a key of all tenants") as caught:
        key_commands.list_keys()
    assert caught.value.code == FAILED
