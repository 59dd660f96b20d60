"""What an operation answers, from what its work computed.

In: the job with its answer. Out: a result as clients read it. Invariant: each figure has the name and the reduction by
which clients merge the parts of one request (`name:reduction`).
"""

from __future__ import annotations

from services.learner.operation_rows import logprobs_of
from services.learner.operation_works import Job
from services.learner.works import Answer
from shared.operations.payload import (
    AdamPayload,
    LoadPayload,
    ReverseKlPayload,
    ReverseKlResult,
    SavedResult,
    SavePayload,
    StepResult,
    TrainPayload,
    TrainResult,
)

__all__ = ["result_of"]


def result_of(job: Job, answer: Answer, model_id: str) -> TrainResult | StepResult | ReverseKlResult | SavedResult:
    match job.payload:
        case TrainPayload() as passed:
            return TrainResult(logprobs_of(passed, answer.logprobs), {"loss:sum": answer.loss})
        case ReverseKlPayload():
            return ReverseKlResult(tuple(answer.losses), {"loss:sum": answer.loss})
        case AdamPayload(learning_rate=rate):
            return StepResult({"grad_norm:mean": answer.norm, "learning_rate:mean": rate})
        case SavePayload(name=name, kind=kind):
            return SavedResult(path=f"tinker://{model_id}/{kind}/{name}" if name else "")
        case LoadPayload(path=path, optimizer=wanted):
            note = "" if job.operation.has_optimizer or not wanted else NO_OPTIMIZER
            return SavedResult(path=path, note=note)
    raise TypeError(f"no result is known of a {type(job.payload).__name__}")


NO_OPTIMIZER = "this checkpoint keeps no optimizer state; the optimizer starts afresh"
