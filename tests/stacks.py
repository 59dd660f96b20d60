"""A whole stack for e2e tests, driven by the `mint` command as a person would drive it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from cli.stack.launch import describe_log
from cli.stack.part import executable
from tests.tiny import TINY_NAME, TINY_TOKEN, make_tiny_base

UP_TIMEOUT_S = 180


class StackProcess:
    """One data directory and its stack. `up` starts what is dead, with `env` for what it starts."""

    def __init__(
        self, data: Path, engine: str, bases: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.data, self._engine, self._bases = data, engine, bases
        self._env = dict(env or {})

    def up(self, env: Mapping[str, str] | None = None, check: bool = True) -> StackProcess:
        bases = ["--bases", str(self._bases)] if self._bases else []
        self.mint(
            "up",
            "--detach",
            "--free-ports",
            "--engine",
            self._engine,
            "--timeout",
            str(UP_TIMEOUT_S),
            *bases,
            env=env,
            timeout=UP_TIMEOUT_S + 60,
            check=check,
        )
        return self

    def down(self) -> None:
        self.mint("down", "--now")

    def mint(
        self, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 120, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run `mint` on this data directory; fails the test with its words unless `check` is off."""
        done = self.run(*arguments, "--data", str(self.data), env=env, timeout=timeout)
        assert not check or done.returncode == 0, f"mint {' '.join(arguments)}: {done.stderr}\n{done.stdout}"
        return done

    def mint_json(self, *arguments: str) -> Any:
        return json.loads(self.mint(*arguments, "--json").stdout)

    def run(
        self, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [executable("mint", "mint-server"), *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **self._env, **(env or {})},
            check=False,
        )

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.mint("status", "--json", check=False).stdout)
        return found

    @property
    def url(self) -> str:
        return str(self.status()["gateway"]["url"])

    @property
    def nats_url(self) -> str:
        return str(self.status()["nats"]["url"])

    def pid(self, part: str) -> int | None:
        pid: int | None = self.status()["services"][part]["pid"]
        return pid

    def kill(self, part: str, number: int = signal.SIGKILL) -> None:
        """Signal a part and wait until it is over."""
        pid = self.pid(part)
        assert pid is not None, f"{part} is not running"
        process = psutil.Process(pid)
        process.send_signal(number)
        _, alive = psutil.wait_procs([process], timeout=60)
        assert not alive, f"{part} survived signal {number}"

    def log(self, part: str) -> str:
        return describe_log(self.data, part)


def tiny_bases(directory: Path) -> Path:
    """A bases file that names one tiny random Llama, sharp enough to learn what to say."""
    base = make_tiny_base(directory / "base", sharpness=20.0)
    path = directory / "bases.json"
    path.write_text(json.dumps({"bases": [{"name": TINY_NAME, "token": TINY_TOKEN, "directory": str(base)}]}))
    return path


def write_prompts(path: Path, words: Sequence[str] = ("cats", "dogs", "rain", "sun"), each: int = 10) -> Path:
    """JSONL prompts whose reward is a matter of the completion's letters alone: see LETTERS."""
    lines = [{"prompt": f"Say something about {word} {i}", "answer": word} for word in words for i in range(each)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


LETTERS = {"kind": "regex", "pattern": "[kxqzjw]"}
"""A reward that a random model gets about half of the time, so that groups have a variance."""


def lines(*objects: object) -> bytes:
    """JSONL."""
    return "".join(json.dumps(it) + "\n" for it in objects).encode()


PLUGIN = """
def letters(config):
    wanted = set(config["letters"])
    return lambda batch: [float(bool(wanted & set(sample.completion))) for sample in batch]


def undefined(config):
    return lambda batch: [float("nan") for _ in batch]
"""


def install_plugin(directory: Path) -> Path:
    """A distribution with two reward plugins, for `PYTHONPATH`: `letters`, and `undefined`, which gives NaN."""
    about = directory / "acme_letters-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-letters\nVersion: 1.0\n")
    entries = "".join(f"{name} = acme_letters_for_tests:{name}\n" for name in ("letters", "undefined"))
    (about / "entry_points.txt").write_text(f"[mint.rewards]\n{entries}")
    (directory / "acme_letters_for_tests.py").write_text(PLUGIN)
    return directory
