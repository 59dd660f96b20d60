"""Requests to one stack by HTTP, and what the catalog knows of the runs that they became."""

from __future__ import annotations

import json
import sqlite3
import time
from datetime import datetime
from types import TracebackType
from typing import Any

import httpx

from tests.stacks import StackProcess
from tests.tiny import TINY_NAME

ENDED = ("completed", "failed", "cancelled")
POLL_S = 0.2


class Runs:
    """The runs of one stack. A `key` makes a run's id, and with it all of its seeds, the same on any stack."""

    def __init__(self, stack: StackProcess) -> None:
        self.stack = stack
        self._http = httpx.Client(
            base_url=stack.url, headers={"authorization": "Bearer tml-dev"}, trust_env=False, timeout=60
        )

    def __enter__(self) -> Runs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        return self._http.get(f"/mint/v1/{path}", params=params).raise_for_status().json()

    def put(self, content: bytes, tenant: str = "acme") -> dict[str, Any]:
        """Upload data; its reference."""
        answer = self._http.post("/mint/v1/data", params={"tenant": tenant}, content=content)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def start(self, policy: str, method: dict[str, Any], key: str | None = None, **more: Any) -> str:
        """The id of the new run."""
        headers = {"idempotency-key": key} if key else {}
        body = {"policy": policy, "base": TINY_NAME, "method": method, **more}
        answer = self._http.post("/mint/v1/runs", json=body, headers=headers)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["run_id"])

    def ended(self, run_id: str, timeout: float = 150) -> dict[str, Any]:
        """The run's final view, whatever its end."""
        deadline = time.monotonic() + timeout
        while True:
            answer = self._http.get(f"/mint/v1/runs/{run_id}")
            # accepted requests are on the bus; until the catalog has read them there is no run
            if answer.status_code != 404 and answer.raise_for_status().json()["state"] in ENDED:
                run: dict[str, Any] = answer.json()
                return run
            assert time.monotonic() < deadline, answer.text
            time.sleep(POLL_S)

    def completed(self, run_id: str) -> dict[str, Any]:
        run = self.ended(run_id)
        assert run["state"] == "completed", run["outcome"]
        return run

    def facts(self, run_id: str, kind: str) -> list[dict[str, Any]]:
        """The bodies of the run's facts of one kind, in order, each with its journal's time `at`."""
        journal = self.get(f"runs/{run_id}/journal")
        return [{**it["body"], "at": it["at"]} for it in journal if it["type"] == f"mint.v1.{kind}"]

    def metrics(self, run_id: str) -> list[dict[str, float]]:
        """Of each step, in order."""
        updates = self.facts(run_id, "policy.updated")
        assert [update["step"] for update in updates] == list(range(1, len(updates) + 1))
        return [update["metrics"] for update in updates]

    def revisions(self, policy: str) -> list[dict[str, Any]]:
        """Oldest first."""
        found = self.get(f"policies/{policy}/revisions", limit=100)["items"]
        return sorted(found, key=lambda it: it["number"])

    def commands(self, run_id: str, kind: str) -> list[dict[str, Any]]:
        """The bodies of the run's commands of one kind by step, as workers got them."""
        with sqlite3.connect(f"file:{self.stack.data / 'catalog.db'}?mode=ro", uri=True) as db:
            query = "SELECT body FROM commands WHERE run_id = ? AND kind = ? ORDER BY step"
            rows = db.execute(query, [run_id, kind]).fetchall()
        db.close()
        return [json.loads(body) for (body,) in rows]


def span_of(fact: dict[str, Any]) -> tuple[float, float]:
    """When the work behind a fact of the journal began and ended, seconds since 1970."""
    end = datetime.fromisoformat(fact["at"]).timestamp()
    return end - fact["seconds"], end
