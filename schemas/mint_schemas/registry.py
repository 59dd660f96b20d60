"""Every contract once: its CloudEvents type, its body, whether we consume or publish it.

Subjects are `<type>.<base token>`, on the stream COMMANDS for commands and EVENTS for events.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from . import commands, events
from .training import TrainRequested

__all__ = ["CONTRACTS", "Contract", "contract_for"]


@dataclass(frozen=True)
class Contract:
    """`direction`: `consumed` = others publish it to us (strict); `published` = we do (open)."""

    type: str
    body: builtins.type[BaseModel]
    stream: Literal["COMMANDS", "EVENTS"]
    direction: Literal["consumed", "published"]

    def subject(self, token: str) -> str:
        return f"{self.type}.{token}"


def _command(noun_verb: str, body: type[BaseModel]) -> Contract:
    return Contract(f"mint.v1.{noun_verb}", body, "COMMANDS", "published")


def _event(noun_verb: str, body: type[BaseModel]) -> Contract:
    return Contract(f"mint.v1.{noun_verb}", body, "EVENTS", "published")


CONTRACTS: tuple[Contract, ...] = (
    Contract("mint.v1.train.requested", TrainRequested, "COMMANDS", "consumed"),
    _command("rollout.requested", commands.RolloutRequested),
    _command("update.requested", commands.UpdateRequested),
    _command("export.requested", commands.ExportRequested),
    _command("evaluation.requested", commands.EvaluationRequested),
    _command("operations.requested", commands.OperationsRequested),
    _command("sample.requested", commands.SampleRequested),
    _event("rollout.completed", events.RolloutCompleted),
    _event("policy.updated", events.PolicyUpdated),
    _event("revision.exported", events.RevisionExported),
    _event("revision.registered", events.RevisionRegistered),
    _event("revision.ready", events.RevisionReady),
    _event("revision.evaluated", events.RevisionEvaluated),
    _event("alias.moved", events.AliasMoved),
    _event("run.queued", events.RunStateChanged),
    _event("run.running", events.RunStateChanged),
    _event("run.evaluating", events.RunStateChanged),
    _event("run.promoting", events.RunStateChanged),
    _event("run.completed", events.RunEnded),
    _event("run.failed", events.RunEnded),
    _event("run.cancelled", events.RunEnded),
)

_BY_TYPE = {contract.type: contract for contract in CONTRACTS}


def contract_for(type_: str) -> Contract:
    """Raises ValueError naming the known types."""
    try:
        return _BY_TYPE[type_]
    except KeyError:
        raise ValueError(f"{type_!r} is no known event type; known are {', '.join(sorted(_BY_TYPE))}") from None
