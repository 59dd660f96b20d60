"""Sampling straight from the resident base, for tests that watch a policy learn without an engine."""

from __future__ import annotations

import torch

from services.learner.slots import Slot, SlotTable
from shared.rl.record import Group, RolloutRecord, Trajectory
from shared.tasks import TaskItem, TaskSet
from shared.text.codec import TextCodec


class Player:
    """Greedy scores and sampled rollout records of the policy in a slot (left-padded Transformers generate)."""

    def __init__(self, base, slots: SlotTable, codec: TextCodec, task: TaskSet) -> None:
        self._base, self._slots, self._codec, self._task = base, slots, codec, task

    def score(self, slot: Slot, items: int, max_tokens: int = 6) -> float:
        """Exact match, greedy, over held-out items."""
        total, asked = 0.0, self._task.held_out(items)
        for at in range(0, len(asked), 64):
            batch = asked[at : at + 64]
            completions, _ = self._generate(slot, batch, max_tokens, do_sample=False)
            total += sum(
                self._task.score(item, self._codec.decode(ids)) for item, ids in zip(batch, completions, strict=True)
            )
        return total / len(asked)

    def record(self, slot: Slot, step: int, prompts: int, group_size: int, max_tokens: int, seed: int) -> RolloutRecord:
        items = self._task.step_items(seed, step, prompts)
        repeated = [item for item in items for _ in range(group_size)]
        torch.manual_seed(seed * 1000 + step)
        completions, logprobs = self._generate(
            slot, repeated, max_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
        )
        trajectories = [
            Trajectory(
                token_ids=tuple(ids), logprobs=tuple(lps), reward=self._task.score(item, self._codec.decode(ids)),
                finish_reason="stop", text=self._codec.decode(ids),
            )
            for item, ids, lps in zip(repeated, completions, logprobs, strict=True)
        ]  # fmt: skip
        groups = tuple(
            Group(
                prompt_id=item.id, prompt_ids=tuple(self._codec.chat_ids(item.messages)), answer=item.answer,
                trajectories=tuple(trajectories[i * group_size : (i + 1) * group_size]),
            )
            for i, item in enumerate(items)
        )  # fmt: skip
        return RolloutRecord(
            run_id="run", step=step, policy=slot.policy, base="base", base_sha256="", revision=None,
            adapter_sha256=None, temperature=1.0, max_tokens=max_tokens, task_sha256=self._task.sha256, seed=seed,
            groups=groups,
        )  # fmt: skip

    @torch.no_grad()
    def _generate(
        self, slot: Slot, items: list[TaskItem], max_tokens: int, **settings
    ) -> tuple[list[list[int]], list[list[float]]]:
        prompts = [self._codec.chat_ids(item.messages) for item in items]
        longest = max(map(len, prompts))
        eos = self._codec.eos_ids[0]
        ids = torch.tensor([[eos] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with self._base.router.applied([slot.span()]):
            out = self._base.module.generate(
                ids, attention_mask=mask, max_new_tokens=max_tokens, pad_token_id=eos, output_logits=True,
                return_dict_in_generate=True, **settings,
            )  # fmt: skip
        sampled = out.sequences[:, longest:]
        q = torch.log_softmax(torch.stack(out.logits, dim=1).float(), dim=-1).gather(2, sampled[:, :, None])[:, :, 0]
        lengths = [row.index(eos) + 1 if eos in row else len(row) for row in sampled.tolist()]
        return (
            [row[:n] for row, n in zip(sampled.tolist(), lengths, strict=True)],
            [row[:n] for row, n in zip(q.tolist(), lengths, strict=True)],
        )
