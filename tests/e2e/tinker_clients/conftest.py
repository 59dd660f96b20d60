"""`desk`: each public client in turn, at the stack that the session shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.tinker_clients.clients import CLIENTS, Client, Desk, write_tokenizer
from tests.stacks import StackProcess
from tests.tiny import TINY_NAME


@pytest.fixture(scope="module", params=CLIENTS, ids=[client.name for client in CLIENTS])
def client(request: pytest.FixtureRequest) -> Client:
    found: Client = request.param
    return found


@pytest.fixture(scope="module")
def desk(client: Client, shared_stack: StackProcess, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    work = tmp_path_factory.mktemp(client.name)
    write_tokenizer(work, TINY_NAME)
    return Desk(client, shared_stack, shared_stack.url, work)


@pytest.fixture(scope="session")
def base(bases: Path) -> Path:
    """The directory of the tiny base."""
    return bases.parent / "base"
