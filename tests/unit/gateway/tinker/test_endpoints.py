"""Every address that the published clients can call has a route of its own here, if only to say that it is refused."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.routing import Match, Route

from tests.unit.gateway.kit import Kit

CLIENTS = Path(__file__).parents[4] / ".venv-clients"
VERBS = ("get", "post", "put", "delete", "patch")
PARTS = {"checkpoint_id": "weights/name"}
"""What stands for more than one segment."""


def _verb(call: ast.Call) -> str | None:
    name = call.func.attr.strip("_") if isinstance(call.func, ast.Attribute) else ""
    return name.upper() if name in VERBS else None


def _text(node: ast.expr) -> str | None:
    """A text as it stands, with something in the place of each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        else:
            assert isinstance(part, ast.FormattedValue)
            parts.append(PARTS.get(ast.unparse(part.value), "x"))
    return "".join(parts)


def _calls(package: Path) -> Iterator[tuple[str, str]]:
    """Method and path of each request that the sources can make."""
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            texts = [text for text in map(_text, node.args[:2]) if text is not None]
            paths = [text for text in texts if text.startswith("/api/v1/")]
            verb = _verb(node) or (texts[0] if texts and texts[0].lower() in VERBS else None)
            if paths and verb is not None:
                yield verb, paths[0]


def _addresses(venv: str) -> set[tuple[str, str]]:
    (libraries,) = (CLIENTS / venv).glob("lib/python*/site-packages")
    return {call for name in ("tinker", "mint") if (libraries / name).exists() for call in _calls(libraries / name)}


@pytest.mark.parametrize(("venv", "least"), [("tinker038", 45), ("mint022", 35)])
def test_every_address_of_a_client_has_a_route(kit: Kit, venv: str, least: int) -> None:
    assert CLIENTS.exists(), "make tinker-clients sets up the published clients"
    addresses = _addresses(venv)
    assert len(addresses) >= least, sorted(addresses)
    routes = [route for route in kit.app.routes if isinstance(route, Route) and "{rest" not in route.path]
    missing = [
        f"{method} {path}"
        for method, path in sorted(addresses)
        if not any(
            route.matches({"type": "http", "method": method, "path": path, "root_path": ""})[0] == Match.FULL
            for route in routes
        )
    ]
    assert missing == []
