"""What people see: tables, JSON, progress of a starting stack, errors in one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table

out = Console(soft_wrap=True, highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)


PIPE_WIDTH = 10_000


def print_json(data: object) -> None:
    """Machine-readable, on standard output, with nothing else on it."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


def write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """The first column names the row and is never broken, so that it can be copied; into a pipe, a row is
    one line."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == columns[0])
    for row in rows:
        table.add_row(*["–" if cell is None else str(cell) for cell in row])
    console = out if out.is_terminal else Console(file=out.file, width=PIPE_WIDTH, highlight=False)
    console.print(table)


def show(data: Any, as_json: bool, human: Callable[[Any], None]) -> None:
    if as_json:
        print_json(data)
    else:
        human(data)


class TerminalReporter:
    """Progress of the stack on standard error: a spinner on a terminal, else a line per change."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._last = ""

    def note(self, text: str) -> None:
        err.print(text, markup=False)

    def waiting(self, parts: dict[str, str]) -> None:
        text = "waiting for " + ", ".join(f"{name} ({reason})" for name, reason in parts.items()) if parts else ""
        if err.is_terminal:
            self._spin(text)
        elif text and text != self._last:
            self.note(text)
        self._last = text

    def _spin(self, text: str) -> None:
        if not text:
            if self._status is not None:
                self._status.stop()
                self._status = None
        elif self._status is None:
            self._status = err.status(text)
            self._status.start()
        else:
            self._status.update(text)
