"""A run's events: continued over a cut, shown to the end, a failure told."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from cli.errors import UNREACHABLE, CliError
from cli.follow import describe, follow, run_events, signals_of
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


def test_the_figures_of_each_method() -> None:
    assert signals_of("rollout.completed", {"step": 1, "reward_mean": 0.5}) == {"reward": "reward 0.500"}
    dpo = {"step": 3, "metrics": {"loss": 0.6, "margin": 0.25, "accuracy": 0.75}}
    assert signals_of("policy.updated", dpo) == {"loss": "loss 0.6000", "margin": "margin 0.250"}
    assert describe("policy.updated", dpo) == "step 3: loss 0.6000, margin 0.250, accuracy 75%"
    scored = {"revision": "acme/adder@4", "score": 0.5, "items": 256}
    assert signals_of("revision.evaluated", scored) == {"score": "score 0.500"}
    assert signals_of("policy.updated", {"step": 4, "skipped": True, "metrics": {}}) == {"skipped": "step 4 skipped"}
    assert signals_of("run.running", {}) == {}


def test_on_a_terminal_the_bar_shows_the_newest_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=160, highlight=False)
    monkeypatch.setattr("cli.follow.err", screen)
    facts = [
        ("run.running", {}),
        ("policy.updated", {"step": 1, "skipped": True, "metrics": {}}),
        ("policy.updated", {"step": 2, "metrics": {"loss": 0.5, "margin": 1.5}}),
        ("revision.evaluated", {"revision": "acme/adder@2", "score": 0.25, "items": 8}),
    ]
    monkeypatch.setattr("cli.follow.run_events", lambda gateway, run_id: iter(facts))
    with Cut() as gateway:
        follow(gateway, "r", 2)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "acme/adder@2 scores 0.250 on 8 held-out items" in shown
    last = shown[shown.rindex("running") :]
    assert "loss 0.5000 · margin 1.500 · score 0.250" in last
    assert "2/2" in last
    assert "skipped" not in last
