"""Training checkpoints as files: what they are called and what `state.json` says.

Written and restored by the learner, read by the exporter. Invariant: whoever holds the files knows from
them alone which base they fit and in which LoRA shape.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from shared.errors import Fatal

ADAPTER_FILE = "adapter.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
GRADIENTS_FILE = "gradients.safetensors"
OLD_LOGPROBS_FILE = "old_logprobs.safetensors"
STATE_FILE = "state.json"
PROBE_FILE = "probe.json"
FORMAT = 1


class TrainingState(BaseModel):
    """`step` is the run's, `optimizer_step` counts the steps that the moments have seen (a skipped step
    is in the first alone), `accumulated` the forward_backwards since the last of them. `seed` and `step` are
    the data position and the RNG: all else derives from them."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    format: int = FORMAT
    policy: str
    run_id: str
    base: str
    base_sha256: str
    rank: int
    alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...]
    seed: int
    step: int
    optimizer_step: int
    accumulated: int = 0


def read_state(data: bytes) -> TrainingState:
    """Raises Fatal for bytes that are no state, or one of another format."""
    try:
        state = TrainingState.model_validate_json(data)
    except ValidationError as error:
        raise Fatal(f"{STATE_FILE} of the training checkpoint cannot be read: {error}") from error
    if state.format != FORMAT:
        raise Fatal(f"{STATE_FILE} has format {state.format}; this build reads format {FORMAT}")
    return state
