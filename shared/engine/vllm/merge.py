"""Several sequences of one request as one stream, in the order in which their chunks come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from shared.engine.port import SampleChunk


async def merged(sequences: Sequence[AsyncGenerator[SampleChunk, None]]) -> AsyncGenerator[SampleChunk, None]:
    """Closing it closes all of them; the error of one ends the others and is raised."""
    chunks: asyncio.Queue[SampleChunk | Exception | None] = asyncio.Queue()

    async def pump(sequence: AsyncGenerator[SampleChunk, None]) -> None:
        try:
            async with aclosing(sequence):
                async for chunk in sequence:
                    chunks.put_nowait(chunk)
        except Exception as error:
            chunks.put_nowait(error)
        chunks.put_nowait(None)

    tasks = [asyncio.create_task(pump(sequence)) for sequence in sequences]
    try:
        running = len(tasks)
        while running:
            item = await chunks.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
