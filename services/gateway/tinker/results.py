"""Results as `retrieve_future` answers them: which fields each kind of operation has.

In: an operation and its decoded result. Out: JSON's values, or a way to the protobuf for the kinds that have one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from services.gateway.tinker.extensions import reverse_kl_json
from services.gateway.tinker.json_wire import sample_json, train_json
from services.gateway.tinker.proto_wire import sample_proto, train_proto
from services.gateway.tinker.rest.interpolation import interpolation_json
from shared.catalog.operations import OperationView
from shared.errors import Fatal
from shared.operations.payload import (
    Payload,
    Result,
    ReverseKlResult,
    SampleResult,
    SavedResult,
    StepResult,
    TrainResult,
)

__all__ = ["result_json", "result_protobuf", "sampled_by"]


def result_protobuf(value: Payload | Result | None) -> Callable[[], bytes] | None:
    """None for what clients read as JSON only."""
    if isinstance(value, TrainResult):
        return partial(train_proto, value)
    if isinstance(value, SampleResult):
        return partial(sample_proto, value)
    return None


def result_json(view: OperationView, value: Payload | Result | None) -> dict[str, Any]:
    """Raises Fatal for what is no result of this kind."""
    if isinstance(value, TrainResult):
        return train_json(value)
    if isinstance(value, SampleResult):
        return sample_json(value)
    if isinstance(value, StepResult):
        return {"metrics": dict(value.metrics)}
    if isinstance(value, ReverseKlResult):
        return reverse_kl_json(value)
    if value is None or isinstance(value, SavedResult):
        return _saved(view, value or SavedResult())
    raise Fatal(f"operation {view.request_id} of kind {view.kind} has a {type(value).__name__} for a result")


def sampled_by(value: Payload | Result | None) -> dict[str, str]:
    """Headers that say what sampled."""
    if not isinstance(value, SampleResult):
        return {}
    found = {"mint-revision": value.revision, "mint-adapter-sha256": value.adapter_sha256}
    return {name: text for name, text in found.items() if text}


def _saved(view: OperationView, saved: SavedResult) -> dict[str, Any]:
    if view.kind == "interpolate":
        return interpolation_json(saved)
    answer: dict[str, Any] = {"note": saved.note} if saved.note else {}
    match view.kind:
        case "create_model" if saved.path:
            # It was begun from a checkpoint, which clients know as a load.
            return answer | {"type": "load_weights", "model_id": view.model_id, "path": saved.path}
        case "create_model" | "unload_model":
            return answer | {"type": view.kind, "model_id": view.model_id}
        case "load_weights":
            path = {"path": saved.path} if saved.path else {}
            return answer | {"type": "load_weights", "model_id": view.model_id} | path
        case "save_weights":
            return answer | {"type": "save_weights", "path": saved.path}
        case "save_sampler_weights" if saved.sampling_session_id:
            return answer | {"type": "save_weights_for_sampler", "sampling_session_id": saved.sampling_session_id}
        case "save_sampler_weights":
            return answer | {"type": "save_weights_for_sampler", "path": saved.path}
        case _:
            return answer | {"path": saved.path}
