"""The bodies of commands: everything that a worker needs for one step, and nothing that it must decide.

Invariant: the same run and step give the same body, seeds included. The seed of a run's rollouts and
updates is one for all its steps, since workers mix the step in and walk the data epoch by epoch.
"""

from __future__ import annotations

from typing import Any

from mint_schemas.commands import (
    CheckpointRef,
    EvaluationRequested,
    ExportRequested,
    RolloutRequested,
    UpdateRequested,
)
from mint_schemas.common import FileRef
from mint_schemas.training import Dpo, Evaluation, Grpo, Lora, Method, TrainRequested
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import commands, plan
from services.catalog.goal import goal_of, use_of
from services.catalog.lineage import find_revision
from services.catalog.retention import lasting
from services.catalog.tables import CheckpointRow, CommandRow, RevisionRow, RunRow
from shared.errors import Fatal
from shared.rl.seeds import derive_seed

EVALUATION = "evaluation"
"""The method of a run that only scores a revision."""


def rollout(session: Session, run: RunRow, order: plan.Rollout) -> RolloutRequested:
    method = request_of(run).method
    if not isinstance(method, Grpo):
        raise Fatal(f"run {run.run_id} of method {run.method} has no rollouts")
    return RolloutRequested(
        command_id=commands.command_id(run.run_id, "rollout", order.step),
        run_id=run.run_id,
        policy=run.policy or "",
        base=run.base or "",
        step=order.step,
        revision=order.revision,
        adapter_sha256=_adapter_sha256(session, order.revision),
        task=method.task,
        prompts=method.prompts_per_step,
        group_size=method.group_size,
        max_tokens=method.max_tokens,
        temperature=method.temperature,
        seed=_seed(run, "rollout"),
        record=use_of(goal_of(request_of(run)), order.step).record,
    )


def update(session: Session, run: RunRow, order: plan.Update) -> UpdateRequested:
    method = request_of(run).method
    start, fresh = _start(session, run, order.step)
    return UpdateRequested(
        command_id=commands.command_id(run.run_id, "update", order.step),
        run_id=run.run_id,
        policy=run.policy or "",
        base=run.base or "",
        step=order.step,
        steps=run.steps,
        method=method,
        lora=lora_of(run),
        seed=_seed(run, "update"),
        start=start,
        fresh_optimizer=fresh,
        reference=_parent_adapter(session, run) if _measures_distance(method) else None,
        export=order.export,
        **_learned_from(session, run, order.step),
    )


def export(session: Session, run: RunRow, order: plan.Export) -> ExportRequested:
    return ExportRequested(
        command_id=commands.command_id(run.run_id, "export", order.step),
        run_id=run.run_id,
        policy=run.policy or "",
        base=run.base or "",
        step=order.step,
        checkpoint=checkpoint_of(session, run.run_id, order.step),
        lora=lora_of(run),
        parent=parent_at(session, run, order.step),
    )


def evaluation(session: Session, run: RunRow, order: plan.Evaluate) -> EvaluationRequested:
    evaluation = evaluation_of(run)
    if evaluation is None:
        raise Fatal(f"run {run.run_id} asks for no evaluation")
    return EvaluationRequested(
        command_id=commands.command_id(run.run_id, "evaluation", order.target),
        run_id=run.run_id,
        policy=run.policy or "",
        base=run.base or "",
        revision=order.revision,
        adapter_sha256=_adapter_sha256(session, order.revision),
        task=evaluation.task,
        items=evaluation.items,
        max_tokens=evaluation.max_tokens,
        seed=_seed(run, "evaluation"),
    )


def request_of(run: RunRow) -> TrainRequested:
    return TrainRequested.model_validate(run.request)


def evaluation_of(run: RunRow) -> Evaluation | None:
    if run.method == EVALUATION:
        return Evaluation.model_validate(run.request["evaluation"])
    return request_of(run).evaluation


def lora_of(run: RunRow) -> Lora:
    """The resolved one: the parent's where the run continues."""
    return Lora.model_validate(run.lora)


def parent_at(session: Session, run: RunRow, step: int) -> str | None:
    """The revision that `step`'s own one descends from: the run's latest before it, else its parent."""
    query = select(RevisionRow.revision).where(RevisionRow.run_id == run.run_id, RevisionRow.step < step)
    query = query.where(RevisionRow.ephemeral.is_(False))
    return session.scalars(query.order_by(RevisionRow.step.desc()).limit(1)).first() or run.parent


def _seed(run: RunRow, purpose: str) -> int:
    """The request's seed alone, where it names one, so that the same request can be run again."""
    seed = run.request.get("seed")
    return derive_seed(run.run_id if seed is None else "request", seed or 0, purpose) % 2**31


def _start(session: Session, run: RunRow, step: int) -> tuple[CheckpointRef | None, bool]:
    """(training checkpoint to continue from, whether the optimizer begins afresh)."""
    if step > 1:
        return checkpoint_of(session, run.run_id, step - 1), False
    return _parent_adapter(session, run), True


def _measures_distance(method: Method) -> bool:
    """Whether the method compares the policy with what the run started from."""
    return isinstance(method, Dpo) or (isinstance(method, Grpo) and method.kl is not None)


def _parent_adapter(session: Session, run: RunRow) -> CheckpointRef | None:
    """The training checkpoint of what the run started from; None = the base model.

    Without the parts that retention may drop at any time: a fresh optimizer, and a reference, need none."""
    if run.parent is None:
        return None
    parent = find_revision(session, run.parent)
    if parent is None:
        raise Fatal(f"the parent {run.parent} of run {run.run_id} is not in the catalog")
    held = checkpoint_of(session, parent.run_id, parent.step)
    return CheckpointRef(files=lasting(held.files), step=held.step)


def checkpoint_of(session: Session, run_id: str, step: int) -> CheckpointRef:
    """Raises Fatal for a step that has none."""
    row = session.get(CheckpointRow, (run_id, step))
    if row is None:
        raise Fatal(f"run {run_id} has no training checkpoint of step {step}")
    return CheckpointRef(files={name: FileRef(**ref) for name, ref in row.files.items()}, step=step)


def _learned_from(session: Session, run: RunRow, step: int) -> dict[str, Any]:
    """The rollout record of an update, and which part of it; nothing for methods without rollouts."""
    goal = goal_of(request_of(run))
    if not goal.samples:
        return {}
    use = use_of(goal, step)
    row = session.get(CommandRow, commands.command_id(run.run_id, "rollout", use.record_step))
    if row is None or row.result is None:
        raise Fatal(f"run {run.run_id} has no rollout record of step {use.record_step}")
    return {
        "record": FileRef(**row.result["record"]),
        "record_step": use.record_step,
        "epoch": use.epoch,
        "minibatch": use.minibatch,
    }


def _adapter_sha256(session: Session, revision: str | None) -> str | None:
    row = find_revision(session, revision) if revision else None
    return row.adapter_sha256 if row else None
