"""Recipes of the public cookbook as people run them: `python -m …` in a client's venv, against a gateway.

In: a venv that `make tinker-clients` made, a gateway's URL, a recipe and its settings. Out: the lines of its
`metrics.jsonl`. Nothing is downloaded: the tokenizer lies in the working directory under the base model's name, and
whoever asks beyond this machine finds a closed port.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.stack.bases import SMOLLM2_NAME
from tests.tiny import tokenizer_directory

__all__ = ["CLIENTS", "NEWER", "OLDER", "SCRIPTS", "Client", "mean", "working_directory"]

CLIENTS = Path(__file__).parents[2] / ".venv-clients"
OLDER, NEWER = "mint022", "tinker038"
SCRIPTS = Path(__file__).parent / "client_scripts"
KEY = "tml-dev"
CLOSED = "http://127.0.0.1:9"
TAIL = 6000


def working_directory(home: Path, base: str = SMOLLM2_NAME) -> Path:
    """Where clients run."""
    shutil.copytree(tokenizer_directory(), home / base)
    return home


@dataclass(frozen=True)
class Client:
    """One venv and the gateway that it calls; `home` is a `working_directory`."""

    venv: str
    url: str
    home: Path

    def recipe(self, name: str, log: Path, **settings: Any) -> list[dict[str, Any]]:
        """`tinker_cookbook.recipes.<name>`. Fails the test with what it said last, unless it ends well."""
        chosen = {"model_name": SMOLLM2_NAME, "renderer_name": "qwen3_instruct", "log_path": log, **settings}
        self._run("-m", f"tinker_cookbook.recipes.{name}", *(f"{key}={value}" for key, value in chosen.items()))
        lines = (log / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def script(self, path: Path, *arguments: str) -> str:
        """What it prints."""
        return self._run(str(path), *arguments)

    def example(self, name: str) -> Path:
        """A file that the venv's cookbook ships as an example."""
        (found,) = (CLIENTS / self.venv).glob(f"lib/python*/site-packages/tinker_cookbook/example_data/{name}")
        return found

    def _run(self, *arguments: str) -> str:
        python = CLIENTS / self.venv / "bin" / "python"
        assert python.exists(), f"there is no {python}; make tinker-clients sets it up"
        done = subprocess.run(
            [str(python), *arguments],
            cwd=self.home,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        said = f"{done.stdout[-TAIL:]}\n{done.stderr[-TAIL:]}"
        assert done.returncode == 0, f"{' '.join(arguments)} ended with {done.returncode}:\n{said}"
        return done.stdout

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR")}
        return {
            **kept,
            "HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HTTPS_PROXY": CLOSED,
            "NO_PROXY": "127.0.0.1",
            "TINKER_API_KEY": KEY,
            "TINKER_BASE_URL": self.url,
            "TINKER_TELEMETRY": "0",
        }


def mean(lines: list[dict[str, Any]], name: str) -> float:
    return sum(line[name] for line in lines) / len(lines)
