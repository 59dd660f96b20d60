"""Names for the states that a model goes through between two optimizer steps.

In: the run, the step of its training checkpoint, and the operations whose gradients were added since, in order. Out:
a sha256. Invariant: equal names mean equal adapter, optimizer and gradients; `forward`s and failed operations are in
none of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

__all__ = ["state_id"]


def state_id(run_id: str, step: int, request_ids: Sequence[str]) -> str:
    """`step` 0: the run has no training checkpoint of its own yet."""
    return hashlib.sha256(json.dumps([run_id, step, list(request_ids)]).encode()).hexdigest()
