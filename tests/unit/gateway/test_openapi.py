"""The OpenAPI document: every route of the OpenAI surface says what it takes, gives and refuses."""

from __future__ import annotations

import pytest

from tests.unit.gateway.kit import Kit

ROUTES = [
    ("get", "/v1/models"),
    ("get", "/v1/models/{id}"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("get", "/v1/residency"),
    ("post", "/v1/tokenize"),
    ("post", "/v1/detokenize"),
    ("post", "/tokenize"),
    ("post", "/detokenize"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_route_is_typed_and_described(kit: Kit, method: str, path: str) -> None:
    said = kit.app.openapi()["paths"][path][method]
    assert said["summary"]
    assert {"200", "400", "401", "404", "429", "503"} <= said["responses"].keys()
    for status in ("400", "404", "503"):
        assert said["responses"][status]["content"]["application/json"]["schema"]
    assert said["responses"]["200"]["content"]
    assert method == "get" or said["requestBody"]["content"]["application/json"]["schema"]


def test_the_list_is_whole(kit: Kit) -> None:
    paths = kit.app.openapi()["paths"]
    ours = {path: said for path, said in paths.items() if not path.startswith(("/mint/", "/api/"))}
    found = [(method, path) for path, said in ours.items() for method in said]
    assert sorted(found) == sorted(ROUTES)
