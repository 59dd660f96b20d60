"""POST /mint/v1/evaluations: what reaches the catalog, and what is refused before."""

from __future__ import annotations

from typing import Any

import pytest
from mint_schemas.training import ArithmeticTask

from shared.catalog.api import StartEvaluation
from tests.unit.gateway.kit import Kit

ASKED: dict[str, Any] = {"revision": "acme/adder@2", "task": {"kind": "arithmetic"}, "items": 8, "max_tokens": 4}
URL = "/mint/v1/evaluations"


def started(kit: Kit) -> list[StartEvaluation]:
    return [what for name, what in kit.catalog.calls if name == "evaluate"]


async def test_it_is_a_run_that_can_be_followed(kit: Kit) -> None:
    async with kit.http("key-acme") as http:
        answer = await http.post(URL, json=ASKED, headers={"Idempotency-Key": "k1"})
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/mint/v1/runs/{answer.json()['run_id']}"
    (request,) = started(kit)
    assert (request.reference, request.key) == ("acme/adder@2", "acme/k1")
    assert isinstance(request.evaluation.task, ArithmeticTask)
    assert (request.evaluation.items, request.evaluation.max_tokens) == (8, 4)


async def test_without_a_key_every_request_is_its_own(kit: Kit) -> None:
    async with kit.http("key-acme") as http:
        for _ in range(2):
            assert (await http.post(URL, json=ASKED)).status_code == 202
    first, second = started(kit)
    assert first.key != second.key


@pytest.mark.parametrize(
    ("changed", "status", "words"),
    [
        ({"revision": "beta/secret@1"}, 404, "beta/secret"),
        ({"revision": "acme/adder@"}, 422, "revision"),
        ({"gate": {"at_least": 0.5}}, 400, "promotes nothing"),
        ({"task": {"kind": "alchemy"}}, 422, "task"),
        ({"items": 0}, 422, "items"),
        ({"tasks": 1}, 422, "tasks"),
    ],
)
async def test_what_cannot_be_asked_is_refused_here(kit: Kit, changed: Any, status: int, words: str) -> None:
    async with kit.http("key-acme") as http:
        answer = await http.post(URL, json={**ASKED, **changed})
    assert (answer.status_code, words in answer.text) == (status, True), answer.text
    assert started(kit) == []
