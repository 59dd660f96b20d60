"""Settings of the rollout service: what every service is told, and its own `MINT_ROLLOUT_…`."""

from __future__ import annotations

from pydantic import Field

from shared.settings import CommonSettings

__all__ = ["RolloutSettings"]


class RolloutSettings(CommonSettings):
    rollout_commands_in_flight: int = Field(4, ge=1, description="commands worked on at once, per base")
    rollout_groups_in_flight: int = Field(16, ge=1, description="groups of one command sampled at once")
    rollout_patience_s: float = Field(180.0, ge=0, description="how long a group waits for a serving replica")
    rollout_samples_in_flight: int = Field(32, ge=1, description="sample operations worked on at once, per base")
    rollout_sequences_in_flight: int = Field(128, ge=1, description="sequences of sample operations drawn at once")
    rollout_scoring_concurrency: int = Field(4, ge=1, description="calls of rewards at once")
