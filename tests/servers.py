"""Real servers for tests: nats-server and SeaweedFS from their wheels, on free ports, in a directory."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from shared.ports import free_port

BIN = Path(sys.executable).parent


def wait_for_port(port: int, process: subprocess.Popen[bytes], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode} before it listened")
        with socket.socket() as probe:
            probe.settimeout(0.2)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError(f"nothing listens on port {port} after {timeout_s} s")


class NatsServer:
    """`kill` is SIGKILL; `restart` keeps the port and the stored messages."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = free_port()
        self.url = f"nats://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> NatsServer:
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / "nats.log").open("ab") as output:
            self._process = subprocess.Popen(
                [BIN / "nats-server", "-a", "127.0.0.1", "-p", str(self._port), "-js", "-sd", self._directory],
                stdout=output,
                stderr=output,
            )
        wait_for_port(self._port, self._process)
        return self

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        self.kill()
        self.start()

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)
            self._process.wait(10)


class S3Server:
    """SeaweedFS with one identity; ready when the S3 port answers."""

    access_key = "mint"
    secret_key = "mint-local-secret"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> S3Server:
        self._directory.mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "mint",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = self._directory / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        ports = {name: free_port() for name in ("master", "volume", "filer")}
        grpc = {f"{name}.port.grpc": free_port() for name in (*ports, "s3")}
        flags = {
            "dir": self._directory,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            **{f"{name}.port": port for name, port in ports.items()},
            **grpc,
            "s3.port": self._port,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.config": config,
            "s3.iam": "false",
            "master.electionTimeout": "1s",
            "master.raftBootstrap": "true",
            "master.volumeSizeLimitMB": 64,
            "volume.preStopSeconds": 1,
            "volume.max": 0,
        }
        with (self._directory / "weed.log").open("ab") as output:
            self._process = subprocess.Popen(
                [BIN / "weed", "server", "-s3", *(f"-{name}={value}" for name, value in flags.items())],
                stdout=output,
                stderr=output,
                cwd=self._directory,
            )
        self._wait_until_ready()
        return self

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        wait_for_port(self._port, self._process, 60)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/healthz", timeout=1):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError(f"SeaweedFS at {self.url} is not healthy; see {self._directory}/weed.log")

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)
