"""The other processes that hold the same base: who computes which micro-batch, and how results meet.

Every process of a group makes the same calls in the same order. Invariant: what a step computes is the
same in each of them when it ends, whichever computed which part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shared.errors import Fatal, MintError, Retryable

__all__ = ["Alone", "Group", "OutOfStep", "Peers"]

T = TypeVar("T")


class OutOfStep(Exception):
    """The processes of a group no longer compute the same; none of them may go on."""


class Peers(Protocol):
    def share(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """This process's items, as many as any other's: (item, whether it counts). One that does not is
        there so that all make the same number of passes."""
        ...

    def check(self, check: Callable[[], None]) -> None:
        """The first process's check, raised in all."""
        ...

    def sum_(self, tensor: Tensor) -> None:
        """Add up in place, over all."""
        ...

    def merge(self, found: dict[int, T]) -> dict[int, T]:
        """The union, in the order of its keys."""
        ...

    def first(self, error: MintError | None) -> MintError | None:
        """The error of the first process that has one."""
        ...


class Alone:
    """One process has the whole base."""

    def share(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        return [(item, True) for item in items]

    def check(self, check: Callable[[], None]) -> None:
        check()

    def sum_(self, tensor: Tensor) -> None:
        return None

    def merge(self, found: dict[int, T]) -> dict[int, T]:
        return dict(sorted(found.items()))

    def first(self, error: MintError | None) -> MintError | None:
        return error


class Group:
    """The processes of torch's default group, which carries tensors; `control` (gloo) carries all else.

    Item i goes to process i modulo their number. Where a last round has nothing for a process, it computes
    the last item again, uncounted. Everything raises RuntimeError when a process is gone."""

    def __init__(self, control: dist.ProcessGroup) -> None:
        self._control = control
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def share(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        turns = range(self.rank, self.rank + len(items), self.size)
        return [(items[i], True) if i < len(items) else (items[-1], False) for i in turns]

    def check(self, check: Callable[[], None]) -> None:
        """The others raise Retryable with the words of what the first raises."""
        raised: Exception | None = None
        if self.rank == 0:
            try:
                check()
            except Exception as error:
                raised = error
        flag = torch.tensor([raised is not None])
        dist.broadcast(flag, src=0, group=self._control)
        if not flag.item():
            return
        reason = self.hear(str(raised))
        raise raised or Retryable(reason)

    def sum_(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def merge(self, found: dict[int, T]) -> dict[int, T]:
        return dict(sorted((key, value) for part in self._gather(found) for key, value in part.items()))

    def first(self, error: MintError | None) -> MintError | None:
        """Of another process's error, its words and whether it is Retryable."""
        told = self._gather((isinstance(error, Retryable), str(error)) if error else None)
        for rank, one in enumerate(told):
            if one is not None:
                retryable, words = one
                return error if rank == self.rank else Retryable(words) if retryable else Fatal(words)
        return None

    def hear(self, value: T) -> T:
        """The first process's `value`, pickled; the others' is ignored."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def agree(self, about: str, value: str) -> None:
        """Raises OutOfStep, in all, unless every process has the same `value`."""
        values = self._gather(value)
        if len(set(values)) > 1:
            raise OutOfStep(f"the processes of this base differ in {about}: {values}")

    def _gather(self, value: T) -> list[T]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._control)
        return cast(list[T], gathered)
