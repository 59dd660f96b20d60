"""A question to the catalog that is asked again while it does not answer.

Only for questions that are the same however often they are asked, as a commit is: who commits again gets what won.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from shared.errors import Outage

__all__ = ["until_answered"]

T = TypeVar("T")

PAUSES_S = (0.5, 1.0, 2.0, 4.0)


async def until_answered(ask: Callable[[], Awaitable[T]], check: Callable[[], None]) -> T:
    """`check` is called before each time and raises when the answer is no longer wanted. Raises Outage at last."""
    for pause in PAUSES_S:
        check()
        try:
            return await ask()
        except Outage:
            await asyncio.sleep(pause)
    check()
    return await ask()
