"""MinT's event contracts: CloudEvents 1.0 bodies as pydantic models, with no other dependency."""

from .cloudevents import Envelope, decode, headers_for
from .commands import (
    CheckpointRef,
    Command,
    EvaluationRequested,
    ExportRequested,
    OperationsRequested,
    RolloutRequested,
    SampleRequested,
    UpdateRequested,
)
from .common import FileRef
from .events import (
    AliasMoved,
    PolicyUpdated,
    RevisionEvaluated,
    RevisionExported,
    RevisionReady,
    RevisionRegistered,
    RolloutCompleted,
    RunEnded,
    RunStateChanged,
)
from .names import Reference, parse_reference
from .registry import CONTRACTS, Contract
from .training import TrainRequested

__all__ = [
    "CONTRACTS",
    "AliasMoved",
    "CheckpointRef",
    "Command",
    "Contract",
    "Envelope",
    "EvaluationRequested",
    "ExportRequested",
    "FileRef",
    "PolicyUpdated",
    "OperationsRequested",
    "Reference",
    "RevisionEvaluated",
    "RevisionExported",
    "RevisionReady",
    "RevisionRegistered",
    "RolloutCompleted",
    "RolloutRequested",
    "RunEnded",
    "RunStateChanged",
    "SampleRequested",
    "TrainRequested",
    "UpdateRequested",
    "decode",
    "headers_for",
    "parse_reference",
]
