"""Ending background tasks: cancel, and wait until they really are over.

A cancellation can be swallowed on its way (`asyncio.wait_for` of Python 3.11 does so when what it waits
for ends in the same moment), so that one cancel and a wait may wait for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["end"]

_AGAIN_S = 0.5


async def end(*tasks: asyncio.Task[Any] | None) -> None:
    """Returns when every task is done; what they raise is dropped."""
    pending = {task for task in tasks if task is not None and not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
    await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
