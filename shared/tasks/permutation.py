"""A keyed shuffle of 0 … size-1 that needs no list: any position is computed on its own.

So a step knows its prompts from (seed, step) alone, after any restart, whatever the size of the task.
"""

from __future__ import annotations

import hashlib

__all__ = ["Permutation"]

_ROUNDS = 6


class Permutation:
    """A Feistel network over the next even number of bits; values outside are walked back in
    ("cycle walking", Black and Rogaway 2002), at most four steps on average."""

    def __init__(self, size: int, key: str) -> None:
        if size < 1:
            raise ValueError(f"cannot shuffle {size} items")
        self._size = size
        self._key = hashlib.sha256(key.encode()).digest()
        self._bits = max(1, ((size - 1).bit_length() + 1) // 2)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int) -> int:
        """Where `position` goes; distinct positions go to distinct places."""
        if not 0 <= position < self._size:
            raise IndexError(f"position {position} is outside 0 … {self._size - 1}")
        value = self._encrypt(position)
        while value >= self._size:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        mask = (1 << self._bits) - 1
        left, right = value >> self._bits, value & mask
        for number in range(_ROUNDS):
            data = number.to_bytes(1, "big") + right.to_bytes(8, "big")
            mixed = int.from_bytes(hashlib.blake2b(data, key=self._key, digest_size=8).digest(), "big")
            left, right = right, left ^ (mixed & mask)
        return (left << self._bits) | right
