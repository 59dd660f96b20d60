"""Scores that the evaluator gave: asked for by themselves, those of a run, those of a revision, one by its id.

A score is always computed for a run: that of a training run names its task in its request; one that is asked for here
is a run that does nothing else.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from fastapi import Path
from mint_schemas.names import NAME, ReferenceText, parse_reference
from mint_schemas.training import Evaluation, Gate
from pydantic import ConfigDict, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema
from starlette.responses import Response

from services.gateway.edge import Caller, Here
from services.gateway.mint_v1.owned import (
    RUN_EXAMPLE,
    RevisionFilter,
    RunFilter,
    owned_policy,
    owned_run,
)
from services.gateway.mint_v1.submit import Key
from shared.catalog.api import EvaluationView, RunView, StartEvaluation
from shared.errors import Refused

__all__ = ["Asked", "list_evaluations", "show_evaluation", "start_evaluation"]

EXAMPLE: dict[str, Any] = {"revision": "acme/adder@2", "task": {"kind": "arithmetic"}, "items": 64, "max_tokens": 8}

ReferenceAsked = Annotated[
    ReferenceText,
    WithJsonSchema(
        {"type": "string", "pattern": f"^{NAME}/{NAME}(@[1-9][0-9]{{0,8}})?$", "examples": ["acme/adder@2"]}
    ),
]
EvaluationId = Annotated[
    str,
    Path(
        pattern="^[A-Za-z0-9:._-]{1,200}$",
        description="as the list names it, its run first",
        examples=[f"{RUN_EXAMPLE}:evaluation:last"],
    ),
]


class Asked(Evaluation):
    """Greedy decoding over `items` held-out items of `task`, scored by the task's reward. `revision`: a revision,
    an alias or a policy, whose `live` it then is."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})
    revision: ReferenceAsked
    gate: SkipJsonSchema[Gate] = Gate()


async def start_evaluation(
    body: Asked, gateway: Here, caller: Caller, response: Response, idempotency_key: Key = None
) -> RunView:
    """A run that only scores: beside whatever trains the policy, and at once where that score is known already."""
    reference = parse_reference(body.revision)
    owned_policy(caller, reference.tenant, reference.policy)
    if body.gate != Gate():
        raise Refused("gate: an evaluation by itself promotes nothing, so it has no gate; leave it out")
    evaluation = Evaluation.model_validate(body.model_dump(exclude={"revision"}, exclude_unset=True))
    key = f"{reference.tenant}/{idempotency_key or uuid.uuid4()}"
    run = await gateway.catalog.evaluate(
        StartEvaluation(reference=str(reference), evaluation=evaluation, key=key, actor=caller.actor)
    )
    response.headers["location"] = f"/mint/v1/runs/{run.run_id}"
    return run


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
