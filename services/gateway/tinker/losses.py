"""The losses that clients may name: the inputs and settings of each.

In: a loss's name, its settings and the names of a datum's inputs. Out: the settings as floats. Invariant: what the
learner would not know or would read otherwise is refused here, by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.tinker.errors import invalid
from services.gateway.tinker.tensors import Dtype

__all__ = ["INPUT_DTYPES", "LossSpec", "check_inputs", "loss_spec", "settings_of"]

INPUT_DTYPES: dict[str, Dtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "logprobs": "float32",
    "advantages": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
_LARGEST = sys.float_info.max
_CLIPS = frozenset({"clip_low_threshold", "clip_high_threshold"})
_SAMPLED = frozenset({"target_tokens", "logprobs", "advantages"})


@dataclass(frozen=True)
class LossSpec:
    """`wide`: several targets a position are allowed."""

    needs: frozenset[str]
    may: frozenset[str] = frozenset()
    settings: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    wide: bool = False


LOSSES: dict[str, LossSpec] = {
    "cross_entropy": LossSpec(frozenset({"target_tokens"}), may=frozenset({"weights"}), wide=True),
    "importance_sampling": LossSpec(_SAMPLED),
    "ppo": LossSpec(_SAMPLED, may=_CLIPS, settings=_CLIPS),
    "cispo": LossSpec(_SAMPLED, may=_CLIPS, settings=_CLIPS),
    "dro": LossSpec(_SAMPLED, settings=frozenset({"beta"}), required=frozenset({"beta"})),
    "gspo": LossSpec(_SAMPLED, may=_CLIPS | {"sequence_ratio_mask"}, settings=_CLIPS),
}


def loss_spec(name: object) -> LossSpec:
    """Raises Refused, saying what is known."""
    found = LOSSES.get(name) if isinstance(name, str) else None
    if found is None:
        raise invalid(f"loss_fn {str(name)[:80]!r} is not known here; known are {', '.join(LOSSES)}")
    return found


def settings_of(name: str, spec: LossSpec, given: Mapping[str, Any]) -> dict[str, float]:
    """Raises Refused for a setting that is unknown, missing, text, negative or not finite."""
    listed = ", ".join(sorted(spec.settings)) or "none"
    for key, value in given.items():
        if key not in spec.settings:
            raise invalid(f"loss_fn_config: {name} has no setting {str(key)[:80]!r}; its settings are: {listed}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
            raise invalid(f"loss_fn_config.{key}: {str(value)[:80]!r} must be a finite number of at least 0")
    missing = spec.required - given.keys()
    if missing:
        raise invalid(f"loss_fn_config: {name} needs {', '.join(sorted(missing))}, which has no default")
    settings = {key: float(value) for key, value in given.items()}
    low, high = settings.get("clip_low_threshold"), settings.get("clip_high_threshold")
    if low is not None and high is not None and low > high:
        raise invalid(f"loss_fn_config: clip_low_threshold {low} is above clip_high_threshold {high}")
    return settings


def check_inputs(name: str, spec: LossSpec, given: Iterable[str], where: str) -> None:
    names = set(given)
    missing = spec.needs - names
    if missing:
        raise invalid(f"{where}.loss_fn_inputs: {name} needs {', '.join(sorted(missing))}")
    unknown = names - spec.needs - spec.may
    if unknown:
        raise invalid(
            f"{where}.loss_fn_inputs: {name} has no input {min(unknown)[:80]!r}; "
            f"its inputs are: {', '.join(sorted(spec.needs | spec.may))}"
        )
