"""The rollout record: what sampling produced for one step, and which revision produced it.

Written by rollout, read by learner, shown to people. Stored gzipped; the same record gives the same
bytes, so that its sha256 names its content.
"""

from __future__ import annotations

import gzip

from pydantic import BaseModel, ConfigDict


class Trajectory(BaseModel):
    """One completion: `logprobs[t]` is the sampler's logprob of `token_ids[t]` under the distribution
    that was sampled from. A stop token is the last token. `reward` is finite."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float
    finish_reason: str
    text: str


class Group(BaseModel):
    """The trajectories of one prompt; advantages are relative to the group. `prompt` is `prompt_ids` as
    text for people, without special tokens; empty in records that do not have it."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    prompt_id: str
    prompt_ids: tuple[int, ...]
    answer: str
    prompt: str = ""
    trajectories: tuple[Trajectory, ...]


class RolloutRecord(BaseModel):
    """`revision` None means that the base model sampled it. `step` is the first optimizer step that uses
    it; several may."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    format: int = 1
    run_id: str
    step: int
    policy: str
    base: str
    base_sha256: str
    revision: str | None
    adapter_sha256: str | None
    temperature: float
    max_tokens: int
    task_sha256: str
    seed: int
    groups: tuple[Group, ...]

    def to_bytes(self) -> bytes:
        return gzip.compress(self.model_dump_json().encode(), mtime=0)

    @classmethod
    def from_bytes(cls, data: bytes) -> RolloutRecord:
        """Raises ValueError for bytes that are no record."""
        return cls.model_validate_json(gzip.decompress(data))
