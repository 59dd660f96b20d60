"""The public clients, each in its own environment: a script of `scripts/` run there against a stack.

In: a client, a script, what it needs to know. Out: the JSON document that it printed last. Invariant: the client runs
as it is published, with nothing of this project on its path but the libraries that stand behind its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.learner.convert_smollm2 import TOKENIZER_FILES
from tests.stacks import StackProcess
from tests.tiny import TINY_NAME, tokenizer_directory

__all__ = ["CLIENTS", "Client", "Desk", "client_python", "write_tokenizer"]

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 240


@dataclass(frozen=True)
class Client:
    """`sdk`: what its users import. `prefix`: of its environment variables."""

    name: str
    sdk: str
    prefix: str


CLIENTS = (Client("tinker038", "tinker", "TINKER"), Client("mint022", "mint", "MINT"))


def client_python(client: Client) -> Path:
    """Made by `make tinker-clients`."""
    found = ROOT / ".venv-clients" / client.name / "bin" / "python"
    assert found.exists(), f"{found} is missing; make tinker-clients makes it"
    return found


def write_tokenizer(directory: Path, name: str) -> None:
    """Clients load a tokenizer by the model's name, which may be a directory of where they run."""
    place = directory / name
    place.mkdir(parents=True)
    for file in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_directory() / file, place / file)


@dataclass(frozen=True)
class Desk:
    """One client at one stack. `work`: where its scripts run."""

    client: Client
    stack: StackProcess
    url: str
    work: Path
    base: str = TINY_NAME
    environment: dict[str, str] = field(default_factory=dict)

    def key(self, tenant: str, *arguments: str) -> str:
        """A new key of a tenant."""
        return str(self.stack.mint_json("key", "create", tenant, *arguments)["key"])

    def run(self, script: str, *arguments: str, key: str = "tml-dev", **more: str) -> Any:
        """`more`: further environment of the script."""
        return json.loads(self.python(str(SCRIPTS / f"{script}.py"), *arguments, key=key, **more).splitlines()[-1])

    def python(self, *arguments: str, key: str = "tml-dev", timeout_s: float = TIMEOUT_S, **more: str) -> str:
        """What the client's Python prints; fails the test with what it said last unless it ends well."""
        done = subprocess.run(
            [client_python(self.client), *arguments],
            cwd=self.work,
            env=self._environment(key) | self.environment | more,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        said = f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        assert done.returncode == 0, f"{self.client.name} {' '.join(arguments)}: {said}"
        return done.stdout

    def _environment(self, key: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
        prefix = self.client.prefix
        return kept | {
            f"{prefix}_BASE_URL": self.url,
            f"{prefix}_API_KEY": key,
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.work / "hf"),
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "*",
            "CLIENT_SDK": self.client.sdk,
            "CLIENT_BASE": self.base,
        }
