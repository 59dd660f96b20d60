"""Settings of the evaluator: what every service is told, and its own `MINT_EVALUATOR_…`."""

from __future__ import annotations

from pydantic import Field

from shared.settings import CommonSettings

__all__ = ["EvaluatorSettings"]


class EvaluatorSettings(CommonSettings):
    evaluator_commands_in_flight: int = Field(2, ge=1, description="commands worked on at once, per base")
    evaluator_items_in_flight: int = Field(64, ge=1, description="items of one command sampled at once")
    evaluator_patience_s: float = Field(180.0, ge=0, description="how long an item waits for a serving replica")
    evaluator_scoring_concurrency: int = Field(4, ge=1, description="calls of rewards at once")
