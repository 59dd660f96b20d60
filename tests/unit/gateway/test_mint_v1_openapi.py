"""The document of /mint/v1: typed, described, with examples that hold, and true about what is not there."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from services.gateway.mint_v1.evaluations import Asked
from services.gateway.mint_v1.keys import KeyRequest
from services.gateway.mint_v1.policies import AliasTarget, RollbackTo
from services.gateway.mint_v1.runs import Cancel
from services.gateway.mint_v1.submit import Submission
from tests.unit.gateway.kit import BASE, Kit

DOCUMENT = Kit().app.openapi()
OPERATIONS = [
    (method, path) for path, said in DOCUMENT["paths"].items() if path.startswith("/mint/v1") for method in said
]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_an_operation_is_typed_and_described(method: str, path: str) -> None:
    said = DOCUMENT["paths"][path][method]
    assert said["summary"]
    assert said["description"]
    assert said["security"] == [{"HTTPBearer": []}, {"APIKeyHeader": []}]
    assert {"400", "401", "404", "409", "422", "503"} <= said["responses"].keys()
    for status, answer in said["responses"].items():
        assert answer["description"], status
        ((media, content),) = answer["content"].items()
        if status >= "400":
            assert content["schema"] == {"$ref": "#/components/schemas/" + _named("ErrorAnswer")}
        elif media == "application/json":
            assert "$ref" in str(content["schema"])
    if method == "post":
        assert "413" in said["responses"]


def _named(model: str) -> str:
    """The mint model's name in the document, where another API has one of the same name."""
    (found,) = (
        name
        for name in DOCUMENT["components"]["schemas"]
        if name == model or name.endswith(f"mint_v1__documented__{model}")
    )
    return str(found)


def test_every_operation_has_a_name_of_its_own() -> None:
    names = [said["operationId"] for path in DOCUMENT["paths"].values() for said in path.values()]
    assert len(set(names)) == len(names)
    mint = {DOCUMENT["paths"][path][method]["operationId"] for method, path in OPERATIONS}
    assert {"submit_run", "list_runs", "create_key", "revoke_key", "roll_back", "put_data"} <= mint


@pytest.mark.parametrize("model", [Submission, Cancel, AliasTarget, RollbackTo, KeyRequest, Asked])
def test_the_examples_of_a_body_hold(model: type[BaseModel]) -> None:
    examples = DOCUMENT["components"]["schemas"][model.__name__]["examples"]
    assert examples
    for example in examples:
        model.model_validate(example)


async def test_the_example_of_a_run_is_accepted(kit: Kit) -> None:
    (example,) = DOCUMENT["components"]["schemas"]["Submission"]["examples"]
    async with kit.http() as http:
        answer = await http.post("/mint/v1/runs", json=example)
    assert example["base"] == BASE
    assert answer.status_code == 202


async def test_the_document_is_published_without_a_key(kit: Kit) -> None:
    async with kit.http("", host="203.0.113.5") as http:
        answer = await http.get("/openapi.json")
    assert answer.status_code == 200
    assert answer.json()["paths"].keys() == DOCUMENT["paths"].keys()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/mint/v1/evaluations", "GET, POST"),
        ("POST", "/mint/v1/policies", "GET"),
        ("DELETE", "/mint/v1/runs/r1", "GET"),
        ("HEAD", "/mint/v1/runs", "GET, POST"),
        ("OPTIONS", "/mint/v1/data", "GET, POST"),
        ("TRACE", "/mint/v1/keys/x", "DELETE"),
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/models/a/b", "GET"),
    ],
)
async def test_a_method_that_is_not_there_is_405_with_those_that_are(
    kit: Kit, method: str, path: str, allowed: str
) -> None:
    async with kit.http() as http:
        answer = await http.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed
    assert method == "HEAD" or answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/mint/v1/nothing", "/mint/v1/runs/a%0Ab/c", "/mint/v1/runs/r1/", "/mint/v1/x%2Fy"])
async def test_a_path_that_is_not_there_is_404_in_the_shape_of_all_errors(kit: Kit, path: str) -> None:
    async with kit.http() as http:
        answer = await http.get(path)
    body: dict[str, Any] = answer.json()
    assert answer.status_code == 404
    assert set(body["error"]) == {"code", "message", "near"}
