"""Keys that begin with `sk-` work with both public clients, which exchange them for tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.tinker_clients.clients import Desk


@pytest.fixture(scope="module")
def tenant(desk: Desk) -> str:
    return f"keys-{desk.client.name}"


@pytest.fixture(scope="module")
def seen(desk: Desk, tenant: str) -> Any:
    """`mint` takes such a key as it is, `tinker` from a command."""
    key = desk.key(tenant, "--kind", "sk")
    if desk.client.sdk == "mint":
        return desk.run("keys", key=key)
    return desk.run("keys", key="", TINKER_CREDENTIAL_CMD=f"echo {key}")


def test_such_a_key_trains_as_its_tenant(seen: Any, tenant: str, desk: Desk) -> None:
    assert seen["rows"] > 0
    assert seen["owner"] == tenant
    if desk.client.sdk == "tinker":
        assert tenant in seen["whoami"]


def test_a_key_that_nobody_made_is_refused(seen: Any) -> None:
    assert seen["unknown"]["status"] == 401
