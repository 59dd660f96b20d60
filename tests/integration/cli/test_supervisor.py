"""`mint up` and `mint down` on real stores, with small HTTP servers standing in for the seven services."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cli.errors import CliError
from cli.stack import supervisor
from cli.stack.file import HOST, Stack, read_stack
from cli.stack.part import Part, http_probe
from cli.stack.status import status
from cli.stack.watch import Deaths, look

STAND_IN = """
import http.server, os, signal, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))
http.server.HTTPServer(("127.0.0.1", int(os.environ["MINT_PORT"])), Health).serve_forever()
"""


class Recorder:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.waited_for: set[str] = set()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def waiting(self, parts: dict[str, str]) -> None:
        self.waited_for |= set(parts)


def _stand_ins(data: Path, ports: dict[str, int], engine: str) -> list[Part]:
    return [
        Part(
            name=name,
            command=(sys.executable, "-c", STAND_IN),
            probe=http_probe(f"http://{HOST}:{ports[name]}/healthz"),
            env={"MINT_PORT": str(ports[name]), "ENGINE": engine},
        )
        for name in ("catalog", "gateway")
    ]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(supervisor, "service_parts", _stand_ins)
    monkeypatch.setattr(
        "cli.stack.bases.prepare",
        lambda data, given, say: (data / "bases.json").write_text(
            '{"bases": [{"name": "a", "token": "a", "directory": "."}]}'
        ),
    )
    yield tmp_path / "data"
    supervisor.down(tmp_path / "data", Recorder(), now=True)


def _up(data: Path, **options: object) -> tuple[Stack, Recorder]:
    report = Recorder()
    found = supervisor.up(data, supervisor.Options(**{"free_ports": True, "timeout_s": 60.0} | options), report)  # type: ignore[arg-type]
    return found, report


def test_up_starts_all_then_only_what_is_dead_and_down_stops_only_that(data: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        first, report = _up(data)
        assert {"nats", "s3", "catalog", "gateway"} == set(first.processes)
        assert "s3" in report.waited_for
        assert status(data)["healthy"]

        os.kill(first.processes["catalog"].pid, signal.SIGKILL)
        _until_dead(first.processes["catalog"].pid)
        assert status(data)["services"]["catalog"]["state"] == "dead"
        second, _ = _up(data)
        assert second.ports == first.ports
        changed = {name for name in first.processes if first.processes[name].pid != second.processes[name].pid}
        assert changed == {"catalog"}

        assert set(supervisor.down(data, Recorder(), now=True)) == {"nats", "s3", "catalog", "gateway"}
        assert not any(process.alive for process in second.processes.values())
        assert bystander.poll() is None
        assert supervisor.down(data, Recorder(), now=True) == []
    finally:
        bystander.kill()
        bystander.wait()


def test_a_taken_port_is_named_and_another_chosen(data: Path) -> None:
    first, _ = _up(data)
    supervisor.down(data, Recorder(), now=True)
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind((HOST, first.ports["gateway"]))
        squatter.listen()
        second, report = _up(data)
    assert second.ports["gateway"] != first.ports["gateway"]
    assert any(str(first.ports["gateway"]) in note and "taken" in note for note in report.notes)
    assert {k: v for k, v in second.ports.items() if k != "gateway"} == {
        k: v for k, v in first.ports.items() if k != "gateway"
    }


def test_a_pid_that_is_somebody_elses_by_now_is_not_stopped(data: Path) -> None:
    stack, _ = _up(data)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        ours = stack.processes["catalog"]
        stack.processes["catalog"] = ours.model_copy(update={"pid": bystander.pid})
        supervisor.write_stack(data, stack)
        supervisor.down(data, Recorder(), now=True)
        assert bystander.poll() is None
    finally:
        psutil.Process(ours.pid).kill()
        bystander.kill()
        bystander.wait()


def test_other_settings_restart_what_has_them(data: Path) -> None:
    first, _ = _up(data)
    second, report = _up(data, engine="transformers")
    assert first.processes["nats"] == second.processes["nats"]
    assert first.processes["catalog"].pid != second.processes["catalog"].pid
    assert any("catalog runs with other settings" in note for note in report.notes)


def test_a_part_that_ends_while_starting_is_named_with_its_log(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: Path, ports: dict[str, int], engine: str) -> list[Part]:
        command = (sys.executable, "-c", "raise SystemExit('no such model')")
        return [Part("catalog", command, http_probe(f"http://{HOST}:{ports['catalog']}/healthz"))]

    monkeypatch.setattr(supervisor, "service_parts", broken)
    with pytest.raises(CliError, match=r"(?s)catalog ended.*no such model"):
        _up(data)


def test_the_watcher_starts_a_dead_part_again(data: Path) -> None:
    stack, _ = _up(data)
    os.kill(stack.processes["gateway"].pid, signal.SIGKILL)
    _until_dead(stack.processes["gateway"].pid)
    report, deaths = Recorder(), {}
    deadline = time.monotonic() + 20
    while not _alive(data, "gateway") and time.monotonic() < deadline:
        look(data, deaths, report)
        time.sleep(0.1)
    assert _alive(data, "gateway")
    assert "gateway died" in report.notes[0]


def test_the_watcher_gives_up_on_what_dies_too_often() -> None:
    deaths = Deaths()
    pauses = [deaths.record(float(second)) for second in range(5)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, None]
    assert deaths.given_up


def _alive(data: Path, name: str) -> bool:
    stack = read_stack(data)
    return stack is not None and stack.processes[name].alive


def _until_dead(pid: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.NoSuchProcess:
            return
        time.sleep(0.02)
    raise AssertionError(f"pid {pid} lives on")
