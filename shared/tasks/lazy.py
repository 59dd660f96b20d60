"""A sequence whose items are computed when asked for: tasks may have millions and use a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, overload

__all__ = ["Lazy"]

T = TypeVar("T")


class Lazy(Sequence[T], Generic[T]):
    """`item(i)` for 0 ≤ i < `size`."""

    def __init__(self, size: int, item: Callable[[int], T]) -> None:
        self._places = range(size)
        self._item = item

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._item(place) for place in self._places[index]]
        return self._item(self._places[index])
