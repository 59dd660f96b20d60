"""What the Tinker interface costs: a client's loop against SkyRL's server and plain PEFT, and operations that compute
nothing.

`python -m loadtests.tinker [PART …] [--skyrl PYTHON] [--to FOLDER] [--quick]` prints tables and writes `tinker.json`
to FOLDER, each figure as soon as it is known. Parts: `loop` (forward_backward + optim_step + save for the sampler +
samples on SmolLM2 with rank 8, one client and four at once: steps per second of each side, in turns) and `operations`
(from sending to the result, on a tiny base). PYTHON is of a venv made by `pip install 'skyrl-tx[tinker]' jax flax
optax`; without it, plain PEFT is the only peer. `--quick` only shows that a part works: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from loadtests.interface import loop, overhead
from loadtests.population.rig import Rows, Run, Samples

PARTS = ("loop", "operations")
WIDTH = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--skyrl", type=Path, metavar="PYTHON", help="of a venv with skyrl-tx")
    parser.add_argument("--to", type=Path, default=Path("build/tinker"))
    parser.add_argument("--quick", action="store_true", help="sizes that only show that the code works")
    chosen = parser.parse_args()
    # Without this a stack that is being measured would outlive us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    transformers.utils.logging.disable_progress_bar()
    folder = chosen.to.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, chosen.quick, lambda name, rows, samples: keep(folder, chosen.quick, name, rows, samples))
    wanted = chosen.parts or PARTS
    if "loop" in wanted:
        # not resolved: a venv's python is a link, and the venv is found by where the link lies
        loop.measure(run, chosen.skyrl.absolute() if chosen.skyrl else None)
    if "operations" in wanted:
        overhead.measure(run)


def keep(folder: Path, quick: bool, name: str, rows: Rows, samples: Samples | None) -> None:
    """Print the part and put it into `tinker.json`, beside the parts of earlier calls."""
    path = folder / "tinker.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    found[name] = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "quick": quick,
        "figures": rows,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    table = Table(title=name, title_justify="left")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def _cell(value: object) -> str:
    if isinstance(value, list):
        return " … ".join(_cell(item) for item in value)
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
