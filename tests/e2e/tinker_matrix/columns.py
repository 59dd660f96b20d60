"""What each public client makes of a running stack: the answers of `probe.py`, run in its environment.

In: a stack on the tiny base. Out: a `Column` for each client. Invariant: a method that nobody knows how to call, an
answer that is not as it should be and a failure that is no user's all end in an error that names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.tinker_clients.clients import Client, Desk, write_tokenizer
from tests.stacks import StackProcess
from tests.tiny import TINY_NAME

__all__ = ["Column", "columns"]

TENANT = "matrix"
CLIENTS = (
    ("tinker 0.38.0", Client("tinker038", "tinker", "TINKER"), "tml"),
    ("tinker 0.22.0", Client("mint022", "tinker", "TINKER"), "tml"),
    ("mint 0.2.0", Client("mint022", "mint", "MINT"), "sk"),
)
"""What is shown, who it is, and which kind of key it has."""


@dataclass(frozen=True)
class Column:
    """Of each method and variant that the client has: the words it is refused with, or None where it works."""

    title: str
    methods: Mapping[str, str | None]
    variants: Mapping[str, str | None]


def columns(stack: StackProcess, work: Path) -> list[Column]:
    """Raises AssertionError, with everything that is not as it should be."""
    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        return list(pool.map(lambda client: _column(stack, work, *client), CLIENTS))


def _column(stack: StackProcess, work: Path, title: str, client: Client, kind: str) -> Column:
    place = work / title.replace(" ", "-")
    write_tokenizer(place, TINY_NAME)
    desk = Desk(client, stack, stack.url, place)
    found = desk.run("probe", key=desk.key(TENANT, "--kind", kind))
    version = title.split()[-1]
    assert found["version"] == version, f"{client.name} has {found['version']}, not {version}; make tinker-clients"
    told = found["methods"] | found["variants"]
    problems = [f"{name}: there is no call of it in calls.py" for name in found["unknown"]]
    problems += [f"{name}: {outcome['wrong']}" for name, outcome in told.items() if "wrong" in outcome]
    assert not problems, f"{title}:\n" + "\n".join(problems)
    return Column(title, _words(found["methods"]), _words(found["variants"]))


def _words(told: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
    return {name: outcome.get("text") for name, outcome in told.items()}
