"""A run's events: continued over a cut, shown to the end, a failure told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from cli.errors import UNREACHABLE, CliError
from cli.follow import describe, follow, run_events
from cli.gateway import Gateway, ServerEvent


def _event(seq: int, kind: str, body: dict[str, Any]) -> ServerEvent:
    return ServerEvent(f"mint.v1.{kind}", json.dumps({"seq": seq, "type": f"mint.v1.{kind}", "body": body}), str(seq))


END = ServerEvent("end", "{}", "")
UPDATED = {"step": 1, "metrics": {"loss": 0.25}}


class Cut(Gateway):
    """Its first stream breaks after one event; the second goes on behind what it is told."""

    def __init__(self, state: str = "completed") -> None:
        super().__init__("http://gateway")
        self.asked: list[str | None] = []
        self.state = state

    def events(self, path: str, after: str | None = None) -> Iterator[ServerEvent]:
        self.asked.append(after)
        if len(self.asked) == 1:
            yield _event(1, "run.running", {})
            raise CliError("cut", UNREACHABLE)
        yield _event(2, "policy.updated", UPDATED)
        yield END

    def get(self, path: str, **query: Any) -> Any:
        return {"run_id": "r", "state": self.state, "outcome": "the learner says no"}


def test_a_cut_stream_goes_on_behind_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.follow.RECONNECT_S", 0.0)
    with Cut() as gateway:
        assert list(run_events(gateway, "r")) == [("run.running", {}), ("policy.updated", UPDATED)]
        assert gateway.asked == [None, "1"]


def test_following_shows_steps_and_returns_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cli.follow.RECONNECT_S", 0.0)
    with Cut() as gateway:
        assert follow(gateway, "r", 1)["state"] == "completed"
    assert "step 1: loss 0.2500" in capsys.readouterr().err


def test_a_run_that_failed_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.follow.RECONNECT_S", 0.0)
    with Cut("failed") as gateway, pytest.raises(CliError, match="run r failed: the learner says no"):
        follow(gateway, "r", 1)


def test_a_gateway_that_stays_away_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.follow.RECONNECT_S", 0.0)

    class Away(Cut):
        def events(self, path: str, after: str | None = None) -> Iterator[ServerEvent]:
            raise CliError("away", UNREACHABLE)

    with Away() as gateway, pytest.raises(CliError, match="away"):
        list(run_events(gateway, "r"))


def test_facts_in_words() -> None:
    assert (
        describe("rollout.completed", {"step": 2, "reward_mean": 0.5, "trajectories": 96})
        == "step 2: reward 0.500 over 96 samples"
    )
    assert describe("policy.updated", {"step": 2, "skipped": True}) == "step 2: skipped"
    assert describe("run.failed", {"outcome": "rank too high"}) == "rank too high"
    assert describe("revision.exported", {}) is None
