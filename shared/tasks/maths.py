"""Rewards for mathematics, by the library math-verify: is what the completion ends with equal to the answer?

The last expression counts: of several `\\boxed{}` the last, of several numbers the last, inside the last
`<answer>…</answer>` where there is one. Fractions, decimals, percentages, sets, intervals, units and forms
that simplify to each other are compared as mathematics. In: a completion and an answer, plain or LaTeX. Out:
1.0 or 0.0. Invariant: a completion that takes too long or cannot be read is worth 0.0; an answer that is no
mathematics is an error, since no completion could ever equal it.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from shared.tasks.hosted import Hosted, HostError
from shared.tasks.reward import said

__all__ = ["MathReward", "math_scorer"]


def math_scorer() -> str:
    """Raises ValueError where the library is not installed."""
    try:
        return f"math_verify@{version('math-verify')}"
    except PackageNotFoundError as error:
        raise ValueError("the reward math_verify needs the package math-verify; run `make setup`") from error


class MathReward:
    """A function (completion, answer) → 1.0 or 0.0, safe from many threads."""

    def __init__(self, concurrency: int) -> None:
        """Raises ValueError where the library does not start."""
        try:
            self._host = Hosted({"kind": "math"}, children=max(1, min(concurrency, os.cpu_count() or 1)))
        except HostError as error:
            raise ValueError(f"the library math-verify does not start: {error}") from error

    def __call__(self, completion: str, answer: str) -> float:
        """Raises ValueError for an answer that is no mathematics."""
        text = said(completion)
        if text and text == answer.strip():
            return 1.0
        last_box = text.rfind(r"\boxed")
        try:
            found = self._host.ask({"answer": answer, "completion": text[last_box:] if last_box >= 0 else text})
        except HostError:
            self.require(answer)
            return 0.0
        if found.get("unknown"):
            # Said of the answer by a process that had read the completion too.
            self.require(answer)
            return 0.0
        return float(found["score"])

    def require(self, answer: str) -> None:
        """Raises ValueError for an answer that is no mathematics, or takes more than it may to read."""
        try:
            unknown = self._host.ask({"answer": answer}).get("unknown")
        except HostError as error:
            raise ValueError(f"the answer {answer!r:.200} cannot be read: {error}") from error
        if unknown:
            raise _unknown(answer)


def _unknown(answer: str) -> ValueError:
    return ValueError(f"the answer {answer!r:.200} is no mathematical expression; nothing could equal it")
