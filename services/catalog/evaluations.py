"""Scores, kept under a key that names everything that they depend on, so that none is computed twice.

The key: the revision (or the base), the base's weights, the task's digest, the scorer, and the sampling parameters
(greedy; completion length and number of items asked for).
"""

from __future__ import annotations

import hashlib

from mint_schemas.training import Evaluation
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog.runs import Scoring
from services.catalog.tables import CommandRow, EvaluationRow, RunRow
from shared.adapters.layout import canonical_json
from shared.catalog.api import EvaluationResult


def score_key(base_sha256: str, revision: str | None, scoring: Scoring, items: int, max_tokens: int) -> str:
    """`revision` None = the base itself."""
    subject = [base_sha256, revision]
    return hashlib.sha256(
        canonical_json(
            [subject, scoring.task_sha256, scoring.scorer, {"greedy": 1, "items": items, "max_tokens": max_tokens}]
        )
    ).hexdigest()


def key_for(base_sha256: str, revision: str | None, scoring: Scoring, evaluation: Evaluation) -> str:
    return score_key(base_sha256, revision, scoring, evaluation.items, evaluation.max_tokens)


def find_score(session: Session, key: str) -> float | None:
    return session.scalars(select(EvaluationRow.score).where(EvaluationRow.score_key == key)).one_or_none()


def record(
    session: Session, run: RunRow, command: CommandRow, result: EvaluationResult, base_sha256: str, now: float
) -> None:
    """Keep a score; where one with the same key exists, that one stays."""
    scoring = Scoring(result.task_sha256, result.scorer)
    key = score_key(base_sha256, result.revision, scoring, command.body["items"], command.body["max_tokens"])
    if find_score(session, key) is not None:
        return
    session.add(
        EvaluationRow(
            score_key=key,
            command_id=command.command_id,
            run_id=run.run_id,
            policy=run.policy,
            base=run.base,
            revision=result.revision,
            adapter_sha256=result.adapter_sha256,
            task_sha256=result.task_sha256,
            scorer=result.scorer,
            sampling=dict(result.sampling),
            items=result.items,
            score=result.score,
            details=result.details.model_dump(mode="json"),
            created_at=now,
        )
    )
    session.flush()
