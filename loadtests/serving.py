"""What serving a population of policies costs, on SmolLM2.

`python -m loadtests.serving [PART …] [--to FOLDER] [--quick]` prints tables and writes `serving.json` (and
`serving.png`, the times to the first token) to FOLDER, each figure as soon as it is known. Parts: `overhead`
(against bare vLLM, and the stack alone on a fake engine), `zipf` (hit rates per tier), `staircase` (cold
loads at once), `burst` (warm tenants under a cold burst), `churn` (new revisions under load), `growth`
(memory over 2,000 adapters) and `sweep` (first touches in a large catalog). Every ratio is of two things
measured in the same run. `--quick` only shows that a part works: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtests.population.picture import draw
from loadtests.population.rig import Rows, Run, Samples, say

PARTS = ("overhead", "zipf", "staircase", "burst", "churn", "growth", "sweep")
IN_STEPS = ("overhead", "burst", "churn")
"""These keep their figures themselves, step by step; the others return them."""
WIDTH = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--to", type=Path, default=Path("build/serving"))
    parser.add_argument("--quick", action="store_true", help="sizes that only show that the code works")
    chosen = parser.parse_args()
    # Without this a stack that is being measured would outlive us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = chosen.to.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = [part for part in chosen.parts or PARTS if not _part(part, folder, chosen.quick)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _part(part: str, folder: Path, quick: bool) -> bool:
    """Whether it ran to its end; a part that fails says why, and the next one is measured all the same."""
    began = time.monotonic()
    book = Book(folder, quick)
    try:
        measure: Callable[..., Any] = import_module(f"loadtests.population.{part}").measure
        if part in IN_STEPS:
            measure(Run(folder, quick, book.keep))
        else:
            book.keep(part, measure(None, folder, quick), None)
    except Exception:
        Console(stderr=True).print_exception(width=WIDTH)
        return False
    finally:
        say(f"{part}: {time.monotonic() - began:.0f} s")
    return True


class Book:
    """`serving.json`: by step, its figures, samples and circumstances, beside those of earlier calls."""

    def __init__(self, folder: Path, quick: bool) -> None:
        self._folder, self._quick = folder, quick

    def keep(self, name: str, figures: Rows, samples: Samples | None) -> None:
        path = self._folder / "serving.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        found[name] = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "cores": os.cpu_count(),
            "quick": self._quick,
            "figures": figures,
        }
        if samples is not None:
            found[name]["samples"] = {
                series: [round(value, 6) for value in values] for series, values in samples.items()
            }
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(found, indent=1) + "\n")
        beside.replace(path)
        _show(name, figures)
        draw({part: kept.get("samples", {}) for part, kept in found.items()}, self._folder / "serving.png")


def _show(name: str, figures: Rows) -> None:
    """A row per measurement; one that has more figures than fit beside each other stands on its side."""
    columns = list(dict.fromkeys(column for row in figures for column in row))
    upright = len(columns) <= 10
    table = Table(title=name, title_justify="left", show_header=upright)
    if upright:
        for column in columns:
            table.add_column(column)
        for row in figures:
            table.add_row(*(_cell(row.get(column)) for column in columns))
    else:
        for column in columns:
            table.add_row(column, *(_cell(row.get(column)) for row in figures))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def _cell(value: object) -> str:
    if isinstance(value, list):
        return " … ".join(_cell(item) for item in value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


if __name__ == "__main__":
    main()
