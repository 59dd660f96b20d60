"""POST /mint/v1/runs: a TrainRequested by HTTP becomes the same event that products publish.

In: the TrainRequested body (strict), an optional Idempotency-Key and traceparent. Out: the run's id, once
the bus has stored the event. Invariants: what the catalog would refuse is refused here, with every error
in words, and nothing is published; the same key and body twice is one run, the same key with another
body is refused.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated, Any

from fastapi import Header
from mint_schemas.cloudevents import run_id_for
from mint_schemas.training import TrainRequested
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.json_schema import SkipJsonSchema
from starlette.responses import Response

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.errors import Invalid
from services.gateway.identity import Identity
from shared.catalog.api import RunView, ValidateRequest
from shared.errors import MintError, Refused
from shared.telemetry import current_traceparent

__all__ = ["Key", "Submission", "Submitted", "submit_run"]

SOURCE = "mint/gateway"
TYPE = "mint.v1.train.requested"
VISIBLE_POLL_S = 0.05
EXAMPLE: dict[str, Any] = {
    "policy": "acme/adder",
    "base": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "method": {"kind": "grpo", "task": {"kind": "arithmetic"}, "steps": 12},
}


class Submission(TrainRequested):
    """A TrainRequested; with `dry_run` everything is validated and nothing runs."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})
    dry_run: bool = False


class Submitted(BaseModel):
    """`state` is `accepted` until the catalog has read the request. A dry run has no `run_id`."""

    run_id: str | None
    policy: str
    base: str
    state: str
    dry_run: bool = False
    request_source: str | None = Field(None, description="ce-source of the event, as run.completed repeats it")
    request_id: str | None = Field(None, description="ce-id of the event: the Idempotency-Key, or a generated one")
    resolved: dict[str, Any] = Field({}, description="what the catalog filled in: defaults, parent, data sizes")


Key = Annotated[
    Annotated[str, StringConstraints(pattern=r"^[!-~]{1,200}$")] | SkipJsonSchema[None],
    Header(alias="Idempotency-Key", description="the same key and body twice is one run"),
]


async def submit_run(
    body: Submission, gateway: Here, caller: Caller, response: Response, idempotency_key: Key = None
) -> Submitted:
    """Becomes the event that products publish; answers once it is stored, with the run's id to follow it by."""
    request = TrainRequested.model_validate(body.model_dump(exclude={"dry_run"}, exclude_unset=True))
    resolved = await _validated(gateway, caller, request)
    if body.dry_run:
        response.status_code = 200
        return Submitted(
            run_id=None, policy=request.policy, base=request.base, state="valid", dry_run=True, resolved=resolved
        )
    event_id = _event_id(caller, idempotency_key)
    run_id = run_id_for(SOURCE, event_id)
    run = await _known(gateway, run_id) if idempotency_key else None
    if run is None:
        await _publish(gateway, event_id, request)
        run = await _visible(gateway, run_id)
    # Checked after the publish too: of two requests at once with one key, the bus keeps the first.
    if run is not None and not _same_request(run, request):
        raise Refused(
            f"Idempotency-Key {idempotency_key!r} was used for run {run_id} with another body; use a new key",
            code="idempotency_conflict",
            status=409,
        )
    response.headers["location"] = f"/mint/v1/runs/{run_id}"
    return Submitted(
        run_id=run_id,
        policy=request.policy,
        base=request.base,
        state=run.state if run else "accepted",
        request_source=SOURCE,
        request_id=event_id,
        resolved=resolved,
    )


async def _validated(gateway: Gateway, caller: Identity, request: TrainRequested) -> dict[str, Any]:
    """What the catalog resolved. Raises Invalid with all that it found wrong."""
    if not caller.owns_policy(request.policy):
        raise Refused(
            f"policy {request.policy!r}: this key trains policies of tenant {caller.tenant!r} only",
            code="not_found",
            status=404,
        )
    sent = request.model_dump(mode="json", exclude_unset=True)
    answer = await gateway.catalog.validate(ValidateRequest(request=sent, tenant=caller.tenant))
    errors = list(answer.errors)
    if answer.ok and request.base not in gateway.bases:
        errors.append(f"base: {request.base!r} is not configured here; there is {', '.join(sorted(gateway.bases))}")
    if errors or not answer.ok:
        raise Invalid(errors or ["the catalog refused the request without saying why"])
    return answer.resolved


def _event_id(caller: Identity, key: str | None) -> str:
    """Tenants choose their keys freely, so that one tenant's key never names another's run."""
    if key is None:
        return str(uuid.uuid4())
    return key if caller.tenant is None else f"{caller.tenant}/{key}"


async def _publish(gateway: Gateway, event_id: str, request: TrainRequested) -> None:
    await gateway.bus.publish(
        TYPE,
        event_id,
        SOURCE,
        gateway.bases[request.base].token,
        request.model_dump(mode="json", exclude_unset=True),
        subject=request.policy,
        traceparent=current_traceparent(),
    )


async def _visible(gateway: Gateway, run_id: str) -> RunView | None:
    """Whoever is told the run's id should be able to read it; the event is safe in any case."""
    loop = asyncio.get_running_loop()
    until = loop.time() + gateway.settings.gateway_run_visible_s
    while loop.time() < until:
        try:
            run = await _known(gateway, run_id)
        except MintError:
            return None
        if run is not None:
            return run
        await asyncio.sleep(VISIBLE_POLL_S)
    return None


async def _known(gateway: Gateway, run_id: str) -> RunView | None:
    try:
        return await gateway.catalog.run(run_id)
    except Refused as error:
        if error.status == 404:
            return None
        raise


def _same_request(run: RunView, request: TrainRequested) -> bool:
    try:
        return TrainRequested.model_validate(run.request) == request
    except ValidationError:
        return False
