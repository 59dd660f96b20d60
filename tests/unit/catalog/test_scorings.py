"""Scores asked for by themselves: beside the policy's own run, once per key, in words where it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mint_schemas.training import Evaluation

from services.catalog import runs, scorings
from services.catalog.residency import desired
from services.catalog.tables import EvaluationRow
from shared.catalog.api import StartEvaluation
from shared.errors import Refused
from shared.tasks import scorer_name, task_digest
from tests.catalog_kit import TINY, Lab, evaluation, open_commands, sft

TASK = {"task": {"kind": "arithmetic"}, "items": 8, "max_tokens": 4}


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


def asked(reference: str = "acme/adder@1", key: str = "acme/k1", **other: Any) -> StartEvaluation:
    wanted = Evaluation.model_validate({**TASK, **other})
    return StartEvaluation(reference=reference, evaluation=wanted, key=key, actor="acme")


def start(lab: Lab, request: StartEvaluation) -> str:
    found = lab.database.read_now(scorings.subject, request.reference, lab.bases)
    task = request.evaluation.task
    scoring = runs.Scoring(task_digest(task), scorer_name(task.reward))

    def begin(session: Any) -> str:
        return scorings.begin(session, request, found, scoring, lab.bases, lab.clock()).run_id

    run_id = lab.database.write_now(begin)
    lab.advance(run_id)
    return run_id


def published(lab: Lab, **other: Any) -> str:
    run_id = lab.request(sft(**other))
    lab.finish(run_id)
    return run_id


def test_it_ends_with_the_score_and_moves_nothing(lab: Lab) -> None:
    published(lab, promote_to=None)
    lab.worker.score = lambda revision: 0.75 if revision == "acme/adder@1" else 0.0
    run_id = start(lab, asked())
    assert lab.run(run_id).state == "evaluating"
    assert lab.finish(run_id) == ["evaluation:last"]
    run = lab.run(run_id)
    assert (run.state, run.outcome, run.picked) == ("completed", "acme/adder@1 scores 0.75", "acme/adder@1")
    (score,) = lab.rows(EvaluationRow)
    assert (score.revision, score.score, score.items, score.run_id) == ("acme/adder@1", 0.75, 8, run_id)


def test_it_goes_on_beside_a_run_that_trains_the_policy(lab: Lab) -> None:
    published(lab)
    training = lab.request(sft(steps=3))
    run_id = start(lab, asked())
    assert lab.run(training).active_policy == "acme/adder"
    assert lab.run(run_id).active_policy is None
    lab.finish(run_id)
    assert lab.run(run_id).state == "completed"
    assert lab.run(training).state == "running"
    lab.finish(training)
    assert lab.run(training).state == "completed"


def test_what_is_scored_already_is_not_scored_again(lab: Lab) -> None:
    published(lab)
    lab.finish(start(lab, asked()))
    again = start(lab, asked(key="acme/k2"))
    assert (lab.run(again).state, lab.open(again)) == ("completed", None)
    assert len(lab.rows(EvaluationRow)) == 1
    other = start(lab, asked(key="acme/k3", items=9))
    assert lab.open(other) is not None


def test_a_training_run_uses_the_score(lab: Lab) -> None:
    """Its gate compares with the parent's score, which was asked for before."""
    published(lab)
    lab.finish(start(lab, asked(items=16, max_tokens=64)))
    run_id = lab.request(sft(evaluation=evaluation(no_worse_than="parent")))
    assert "evaluation:parent" not in lab.finish(run_id)
    assert lab.run(run_id).state == "completed"


def test_a_key_is_one_request(lab: Lab) -> None:
    published(lab)
    assert start(lab, asked()) == start(lab, asked())
    with pytest.raises(Refused, match="with another body") as refused:
        lab.database.read_now(scorings.find, asked(items=9))
    assert refused.value.status == 409


def test_its_revision_is_wanted_near_until_it_is_scored(lab: Lab) -> None:
    published(lab, promote_to=None)
    lab.unready.add("acme/adder@1")
    run_id = start(lab, asked())

    def wanted() -> list[str]:
        return [entry.revision for entry in lab.database.read_now(desired, TINY, lab.clock()).entries]

    assert (wanted(), lab.open(run_id)) == (["acme/adder@1"], None)
    lab.unready.clear()
    lab.advance(run_id)
    assert (wanted(), len(lab.database.read_now(open_commands, run_id))) == (["acme/adder@1"], 1)
    lab.finish(run_id)
    assert wanted() == []


def test_a_revision_that_never_gets_ready_fails_it(lab: Lab) -> None:
    published(lab)
    lab.unready.add("acme/adder@1")
    run_id = start(lab, asked())
    lab.clock.now += 901
    lab.advance(run_id)
    assert lab.run(run_id).state == "failed"
    assert "ready on 0 of 1" in lab.run(run_id).outcome


@pytest.mark.parametrize(
    ("reference", "words"),
    [("acme/adder@9", "has no revision 9"), ("acme/other", "no policy acme/other"), (TINY, "is a base model")],
)
def test_what_cannot_be_scored_is_said(lab: Lab, reference: str, words: str) -> None:
    published(lab)
    with pytest.raises(Refused, match=words):
        lab.database.read_now(scorings.subject, reference, lab.bases)
