"""The committed compatibility page is what the public clients find now."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.tinker_matrix.columns import Column, columns
from tests.e2e.tinker_matrix.render import PAGE, rendered
from tests.stacks import StackProcess


@pytest.mark.timeout(600)
def test_the_compatibility_page_is_what_the_clients_find(shared_stack: StackProcess, tmp_path: Path) -> None:
    found = rendered(columns(shared_stack, tmp_path))
    hint = "python -m tests.e2e.tinker_matrix writes docs/tinker-compatibility.md anew"
    assert PAGE.read_text(encoding="utf-8") == found, hint


def test_what_agrees_shares_a_line_and_what_does_not_has_its_own() -> None:
    new = Column("new", {"RestClient.a": None, "RestClient.a_async": None, "RestClient.b": "no"}, {"f(x=1)": "no"})
    old = Column("old", {"RestClient.a": None, "RestClient.a_async": None, "RestClient.b_async": None}, {})
    lines = rendered([new, old]).splitlines()
    assert "| `RestClient.a`, `_async` | works | works |" in lines
    assert "| `RestClient.b` | refused | – |" in lines
    assert "| `RestClient.b_async` | – | works |" in lines
    assert "| `f(x=1)` | refused | – |" in lines
    assert "- `RestClient.b`: no" in lines
