"""What clients see is judged by: Transformers and PEFT on the same base in fp32, and the catalog's names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["TOLERANCE", "apart", "behind_first", "by_transformers", "policy_of"]

TOLERANCE = 1e-4
"""Between logprobs of the same weights in fp32."""

Rows = Sequence[Sequence[Any]]


def apart(left: Rows, right: Rows) -> float:
    """The largest difference of two lists of rows, which must be of equal shape."""
    assert [len(row) for row in left] == [len(row) for row in right]
    pairs = zip(left, right, strict=True)
    return max(float(np.abs(np.subtract(a, b, dtype=float)).max()) for a, b in pairs)


def behind_first(rows: Rows) -> list[Sequence[Any]]:
    """Logprobs of prompts without the first token's, which nothing stands before."""
    assert all(row[0] is None for row in rows)
    return [row[1:] for row in rows]


def by_transformers(base: Path, rows: Rows, adapter: Path | None = None) -> list[list[float]]:
    """Of each token but the first, given those before it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    model.eval()
    found = []
    for row in rows:
        ids = torch.tensor([list(row)])
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1)
        found.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found


def policy_of(model_id: str, tenant: str = "local") -> str:
    return f"{tenant}/tinker-{hashlib.sha256(model_id.encode()).hexdigest()[:12]}"
