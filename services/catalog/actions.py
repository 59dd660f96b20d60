"""What the plan can answer: one action, and the state that the run is in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["running", "evaluating", "promoting"]


@dataclass(frozen=True)
class Wait:
    """For the open commands."""


@dataclass(frozen=True)
class AwaitReady:
    """Commands may be open beside it."""

    revision: str


@dataclass(frozen=True)
class Rollout:
    """Sample the record of `step`, the first that uses it, with `revision` (None = the base model)."""

    step: int
    revision: str | None


@dataclass(frozen=True)
class Update:
    step: int
    export: bool


@dataclass(frozen=True)
class Export:
    step: int


@dataclass(frozen=True)
class Register:
    step: int


@dataclass(frozen=True)
class Evaluate:
    """`target` names the command: the step of a revision that is scored on the way, the last revision, or
    what the gate compares with. `revision` None = the base model."""

    target: Literal["parent", "base", "last"] | int
    revision: str | None


@dataclass(frozen=True)
class DropRollouts:
    """Close the rollouts that are open: no step will use their records."""


@dataclass(frozen=True)
class Promote:
    """`remark` goes into the outcome, behind what was promoted."""

    revision: str
    alias: str
    remark: str = ""


@dataclass(frozen=True)
class Complete:
    """Over, without an alias moved. `revision`: the one that the run stands for."""

    outcome: str
    revision: str | None = None


@dataclass(frozen=True)
class Fail:
    reason: str


Order = Rollout | Update | Export | Evaluate
Action = Wait | AwaitReady | Order | Register | DropRollouts | Promote | Complete | Fail


@dataclass(frozen=True)
class Next:
    state: State
    action: Action
