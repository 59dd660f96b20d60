"""Validation of a TrainRequested: everything that is wrong with it, in words that say what is allowed.

In: the body as sent. Out: a `Checked`. The same for the bus, for `mint train --dry-run` and for the
gateway. Invariant: what passes here can run; what does not leaves no run half alive.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mint_schemas.training import Dpo, Evaluation, Grpo, Lora, Sft, TrainRequested
from pydantic import ValidationError
from sqlalchemy.orm import Session

from services.catalog.database import Database
from services.catalog.datarefs import DataProblem, data_reader
from services.catalog.lineage import Lineage, trace_lineage
from services.catalog.readiness import Readiness
from services.catalog.runs import Scoring
from shared.bases import Base
from shared.errors import Refused
from shared.store.port import ObjectStore
from shared.tasks import RewardSettings, load_demonstrations, load_pairs, load_task
from shared.tasks.load import Read
from shared.validation import explain

NO_HOSTS = RewardSettings()


@dataclass(frozen=True)
class Checked:
    """`request` and what follows is set only when there is no error."""

    errors: list[str]
    request: TrainRequested | None = None
    scoring: Scoring | None = None
    resolved: dict[str, Any] = field(default_factory=dict)


class Validator:
    def __init__(
        self,
        database: Database,
        store: ObjectStore,
        bases: Mapping[str, Base],
        readiness: Callable[[], Readiness],
        rewards: RewardSettings = NO_HOSTS,
    ) -> None:
        """`rewards`: which hosts a reward webhook may be on."""
        self._database, self._store, self._bases, self._readiness = database, store, bases, readiness
        self._rewards = rewards

    async def check(self, body: Mapping[str, Any], tenant: str | None = None) -> Checked:
        """`tenant`: the caller's; None = may act for all. Raises Retryable when the store is away."""
        errors = [*name_errors(body, self._bases), *_foreign(body, tenant)]
        try:
            request = TrainRequested.model_validate(dict(body))
        except ValidationError as error:
            return Checked([*errors, *explain(error)])
        base = self._bases.get(request.base)
        if base is None:
            return Checked(errors)
        lineage: Lineage | None = None
        try:
            lineage = await self._database.read(_lineage, request, base)
        except Refused as refusal:
            errors.append(str(refusal))
        lora = lineage.lora if lineage else request.lora
        errors += step_errors(request)
        errors += limit_errors(request, lora, base, self._readiness())
        data = await self._data(request)
        errors += data.errors
        if errors or lineage is None:
            return Checked(errors)
        resolved = {
            "request": request.model_dump(mode="json"),
            "base": {"name": base.name, "sha256": base.sha256},
            "parent": lineage.parent,
            "lora": lineage.lora.model_dump(mode="json"),
            **data.found,
        }
        return Checked([], request, data.scoring, resolved)

    async def scoring(self, evaluation: Evaluation, base: Base, tenant: str) -> Scoring:
        """Of an evaluation by itself. Raises Refused, with every reason, and Retryable when the store is away."""
        context = min(base.max_context, self._readiness().max_context.get(base.name, base.max_context))
        errors, data = _too_long([("max_tokens", evaluation.max_tokens, context)], base), _Data(self._rewards)
        try:
            await _read_task(evaluation, data_reader(self._store, tenant), data)
        except (ValueError, DataProblem) as problem:
            errors.append(f"task: {problem}")
        if errors or data.scoring is None:
            raise Refused("; ".join(errors) or "the task says nothing to score by")
        return data.scoring

    async def _data(self, request: TrainRequested) -> _Data:
        """Read what the request names, as the workers will."""
        data = _Data(self._rewards)
        read = data_reader(self._store, request.policy.split("/", 1)[0])
        for name, part in (("method", _read_method), ("evaluation", _read_evaluation)):
            try:
                await part(request, read, data)
            except (ValueError, DataProblem) as problem:
                data.errors.append(f"{name}: {problem}")
        return data


@dataclass
class _Data:
    """What reading the data gave."""

    rewards: RewardSettings
    errors: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    scoring: Scoring | None = None


async def _read_method(request: TrainRequested, read: Read, data: _Data) -> None:
    method = request.method
    match method:
        case Grpo():
            task = await load_task(method.task, read, data.rewards)
            await asyncio.to_thread(task.step_items, request.seed or 0, 1, 1)
            data.found["train_items"] = len(task.train_items)
        case Dpo():
            data.found["pairs"] = len(await load_pairs(method.data, read))
        case Sft():
            data.found["demonstrations"] = len(await load_demonstrations(method.data, read, method.train_on))


async def _read_evaluation(request: TrainRequested, read: Read, data: _Data) -> None:
    if request.evaluation is not None:
        await _read_task(request.evaluation, read, data)


async def _read_task(evaluation: Evaluation, read: Read, data: _Data) -> None:
    task = await load_task(evaluation.task, read, data.rewards)
    data.found["held_out_items"] = len(task.held_out(evaluation.items))
    data.scoring = Scoring(task.sha256, task.scorer)


def name_errors(body: Mapping[str, Any], bases: Mapping[str, Base]) -> list[str]:
    """What is wrong with the names, even where the rest of the body does not parse."""
    errors = []
    base, policy = body.get("base"), body.get("policy")
    if isinstance(base, str) and base not in bases:
        near = difflib.get_close_matches(base, bases, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        errors.append(f"base: {base[:200]!r} is no known base model{hint}; known are {', '.join(sorted(bases))}")
    if isinstance(policy, str) and "/" in policy:
        tenant = policy.split("/", 1)[0]
        owners = {name.split("/", 1)[0].lower() for name in bases if "/" in name}
        if tenant.lower() in owners:
            errors.append(
                f"policy: the tenant {tenant[:80]!r} is the owner part of a base model's name "
                "and would be confused with it; choose another tenant"
            )
    return errors


def _foreign(body: Mapping[str, Any], tenant: str | None) -> list[str]:
    policy = body.get("policy")
    if tenant is None or not isinstance(policy, str) or policy.split("/", 1)[0] == tenant:
        return []
    return [f"policy: {policy[:130]!r} is not of your tenant; policies of yours are named {tenant}/…"]


def step_errors(request: TrainRequested) -> list[str]:
    """Numbers of steps that do not go together."""
    method, every, errors = request.method, request.eval_every, []
    if method.optimizer.warmup_steps > method.steps:
        errors.append(
            f"method.optimizer.warmup_steps: {method.optimizer.warmup_steps} is above the run's {method.steps} steps, "
            f"so the learning rate would never be reached; allowed are 0 to {method.steps}"
        )
    if every is not None and every > method.steps:
        errors.append(
            f"eval_every: {every} is above the run's {method.steps} steps, so no revision would be scored on the way; "
            f"allowed are 1 to {method.steps}, or leave it out: the last revision is scored anyway"
        )
    elif isinstance(method, Grpo) and every is not None and every % method.steps_per_record:
        per = method.steps_per_record
        errors.append(
            f"eval_every: {every} is no multiple of {per}; with {method.epochs} epochs of {method.minibatches} "
            f"minibatches every rollout record gets {per} steps, and only the last of them makes a revision that "
            f"can be scored; allowed are {per}, {2 * per}, {3 * per} and so on"
        )
    return errors


def limit_errors(request: TrainRequested, lora: Lora, base: Base, engines: Readiness) -> list[str]:
    """What the base model or its engines cannot do. `lora`: the parent's, where the run continues one."""
    errors = []
    most = min(base.max_rank, engines.max_rank.get(base.name, base.max_rank))
    context = min(base.max_context, engines.max_context.get(base.name, base.max_context))
    if lora.rank > most:
        errors.append(f"lora.rank: {lora.rank} is above the maximum of {most} for {base.name}")
    unknown = sorted(set(lora.target_modules) - set(base.target_modules))
    if unknown:
        errors.append(
            f"lora.target_modules: {', '.join(unknown)} cannot be trained on {base.name}; "
            f"allowed are {', '.join(base.target_modules)}"
        )
    lengths: list[tuple[str, int, int]] = []
    if isinstance(request.method, Grpo):
        lengths.append(("method.max_tokens", request.method.max_tokens, context))
    else:
        lengths.append(("method.max_length", request.method.max_length, base.max_context))
    if request.evaluation is not None:
        lengths.append(("evaluation.max_tokens", request.evaluation.max_tokens, context))
    return errors + _too_long(lengths, base)


def _too_long(lengths: Iterable[tuple[str, int, int]], base: Base) -> list[str]:
    """Of (field, length, most)."""
    return [
        f"{name}: {length} does not fit the context of {base.name}, which is {most} tokens here"
        for name, length, most in lengths
        if length > most
    ]


def _lineage(session: Session, request: TrainRequested, base: Base) -> Lineage:
    return trace_lineage(session, request, base)
