"""docs/cases.md: every test that it names exists, runs when it says, and carries the report that it is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cases.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`( †)?")
REPORT = re.compile(r"[\w.-]+#\d+")


@dataclass(frozen=True)
class Row:
    reports: tuple[str, ...]
    tests: tuple[tuple[str, str, bool], ...]
    cells: tuple[str, ...]


@cache
def _rows() -> list[Row]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
        if not line.startswith("|") or set(cells[0]) <= {"-"} or cells[0] in ("report", "part"):
            continue
        tests = tuple((path, name, bool(slow)) for path, name, slow in TEST.findall(line))
        found.append(Row(tuple(REPORT.findall(cells[0])), tests, cells))
    return found


@cache
def _module(path: str) -> tuple[str, ast.Module]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return text, ast.parse(text)


def _function(path: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    for node in _module(path)[1].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    return None


def _source(path: str, name: str) -> str:
    """The test with its decorators, and what its module says of itself."""
    text, module = _module(path)
    node = _function(path, name)
    assert node is not None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    body = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return f"{ast.get_docstring(module)}\n{body}"


def _is_slow(path: str, name: str) -> bool:
    """By a mark of its own or of its module."""
    node = _function(path, name)
    assert node is not None
    marks: list[ast.AST] = list(node.decorator_list)
    marks += [
        statement.value
        for statement in _module(path)[1].body
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["pytestmark"]
    ]
    return any("pytest.mark.slow" in ast.unparse(mark) for mark in marks)


def _named() -> Iterator[tuple[str, str, bool]]:
    yield from sorted({test for row in _rows() for test in row.tests})


def test_every_row_is_whole() -> None:
    assert len(_rows()) > 50
    for row in _rows():
        assert len(row.cells) == 4, row.cells[0]
        assert all(row.cells), row.cells[0]
        assert row.tests, f"{row.cells[0]} names no test"
        left = TEST.sub("", row.cells[2]).replace("<br>", "").strip()
        assert not left, f"{row.cells[0]}: {left!r} is no test"


@pytest.mark.parametrize(("path", "name", "slow"), list(_named()))
def test_a_named_test_exists_and_runs_when_it_says(path: str, name: str, slow: bool) -> None:
    assert (ROOT / path).is_file(), f"{path} is not there"
    assert name.startswith("test_")
    assert _function(path, name) is not None, f"{path} has no {name}"
    assert _is_slow(path, name) == slow


@pytest.mark.parametrize("row", [row for row in _rows() if row.reports], ids=lambda row: row.reports[0])
def test_every_report_is_in_a_docstring_of_its_tests(row: Row) -> None:
    sources = "\n".join(_source(path, name) for path, name, _ in row.tests)
    missing = [report for report in row.reports if report not in sources]
    assert missing == []
