"""lp_old: the learner's logprobs of a rollout record before its first optimizer step, as a file.

It is part of the training checkpoint of every step of the record but the last, so that whichever learner
takes the next step measures its ratios from the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save

from services.learner.datum import Datum
from shared.errors import Fatal
from shared.rl.checkpoint import OLD_LOGPROBS_FILE


def dump(record: Sequence[Datum], logprobs: Mapping[str, Sequence[float]]) -> bytes:
    """One tensor [N] float64: the masked positions of every row, row by row."""
    values = [value for row in record for value in compress(logprobs[row.name], row.mask)]
    return save({"logprobs": torch.tensor(values, dtype=torch.float64)})


def load(record: Sequence[Datum], data: bytes | None) -> dict[str, list[float]]:
    """By row name, 0.0 outside the masks. Raises Fatal for a file that is missing or of another record."""
    if data is None:
        raise Fatal(
            f"the training checkpoint has no {OLD_LOGPROBS_FILE}; a record's later steps need that of its first"
        )
    try:
        values = load_tensors(data)["logprobs"].tolist()
    except (SafetensorError, KeyError) as error:
        raise Fatal(f"{OLD_LOGPROBS_FILE} of the training checkpoint cannot be read: {error}") from error
    wanted = sum(row.weighed for row in record)
    if len(values) != wanted:
        raise Fatal(f"{OLD_LOGPROBS_FILE} has {len(values)} logprobs, the record {wanted}; it is of another record")
    found = iter(values)
    return {row.name: [next(found) if taken else 0.0 for taken in row.mask] for row in record}
