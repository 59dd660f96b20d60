"""Scores that the evaluator gave: those of a run, those of a revision, one by its id.

A score is always computed for a run, whose request names its task; there is no way to ask for one by itself.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from mint_schemas.names import parse_reference

from services.gateway.edge import Caller, Here
from services.gateway.mint_v1.owned import RUN_EXAMPLE, RevisionFilter, RunFilter, owned_policy, owned_run
from shared.catalog.api import EvaluationView
from shared.errors import Refused

__all__ = ["list_evaluations", "show_evaluation"]

EvaluationId = Annotated[
    str,
    Path(
        pattern="^[A-Za-z0-9:._-]{1,200}$",
        description="as the list names it, its run first",
        examples=[f"{RUN_EXAMPLE}:evaluation:last"],
    ),
]


async def list_evaluations(
    gateway: Here, caller: Caller, run_id: RunFilter = None, revision: RevisionFilter = None
) -> list[EvaluationView]:
    """Scores of a run or of a revision, newest last."""
    if run_id is None and revision is None:
        raise Refused("say whose scores: ?run_id=… or ?revision=tenant/policy@N")
    if run_id is not None:
        await owned_run(gateway, caller, run_id)
    if revision is not None:
        reference = parse_reference(revision)
        owned_policy(caller, reference.tenant, reference.policy)
    found = await gateway.catalog.evaluations(run_id=run_id, revision=revision)
    return [view for view in found if caller.owns_policy(view.policy)]


async def show_evaluation(evaluation_id: EvaluationId, gateway: Here, caller: Caller) -> EvaluationView:
    """Its score, what it was computed of and with, and the file that has each item."""
    missing = Refused(f"there is no evaluation {evaluation_id[:80]!r}", code="not_found", status=404)
    run_id = evaluation_id.partition(":")[0]
    try:
        await owned_run(gateway, caller, run_id)
    except Refused as error:
        raise missing if error.status == 404 else error from error
    for view in await gateway.catalog.evaluations(run_id=run_id):
        if view.evaluation_id == evaluation_id and caller.owns_policy(view.policy):
            return view
    raise missing
