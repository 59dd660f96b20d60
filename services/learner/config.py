"""Settings of a learner: `MINT_LEARNER_<FIELD>` beside the common `MINT_<FIELD>`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.settings import CommonSettings


class LearnerSettings(CommonSettings):
    """`learner_base` is the public name of the base model to hold; empty = every configured one."""

    learner_base: str = ""
    learner_precision: Literal["float32", "bfloat16"] = "bfloat16"
    learner_device: str = "cpu"
    learner_slots: Annotated[int, Field(ge=1, description="adapters whose state stays in memory")] = 8
    learner_batch_tokens: Annotated[int, Field(ge=1, description="tokens of a micro-batch")] = 1024
    learner_packing: Annotated[bool, Field(description="rows end to end, without padding")] = True
    learner_commands_in_flight: Annotated[int, Field(ge=1, description="steps that wait here for a turn")] = 8
    learner_policies_in_flight: Annotated[
        int, Field(ge=1, description="policies whose operations are worked on here at once, per base")
    ] = 16
    learner_schedule: Annotated[
        Literal["auto", "sliced", "batched"], Field(description="one policy a turn, several, or several small ones")
    ] = "sliced"
    learner_threads: Annotated[int, Field(ge=0, description="threads of one step; 0 = as torch chooses")] = 0
