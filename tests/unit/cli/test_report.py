"""A report from the gateway's answers, as data, text and picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.gateway import Gateway
from cli.report.collect import collect
from cli.report.plot import plot_rewards
from cli.report.text import print_report

RUN = {
    "run_id": "r1",
    "policy": "acme/adder",
    "base": "b",
    "method": "grpo",
    "state": "completed",
    "outcome": "promoted",
    "revision": "acme/adder@2",
    "promoted": True,
    "started_at": "2026-01-01T00:00:00Z",
    "ended_at": "2026-01-01T00:00:30Z",
    "traceparent": "00-abc-def-01",
}
JOURNAL = [
    (
        "rollout.completed",
        {"step": 1, "reward_mean": 0.5, "revision": "acme/adder@1", "adapter_sha256": "s1", "seconds": 10.0},
    ),
    ("policy.updated", {"step": 1, "metrics": {"loss": 0.1, "grad_norm": 2.0}, "seconds": 5.0}),
    ("revision.exported", {"seconds": 1.0}),
    (
        "revision.evaluated",
        {
            "revision": "acme/adder@2",
            "base": "b",
            "score": 0.75,
            "items": 256,
            "scorer": "exact_match",
            "task_sha256": "t",
            "sampling": {},
            "seconds": 4.0,
        },
    ),
]
REVISIONS = [
    {
        "policy": "acme/adder",
        "revision": f"acme/adder@{number}",
        "number": number,
        "parent": parent,
        "run_id": run,
        "step": 1,
        "score": 0.75,
        "aliases": ["live"],
        "adapter_sha256": f"s{number}",
        "adapter_bytes": 50,
        "created_at": "",
    }
    for number, parent, run in ((2, "acme/adder@1", "r1"), (1, None, "r0"))
]


class Answers(Gateway):
    def __init__(self) -> None:
        super().__init__("http://gateway")

    def get(self, path: str, **query: Any) -> Any:
        if path.endswith("/journal"):
            return [{"type": f"mint.v1.{kind}", "body": body} for kind, body in JOURNAL]
        if path == "/mint/v1/status":
            return {"bases": [{"name": "b", "bytes": 1000}]}
        if path.endswith("/revisions"):
            return {"items": REVISIONS, "next_cursor": None}
        return RUN


@pytest.fixture
def report() -> dict[str, Any]:
    with Answers() as gateway:
        return collect(gateway, ["r1"])


def test_it_holds_rewards_scores_times_lineage_and_share(report: dict[str, Any]) -> None:
    run = report["runs"][0]
    step = {"step": 1, "reward": 0.5, "sampled_by": "acme/adder@1", "sampler_sha256": "s1"}
    assert run["steps"] == [step | {"loss": 0.1, "grad_norm": 2.0, "skipped": False}]
    assert run["seconds"] == {
        "rollout": 10.0,
        "update": 5.0,
        "export": 1.0,
        "evaluation": 4.0,
        "waiting and loading": 10.0,
    }
    assert run["trace_id"] == "abc"
    assert report["scores"][0]["score"] == 0.75
    assert [it["revision"] for it in report["lineage"]] == ["acme/adder@2"]
    assert report["adapter"] == {"bytes": 50, "base_bytes": 1000, "share": 0.05}


def test_it_is_shown_and_drawn(report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report)
    shown = capsys.readouterr().out
    for text in ("acme/adder@2", "0.750", "5.00%", "rollout"):
        assert text in shown
    assert plot_rewards(report, tmp_path / "rewards.png")
    assert (tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")
    assert not plot_rewards({"runs": []}, tmp_path / "none.png")
