"""GET /mint/v1/runs/{id}/rollouts/{step}: what the step learned from, a page of samples at a time.

In: a run and one of its optimizer steps. Out: prompts, completions, rewards and advantages of the committed
rollout record that the step uses. Invariant: which record that is comes from the run's journal; the steps of
one record (epochs × minibatches) show the same one; an answer is bounded by `limit` and `TEXT_CHARS`. The
records shown last are kept as they are shown, by sha256, so that the next page reads and decodes nothing.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from mint_schemas.common import FileRef
from mint_schemas.training import Grpo, TrainRequested
from pydantic import BaseModel, Field, ValidationError

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.mint_v1.owned import Cursor, RunId, owned_run
from shared.catalog.api import JournalEntry, RunView
from shared.errors import Fatal, Refused
from shared.rl.advantages import group_advantages
from shared.rl.record import Group, RolloutRecord
from shared.text.codec import TextCodec

__all__ = ["RolloutPage", "RolloutSample", "show_rollouts"]

COMPLETED = "mint.v1.rollout.completed"
TEXT_CHARS = 20_000
SPANS_SHOWN = 20
RECORDS_KEPT = 4

Order = Literal["sampled", "worst", "best"]


class RolloutSample(BaseModel):
    """One completion. `group` and `sample` are its place in the record, from 0; `tokens` its length."""

    group: int
    sample: int
    prompt_id: str
    prompt: str
    answer: str
    completion: str
    reward: float
    advantage: float | None = Field(None, description="relative to its group; null for a group without a baseline")
    tokens: int
    finish_reason: str
    text_cut: bool = Field(False, description=f"prompt or completion has more than {TEXT_CHARS} characters")


class RolloutPage(BaseModel):
    """`record_step` is the step that the record was sampled for; `revision` null means that the base sampled."""

    run_id: str
    step: int
    record_step: int
    policy: str
    revision: str | None
    adapter_sha256: str | None
    temperature: float
    max_tokens: int
    order: Order
    groups: int
    total: int
    reward_mean: float | None
    items: list[RolloutSample]
    next_cursor: str | None = None


@dataclass(frozen=True)
class _Shown:
    """A record without what nobody is shown: its tokens and logprobs, and the rest of long texts."""

    policy: str
    revision: str | None
    adapter_sha256: str | None
    temperature: float
    max_tokens: int
    groups: int
    samples: list[RolloutSample]


_shown: OrderedDict[tuple[str, str], _Shown] = OrderedDict()
"""By sha256 and how advantages are computed, the latest last. Whoever looks here has been let at the run already."""


async def show_rollouts(
    run_id: RunId,
    step: Annotated[int, Path(ge=1, lt=2**31, description="an optimizer step", examples=[1])],
    gateway: Here,
    caller: Caller,
    order: Annotated[Order, Query(description="as sampled, or by reward")] = "sampled",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    cursor: Cursor = None,
) -> RolloutPage:
    """Prompts, completions, rewards, advantages and lengths of the record that a step learned from."""
    run = await owned_run(gateway, caller, run_id)
    start = _start(cursor)
    method = _method(run)
    per_record = method.steps_per_record if method else 1
    wanted = (step - 1) // per_record * per_record + 1
    body = _committed(await gateway.catalog.journal(run_id), run, step, wanted, per_record)
    shown = await _record(gateway, FileRef.model_validate(body["record"]), run_id, wanted, method)
    page = _ordered(shown.samples, order)[start : start + limit]
    end = start + len(page)
    rewards = [sample.reward for sample in shown.samples]
    return RolloutPage(
        run_id=run_id,
        step=step,
        record_step=wanted,
        policy=shown.policy,
        revision=shown.revision,
        adapter_sha256=shown.adapter_sha256,
        temperature=shown.temperature,
        max_tokens=shown.max_tokens,
        order=order,
        groups=shown.groups,
        total=len(rewards),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        items=page,
        next_cursor=str(end) if page and end < len(rewards) else None,
    )


async def _record(gateway: Gateway, ref: FileRef, run_id: str, step: int, method: Grpo | None) -> _Shown:
    """Raises Fatal for a record that cannot be read, and what the store raises."""
    key = (ref.sha256, method.advantage if method else "")
    shown = _shown.get(key)
    if shown is None:
        data = await gateway.store.get(ref)
        record = await asyncio.to_thread(_read, data, run_id, step)
        shown = await asyncio.to_thread(_as_shown, record, method, gateway.codecs.get(record.base))
        _shown[key] = shown
    _shown.move_to_end(key)
    while len(_shown) > RECORDS_KEPT:
        _shown.popitem(last=False)
    return shown


def _as_shown(record: RolloutRecord, method: Grpo | None, codec: TextCodec | None) -> _Shown:
    return _Shown(
        policy=record.policy,
        revision=record.revision,
        adapter_sha256=record.adapter_sha256,
        temperature=record.temperature,
        max_tokens=record.max_tokens,
        groups=len(record.groups),
        samples=[_cut(sample) for sample in _samples(record, method, codec)],
    )


def _start(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not re.fullmatch(r"[0-9]{1,9}", cursor):
        raise Refused(f"cursor {cursor[:40]!r} is none of this list; send next_cursor of the page before")
    return int(cursor)


def _method(run: RunView) -> Grpo | None:
    """None for a run that learns from no rollouts."""
    try:
        method = TrainRequested.model_validate(run.request).method
    except ValidationError:
        return None
    return method if isinstance(method, Grpo) else None


def _committed(journal: Sequence[JournalEntry], run: RunView, step: int, wanted: int, per: int) -> Mapping[str, Any]:
    """The body of the rollout.completed for step `wanted`. Raises Refused (404), naming the steps that have one."""
    found = {int(entry.body["step"]): entry.body for entry in journal if entry.type == COMPLETED}
    if wanted in found:
        return found[wanted]
    there = [number for first in sorted(found) for number in range(first, first + per)]
    words = f"steps {_spans(there)} have one" if there else f"none of its steps has one (method {run.method})"
    raise Refused(f"step {step} of run {run.run_id} has no rollout record; {words}", code="not_found", status=404)


def _spans(numbers: Sequence[int]) -> str:
    """`1–4, 9`: ascending numbers as ranges, the first few of them."""
    runs = [
        [number for _, number in part] for _, part in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return ", ".join(texts[:SPANS_SHOWN]) + (f" … {texts[-1]}" if len(texts) > SPANS_SHOWN else "")


def _read(data: bytes, run_id: str, step: int) -> RolloutRecord:
    try:
        return RolloutRecord.from_bytes(data)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise Fatal(f"the rollout record of step {step} of run {run_id} cannot be read: {error}") from error


def _samples(record: RolloutRecord, method: Grpo | None, codec: TextCodec | None) -> list[RolloutSample]:
    samples = []
    for index, group in enumerate(record.groups):
        prompt, advantages = _prompt(group, codec), _advantages(group, method)
        for number, (trajectory, advantage) in enumerate(zip(group.trajectories, advantages, strict=True)):
            samples.append(
                RolloutSample(
                    group=index,
                    sample=number,
                    prompt_id=group.prompt_id,
                    prompt=prompt,
                    answer=group.answer,
                    completion=trajectory.text,
                    reward=trajectory.reward,
                    advantage=advantage,
                    tokens=len(trajectory.token_ids),
                    finish_reason=trajectory.finish_reason,
                )
            )
    return samples


def _prompt(group: Group, codec: TextCodec | None) -> str:
    """The text that the record holds; older records hold its tokens alone."""
    if group.prompt:
        return group.prompt
    return codec.decode(group.prompt_ids) if codec is not None else ""


def _advantages(group: Group, method: Grpo | None) -> list[float | None]:
    rewards = [trajectory.reward for trajectory in group.trajectories]
    try:
        return list(group_advantages(rewards, method.advantage if method else "std"))
    except ValueError:
        return [None] * len(rewards)


def _ordered(samples: list[RolloutSample], order: Order) -> list[RolloutSample]:
    """Equal rewards stay as sampled, so that a cursor means the same at every call."""
    if order == "sampled":
        return samples
    return sorted(samples, key=lambda sample: sample.reward, reverse=order == "best")


def _cut(sample: RolloutSample) -> RolloutSample:
    cut = {
        name: text[:TEXT_CHARS]
        for name, text in (("prompt", sample.prompt), ("completion", sample.completion), ("answer", sample.answer))
        if len(text) > TEXT_CHARS
    }
    return sample.model_copy(update={**cut, "text_cut": True}) if cut else sample
