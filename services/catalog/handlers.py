"""What the catalog does with a message: decode, one call, and the driver is nudged.

`train.requested` becomes a run or a refusal; a fact moves its run on; a dead letter fails the run that
waits for it. Invariant: the body of a fact is never believed, only its run id: what is true is in the
database, where the commit put it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from mint_schemas.cloudevents import run_id_for
from mint_schemas.events import AliasMoved, RevisionReady
from sqlalchemy.orm import Session

from services.catalog import emit, leases, runs, sampler_saves, samples, tracing
from services.catalog.clock import Clock
from services.catalog.database import Database
from services.catalog.drive import Driver
from services.catalog.lineage import find_revision
from services.catalog.model_end import TINKER
from services.catalog.operation_rules import OperationRules
from services.catalog.tables import CommandRow
from services.catalog.validate import Checked, Validator
from shared.bases import Base
from shared.bus.advisories import Advisory
from shared.bus.received import DEAD_SUBJECT, Received, json_object
from shared.errors import Fatal
from shared.telemetry import log, log_fields

TRAIN = "mint.v1.train.requested"
SAMPLE = "mint.v1.sample.requested"
THINNING = ("mint.v1.policy.updated", *(f"mint.v1.run.{state}" for state in runs.ENDED))
"""Facts behind which training checkpoints may be let go of."""

_log = logging.getLogger(__name__)


class Handlers:
    def __init__(
        self, database: Database, driver: Driver, validator: Validator, bases: Mapping[str, Base], clock: Clock
    ) -> None:
        self._database, self._driver, self._validator = database, driver, validator
        self._bases, self._clock = bases, clock

    async def train_requested(self, message: Received) -> None:
        """Raises Fatal, with every reason, for what does not validate; its run.failed is on its way."""
        arrival = _arrival(message)
        with log_fields(run_id=arrival.run_id):
            await self._arrived(arrival, _body(message))

    async def _arrived(self, arrival: runs.Arrival, body: dict[str, Any]) -> None:
        """`body`: as it came; the arrival's is the one to keep."""
        known = await self._database.read(_outcome_of, arrival.run_id)
        if known is None:
            checked = await self._validator.check(body)
            known = await self._database.write(self._receive, arrival, checked)
        await self._driver.advance(arrival.run_id)
        if known:
            raise Fatal(known)

    def _receive(self, session: Session, arrival: runs.Arrival, checked: Checked) -> str:
        """Returns why the request is refused, or nothing."""
        now = self._clock()
        if checked.request is None:
            return runs.refuse(session, arrival, "; ".join(checked.errors), now).outcome
        run = runs.accept(session, arrival, checked.request, checked.scoring, self._bases, now)
        log(_log, logging.INFO, "a run is accepted", policy=run.policy, base=run.base, method=run.method)
        return ""

    async def event(self, message: Received) -> None:
        body, type_ = _body(message), message.envelope.type
        if type_ == "mint.v1.revision.ready":
            run_id = await self._database.write(self._ready, message)
        else:
            run_id = body.get("run_id")
        if isinstance(run_id, str):
            await self._driver.advance(run_id)
        if type_ in THINNING and isinstance(run_id, str):
            await self._driver.thin(run_id)
        if type_ == "mint.v1.alias.moved":
            former = await self._database.read(_former_run, message.decode(AliasMoved))
            if former is not None:
                await self._driver.thin(former)

    def _ready(self, session: Session, message: Received) -> str | None:
        """Journal it with the run that made the revision, while that run is active."""
        body = message.decode(RevisionReady)
        row = find_revision(session, body.revision)
        run = runs.find(session, row.run_id) if row else None
        if run is None or run.state not in runs.ACTIVE:
            return None
        content = body.model_dump(mode="json")
        emit.journal(session, run.run_id, message.envelope.type, message.envelope.id, content, self._clock())
        return run.run_id

    async def dead(self, message: Received) -> None:
        """Fails the run that waits for the command; a run that is over, or a command that was committed,
        superseded or is being worked on now (by another delivery), is left alone. Of a model only the save fails that
        waits for the command."""
        reason = message.dead_reason or "dead-lettered without a reason"
        if _is_request(message):
            await self._dead_request(message, reason)
            return
        if message.envelope.type == SAMPLE:
            request_id = _body(message).get("request_id")
            await self._database.write(samples.dead, str(request_id), reason, self._clock())
            return
        command_id = _body(message).get("command_id")
        run_id = await self._database.write(self._fail, command_id, reason) if isinstance(command_id, str) else None
        if run_id is None:
            _log.warning("dead letter on %s needs no action: %s", message.subject, reason)
            return
        await self._driver.settle()

    def _fail(self, session: Session, command_id: str, reason: str) -> str | None:
        row = session.get(CommandRow, command_id)
        run = runs.find(session, row.run_id) if row else None
        if row is None or run is None or row.state != "open" or run.state not in runs.ACTIVE:
            return None
        if leases.is_held(session, row, self._clock()):
            return None
        if run.method == TINKER:
            rules = OperationRules(self._bases)
            sampler_saves.export_failed(session, run, row, reason, rules, self._clock())
            return run.run_id
        what = "the evaluation" if row.kind == "evaluation" else f"{row.kind} of step {row.step}"
        runs.end(session, run, "failed", f"{what} failed: {reason}", self._bases, self._clock())
        return run.run_id

    async def _dead_request(self, message: Received, reason: str) -> None:
        """A request that never reached `train_requested` is answered here; the others are answered already."""
        if message.envelope.source == "unknown":
            _log.warning("a request without usable headers is on %s: %s", message.subject, reason)
            return
        await self._database.write(runs.refuse, _arrival(message), reason, self._clock())
        await self._driver.settle()

    async def advisory(self, advisory: Advisory) -> None:
        """What is buried comes through `dead`; what the server dropped is found by looking at every run."""
        if not advisory.buried:
            await self._driver.advance_all()


def _is_request(message: Received) -> bool:
    """By the subject too: a product that wrote another ce-type waits for its answer all the same."""
    sent_to = message.headers.get(DEAD_SUBJECT, "").rpartition(".")[0]
    return TRAIN in (message.envelope.type, sent_to)


def _arrival(message: Received) -> runs.Arrival:
    envelope = message.envelope
    return runs.Arrival(
        run_id=run_id_for(envelope.source, envelope.id),
        source=envelope.source,
        id=envelope.id,
        token=message.token,
        traceparent=tracing.for_run(envelope.traceparent),
        body=_storable(_body(message)),
    )


def _body(message: Received) -> dict[str, Any]:
    """Nothing for a body that the bus would not open."""
    try:
        return json_object(message.body)
    except Fatal:
        return {}


def _storable(value: Any) -> Any:
    """NaN and infinities are no JSON; as words they can be kept and shown."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {str(key): _storable(item) for key, item in value.items()}
        case list():
            return [_storable(item) for item in value]
    return value


def _outcome_of(session: Session, run_id: str) -> str | None:
    """None: no such run. Text: why it was refused. Empty: it was accepted."""
    run = runs.find(session, run_id)
    if run is None:
        return None
    return run.outcome if run.state == "failed" and run.policy is None else ""


def _former_run(session: Session, moved: AliasMoved) -> str | None:
    """The run whose revision lost an alias: its training checkpoints may be let go of."""
    row = find_revision(session, moved.previous) if moved.previous else None
    return row.run_id if row else None
