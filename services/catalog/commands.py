"""Command rows: the open pieces of work of a run, from issue to commit.

Invariant: a command id is issued once; sending it again is a replay of the same message. A command that
was taken `max_takes` times without a commit is exhausted.
"""

from __future__ import annotations

from mint_schemas.commands import Command
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from services.catalog import emit
from services.catalog.runs import ACTIVE
from services.catalog.tables import CommandRow, RunRow
from shared.errors import Fatal

_COMMAND: TypeAdapter[Command] = TypeAdapter(Command)
MAX_SILENCE_FACTOR = 32


def command_id(run_id: str, kind: str, target: int | str) -> str:
    return f"{run_id}:{kind}:{target}"


def issue(session: Session, run: RunRow, body: Command, step: int, now: float, deadline_s: float) -> None:
    """No-op for a command that is open. Raises Fatal for one that is done: whoever asks again did not find
    its result, and would ask for ever."""
    known = session.get(CommandRow, body.command_id)
    if known is not None and known.state == "open":
        return
    if known is not None:
        raise Fatal(
            f"{body.command_id} is {known.state} already, but its result is not what the run needs now; were the "
            "base model's files changed under it? Ask again with a new request id"
        )
    session.add(
        CommandRow(
            command_id=body.command_id,
            run_id=run.run_id,
            kind=body.kind,
            step=step,
            token=run.token,
            resource=resource_of(body),
            state="open",
            body=body.model_dump(mode="json"),
            takes=0,
            issues=1,
            issued_at=now,
            deadline_at=now + deadline_s,
            failure="",
        )
    )
    session.flush()
    emit.command(session, run, body, now)


def resource_of(body: Command) -> str:
    """What a worker leases to do it: an update writes to the policy, and a policy has one writer."""
    return f"policy:{body.policy}" if body.kind == "update" else f"command:{body.command_id}"


def body_of(row: CommandRow) -> Command:
    return _COMMAND.validate_python(row.body)


def require_readable(session: Session, run_id: str) -> None:
    """Raises ValidationError for an open command whose body could not be sent again."""
    for row in session.scalars(select(CommandRow).where(CommandRow.run_id == run_id, CommandRow.state == "open")):
        body_of(row)


def close_rollouts(session: Session, run_id: str) -> None:
    """Whoever works on one loses it at the next renewal, and can commit nothing."""
    rollouts = update(CommandRow).where(CommandRow.run_id == run_id, CommandRow.kind == "rollout")
    session.execute(rollouts.where(CommandRow.state == "open").values(state="closed"))


def heard_from(row: CommandRow, now: float, deadline_s: float) -> None:
    """A sign of life: the silence is counted from now."""
    row.deadline_at = max(row.deadline_at, now + deadline_s)


def reissue_silent(session: Session, now: float, deadline_s: float) -> list[str]:
    """Send every open command past its deadline again. The patience doubles each time, so that work that
    merely waits its turn does not pile up. Returns their ids."""
    query = (
        select(CommandRow, RunRow)
        .join(RunRow, RunRow.run_id == CommandRow.run_id)
        .where(CommandRow.state == "open", CommandRow.deadline_at < now, RunRow.state.in_(ACTIVE))
    )
    sent = []
    for row, run in session.execute(query).all():
        try:
            body = body_of(row)
        except ValidationError:
            continue  # `advance` fails its run, and says why
        emit.command(session, run, body, now, replay=row.issues)
        row.deadline_at = now + deadline_s * min(2**row.issues, MAX_SILENCE_FACTOR)
        row.issues += 1
        sent.append(row.command_id)
    return sent


def exhausted_reason(row: CommandRow, takes: int) -> str:
    last = f"; the last attempt said: {row.failure}" if row.failure else "; no attempt said why, see the workers' logs"
    return f"{row.kind} of step {row.step} was taken {takes} times without a commit{last}"
