"""Every random draw of a run has a seed of its own, derived from what it is for and from nothing else.

Parts go in (run seed, purpose, step, prompt, sample …), a 63-bit seed comes out. Invariant: the same
parts give the same seed in every process and on every machine.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """0 ≤ seed < 2**63, from the sha256 of the parts; `1` and `"1"` differ, and so do ("a", "b") and ("ab",)."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
