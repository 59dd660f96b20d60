"""What the learner costs and what it teaches, on SmolLM2.

`python -m loadtests.learner [PART …] [--to FOLDER] [--rounds N]` prints a table per part and writes
`learner.json` (and `learning.png`) to FOLDER. Parts: `step` (one policy against plain PEFT), `policies`
(K policies, sliced and batched, against one after the other), `swaps`, `overlap` (K policies through the
whole stack) and `learning` (curves). Every ratio is of two things measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from cli.report.chart import BLOCKS
from loadtests.learning import curves, one_policy, overlap, policies, swaps
from loadtests.learning.stack import stack

PARTS = ("step", "policies", "swaps", "overlap", "learning")
ON_A_STACK = ("overlap", "learning")
Figures = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--to", type=Path, default=Path("build/learner"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of policies")
    chosen = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    chosen.to.mkdir(parents=True, exist_ok=True)
    wanted = chosen.parts or list(PARTS)
    counts = tuple(chosen.counts)
    if "step" in wanted:
        keep(chosen.to, "step", one_policy.measure(chosen.rounds))
    if "policies" in wanted:
        keep(chosen.to, "policies", policies.measure(counts, (4, 16), 2, chosen.rounds))
    if "swaps" in wanted:
        keep(chosen.to, "swaps", swaps.measure(chosen.rounds))
    if set(ON_A_STACK) & set(wanted):
        on_a_stack(chosen.to, wanted, counts)


def on_a_stack(folder: Path, wanted: list[str], counts: tuple[int, ...]) -> None:
    data = folder / "data"
    shutil.rmtree(data, ignore_errors=True)
    with stack(data) as running:
        if "overlap" in wanted:
            keep(folder, "overlap", overlap.measure(running, counts))
        if "learning" in wanted:
            figures: Figures = []
            for row in curves.measure(running, folder):
                figures.append(row)
                keep(folder, "learning", figures)


def keep(folder: Path, part: str, figures: Figures) -> None:
    """Print the part and put it into `learner.json`, beside the parts of earlier calls."""
    path = folder / "learner.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    found[part] = {"threads": torch.get_num_threads(), "figures": figures}
    path.write_text(json.dumps(found, indent=2) + "\n")
    table = Table(title=part, title_justify="left")
    columns = list(dict.fromkeys(name for row in figures for name in row))
    for column in columns:
        table.add_column(column)
    for row in figures:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    Console().print(table)


def _cell(value: object) -> str:
    if isinstance(value, list) and len(value) > 3:
        return "".join(BLOCKS[min(8, int(8 * item / (max(value) or 1)))] for item in value)
    if isinstance(value, list):
        return " → ".join(_cell(item) for item in value)
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
