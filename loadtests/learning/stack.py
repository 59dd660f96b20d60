"""A stack of its own on SmolLM2, and training runs on it as a product would ask for them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from cli.demo.command import mint
from cli.gateway import Gateway, run_path
from cli.report.collect import collect
from cli.stack import file

TENANT = "bench"
ENDED = ("completed", "failed", "cancelled")


class Stack:
    """`folder` is the data directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = self.url_of("gateway")
        self._gateway = Gateway(self.url)

    def url_of(self, part: str) -> str:
        """The address of a service, or of the object store (`s3`)."""
        return self._file().url(part)

    def process(self, part: str) -> psutil.Process:
        """Raises RuntimeError for a part that does not run."""
        handle = self._file().processes[part].handle()
        if handle is None:
            raise RuntimeError(f"{part} of the stack in {self.folder} is not running; see its logs/{part}.log")
        return handle

    def point(self, revision: str, alias: str = "live") -> None:
        """Move the alias of the revision's own policy to it; returns once it is ready and moved."""
        policy = revision.partition("@")[0]
        self._gateway.post(f"/mint/v1/policies/{policy}/aliases/{alias}", {"revision": revision})

    def _file(self) -> file.Stack:
        found = file.read_stack(self.folder)
        if found is None:
            raise RuntimeError(f"there is no stack in {self.folder}")
        return found

    def upload(self, name: str, data: bytes) -> dict[str, Any]:
        """The reference by which requests name the data."""
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(data)
        reference: dict[str, Any] = self._gateway.upload(Path(name), TENANT)
        return reference

    def start(self, request: dict[str, Any]) -> str:
        return str(self._gateway.post("/mint/v1/runs", request)["run_id"])

    def wait(self, run_ids: Sequence[str]) -> list[dict[str, Any]]:
        """Their final views. Raises RuntimeError, with the run's own words, for one that did not complete."""
        views: dict[str, dict[str, Any]] = {}
        while len(views) < len(run_ids):
            for run_id in run_ids:
                view = self._gateway.get(run_path(run_id))
                if view["state"] in ENDED:
                    views[run_id] = view
            time.sleep(0.2)
        for view in views.values():
            if view["state"] != "completed":
                raise RuntimeError(f"run {view['run_id']} {view['state']}: {view['outcome']}")
        return [views[run_id] for run_id in run_ids]

    def train(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask, wait, and return the run's report: steps, scores, seconds."""
        began = time.monotonic()
        run_id = self.start(request)
        (view,) = self.wait([run_id])
        print(
            f"{view['policy']} {view['method']}: {view['outcome']} ({time.monotonic() - began:.0f} s)", file=sys.stderr
        )
        report = collect(self._gateway, [run_id])
        return {**report["runs"][0], "journal": self._gateway.get(f"{run_path(run_id)}/journal")}


@contextmanager
def stack(folder: Path) -> Iterator[Stack]:
    """`mint up` in `folder`, `mint down` at the end."""
    data = ("--data", str(folder))
    try:
        mint("up", "--detach", "--free-ports", *data)
        yield Stack(folder.resolve())
    finally:
        mint("down", *data)
