"""The built-in task: sums. It needs no data, its answers are exact, and a small model can learn it."""

from __future__ import annotations

from collections.abc import Sequence

from shared.tasks.lazy import Lazy
from shared.tasks.permutation import Permutation
from shared.tasks.taskset import TaskItem

__all__ = ["HELD_OUT_SHARE", "arithmetic_items"]

HELD_OUT_SHARE = 5


def arithmetic_items(max_operand: int) -> tuple[Sequence[TaskItem], Sequence[TaskItem]]:
    """(train, held out) over every ordered pair 0 ≤ a, b ≤ `max_operand`: one in five, fixed for ever by
    the shuffle's key, is held out."""
    pairs = (max_operand + 1) ** 2
    order = Permutation(pairs, f"arithmetic|{max_operand}")
    border = pairs // HELD_OUT_SHARE

    def sum_at(place: int) -> TaskItem:
        a, b = divmod(order[place], max_operand + 1)
        return TaskItem(f"{a}+{b}", ({"role": "user", "content": f"What is {a}+{b}?"},), str(a + b))

    return Lazy(pairs - border, lambda index: sum_at(border + index)), Lazy(border, sum_at)
