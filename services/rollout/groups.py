"""Sampling and scoring the groups of one rollout record.

In: a command, its task, and a sampler; out: the rollout record. Invariants: every trajectory comes from
the revision that the command names; tokens are drawn from the plain distribution at the command's
temperature, so that the learner can compute the same logprobs; the seeds follow from (seed, step, prompt,
sample) alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from mint_schemas.commands import RolloutRequested

from shared.bases import Base
from shared.engine.port import SampleRequest, SamplingSettings
from shared.errors import Fatal
from shared.rl.record import Group, RolloutRecord, Trajectory
from shared.sampling.port import BACKGROUND, Sampled, Sampler
from shared.sampling.proved import ProvedSampler, gather_bounded
from shared.tasks import TaskItem, TaskSet, prompt_ids
from shared.text import TextCodec

__all__ = ["GroupSampler", "group_seed"]


def group_seed(seed: int, step: int, position: int, item_id: str) -> int:
    """The request seed of the group at `position` of a step; the engine derives each sample's from it.
    53 bits, which every JSON reader keeps."""
    digest = hashlib.sha256(f"rollout|{seed}|{step}|{position}|{item_id}".encode()).digest()
    return int.from_bytes(digest[:7], "big") >> 3


@dataclass(frozen=True)
class GroupSampler:
    """Samples through `sampler`, `groups_in_flight` groups at once."""

    sampler: Sampler
    base: Base
    codec: TextCodec
    groups_in_flight: int = 16
    patience_s: float = 180.0

    async def record(self, command: RolloutRequested, task: TaskSet, check: Callable[[], None]) -> RolloutRecord:
        """`check` is called before each group and while one is scored, and raises when the work is no longer
        wanted.

        Raises Fatal naming the prompt (reward, template, context length) or the revision that answered
        instead, and Retryable while serving is away."""
        try:
            number = command.record or command.step
            items = await asyncio.to_thread(task.step_items, command.seed, number, command.prompts)
        except ValueError as error:
            raise Fatal(f"step {command.step} has no prompts: {error}") from error
        proved = ProvedSampler(self.sampler, self.base, command.adapter_sha256, check, self.patience_s)
        attempt = uuid.uuid4().hex[:8]

        async def group(place: tuple[int, TaskItem]) -> Group:
            position, item = place
            request = self._request(command, position, item, attempt)
            sampled = await proved.sample(request)
            return Group(
                prompt_id=item.id,
                prompt_ids=request.prompt,
                answer=item.answer,
                prompt=self.codec.decode(request.prompt),
                trajectories=await self._trajectories(task, item, sampled, check),
            )

        groups = await gather_bounded(self.groups_in_flight, group, enumerate(items))
        return RolloutRecord(
            run_id=command.run_id,
            step=command.step,
            policy=command.policy,
            base=self.base.name,
            base_sha256=self.base.sha256,
            revision=command.revision,
            adapter_sha256=command.adapter_sha256,
            temperature=command.temperature,
            max_tokens=command.max_tokens,
            task_sha256=task.sha256,
            seed=command.seed,
            groups=tuple(groups),
        )

    def _request(self, command: RolloutRequested, position: int, item: TaskItem, attempt: str) -> SampleRequest:
        return SampleRequest(
            request_id=f"{command.command_id}/{position}/{attempt}",
            prompt=prompt_ids(item, self.codec, self.base, command.max_tokens),
            settings=SamplingSettings(
                max_tokens=command.max_tokens,
                temperature=command.temperature,
                stop_token_ids=self.codec.eos_ids,
                logprobs=0,
            ),
            revision=command.revision,
            n=command.group_size,
            seed=group_seed(command.seed, command.step, position, item.id),
            priority=BACKGROUND,
        )

    async def _trajectories(
        self, task: TaskSet, item: TaskItem, sampled: Sampled, check: Callable[[], None]
    ) -> tuple[Trajectory, ...]:
        """The group is scored as one batch, while other groups are sampled."""
        texts = await asyncio.to_thread(lambda: [self.codec.decode(s.token_ids) for s in sampled.sequences])
        rewards = await task.score_batch([(item, text) for text in texts], check)
        return tuple(
            Trajectory(
                token_ids=sequence.token_ids,
                logprobs=sequence.logprobs or (),
                reward=reward,
                finish_reason=sequence.finish_reason,
                text=text,
            )
            for sequence, text, reward in zip(sampled.sequences, texts, rewards, strict=True)
        )
