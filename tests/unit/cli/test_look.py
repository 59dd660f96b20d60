"""Looking at runs: charts on the terminal, the picture, the samples of a step; from recorded journals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli import look_commands
from cli.errors import BAD_INPUT, CliError
from cli.gateway import Gateway
from cli.look_commands import rollouts, run_plot, run_show, run_watch
from cli.report.draw import lines
from cli.report.history import history
from cli.report.panels import _moving_mean, plot_runs
from tests.unit.cli.journals import Recorded, recorded


def _connect(monkeypatch: pytest.MonkeyPatch, gateway: Gateway) -> None:
    monkeypatch.setattr(look_commands, "connect", lambda url, data: gateway)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("steps", [1, 12, 400])
def test_no_line_is_wider_than_the_terminal(width: int, steps: int) -> None:
    found = list(lines(history(*recorded("grpo", steps=steps, skipped=(1,))), width))
    assert max(len(line.rstrip()) for line in found) <= width


def test_only_the_series_that_exist_are_drawn() -> None:
    drawn = {method: "\n".join(lines(history(*recorded(method)), 80)) for method in ("sft", "dpo", "grpo")}
    for method, text in drawn.items():
        assert "loss  last" in text, method
        assert "learning rate  last" in text, method
        assert "held-out score  last" in text, method
        assert "time per stage" in text, method
    for title in ("reward  last", "KL to the start", "mismatch mean", "mismatch max", "ratio mean", "tokens per"):
        assert title in drawn["grpo"]
        assert title not in drawn["sft"] + drawn["dpo"]
    assert "margin" in drawn["dpo"]
    assert "margin" not in drawn["grpo"] + drawn["sft"]
    assert "rollout" not in drawn["sft"]


def test_skipped_steps_are_marked_and_counted() -> None:
    text = "\n".join(lines(history(*recorded("grpo", skipped=(5, 6))), 80))
    assert "× 2 skipped" in text
    assert "─××─" in text or "─×─×─" in text
    assert "×" not in "\n".join(lines(history(*recorded("grpo")), 80))


def test_show_prints_charts_and_the_last_facts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, journal = recorded("grpo", steps=40)
    _connect(monkeypatch, Recorded((run, journal)))
    run_show(run["run_id"])
    text = capsys.readouterr().out
    assert "state     completed (step 40 of 40)" in text
    assert "reward  last" in text
    assert "acme/adder:live → acme/adder@40 (promotion)" in text
    assert "earlier facts; --facts shows them" in text
    assert "step 1: reward" not in text
    assert "\x1b" not in text
    run_show(run["run_id"], facts=True)
    assert "step 1: reward" in capsys.readouterr().out


def test_a_run_without_steps_is_shown_without_charts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run, _ = recorded()
    _connect(monkeypatch, Recorded((run | {"state": "queued", "step": 0}, [])))
    run_show(run["run_id"])
    text = capsys.readouterr().out
    assert "queued" in text
    assert "┤" not in text
    with pytest.raises(CliError, match="nothing to plot"):
        run_plot([run["run_id"]], tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("methods", [("grpo",), ("sft",), ("dpo",), ("grpo", "sft", "dpo")])
def test_the_picture_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, methods: tuple[str, ...]) -> None:
    runs = [recorded(method, run_id=f"{place}-run", skipped=(2,)) for place, method in enumerate(methods)]
    _connect(monkeypatch, Recorded(*runs))
    path = tmp_path / "runs.png"
    run_plot([run["run_id"] for run, _ in runs], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(CliError, match="cannot write"):
        run_plot([runs[0][0]["run_id"]], tmp_path / "no" / "x.png")


def test_a_long_runs_picture_has_the_moving_mean(tmp_path: Path) -> None:
    assert _moving_mean([0.0, 3.0, 0.0, 3.0]) == [1.5, 1.0, 2.0, 1.5]
    assert plot_runs([history(*recorded("grpo", steps=200, per_record=4))], tmp_path / "long.png")


def test_a_run_can_be_watched_later(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = recorded()
    _connect(monkeypatch, Recorded((run, [])))
    asked: list[Any] = []

    def follow(gateway: Gateway, run_id: str, steps: int) -> dict[str, Any]:
        asked.append((run_id, steps))
        return run

    monkeypatch.setattr(look_commands, "follow", follow)
    run_watch(run["run_id"])
    assert asked == [(run["run_id"], 12)]
    assert "completed" in capsys.readouterr().out


class Samples(Gateway):
    """250 samples in groups of 50, given out in pages; `asked` lists the queries."""

    def __init__(self) -> None:
        super().__init__("http://gateway")
        self.asked: list[dict[str, Any]] = []

    def get(self, path: str, **query: Any) -> Any:
        assert path == "/mint/v1/runs/r/rollouts/6"
        self.asked.append(query)
        start, limit = int(query["cursor"] or 0), query["limit"]
        items = [self._item(place) for place in range(start, min(250, start + limit))]
        end = start + len(items)
        shared = {"run_id": "r", "step": 6, "record_step": 5, "policy": "acme/adder", "revision": None}
        counts = {"groups": 5, "total": 250, "reward_mean": 0.5, "temperature": 0.6, "max_tokens": 4}
        return {**shared, **counts, "items": items, "next_cursor": str(end) if end < 250 else None}

    @staticmethod
    def _item(place: int) -> dict[str, Any]:
        texts = {"prompt": "What is 1+2?", "answer": "3", "completion": f"it is\n{place}\x1b[31m", "prompt_id": "p"}
        figures = {"reward": 1.0, "advantage": 0.75, "tokens": 4, "finish_reason": "stop", "text_cut": False}
        return {"group": place // 50, "sample": place % 50, **texts, **figures}


def test_samples_are_printed_with_all_that_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = Samples()
    _connect(monkeypatch, gateway)
    rollouts("r", 6, worst=True, limit=3)
    text = capsys.readouterr().out
    assert (
        "step 6 (record of step 5): 250 samples of 5 prompts, mean reward 0.5, by the base at temperature 0.6" in text
    )
    assert text.count("What is 1+2?") == 1
    assert text.count("reward 1.000  advantage +0.750  4 tokens  stop") == 3
    assert "… 247 more; --limit shows them" in text
    assert "\x1b" not in text
    assert gateway.asked == [{"order": "worst", "limit": 3, "cursor": None}]


def test_more_samples_than_a_page_are_fetched_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, shown = Samples(), list[Any]()
    _connect(monkeypatch, gateway)
    monkeypatch.setattr(look_commands, "show", lambda data, json, human: shown.append(data))
    rollouts("r", 6, best=True, limit=230, json=True)
    assert [query["limit"] for query in gateway.asked] == [100, 100, 30]
    assert len(shown[0]["items"]) == 230
    assert shown[0]["next_cursor"] == "230"


def test_worst_and_best_exclude_each_other() -> None:
    with pytest.raises(CliError, match="exclude") as caught:
        rollouts("r", 1, worst=True, best=True)
    assert caught.value.code == BAD_INPUT
