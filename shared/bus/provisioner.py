"""Makes the bus equal to the table: creates what is missing, updates what differs, deletes nothing that
holds messages. Safe to run at any time and more than once."""

from __future__ import annotations

from typing import Any

from nats.js.errors import APIError, NotFoundError

from shared.errors import Fatal

from .check import require_equal
from .configs import bucket_config, consumer_config, stream_config
from .table import Table

__all__ = ["provision"]


async def provision(js: Any, table: Table) -> None:
    """Raises Fatal naming the stream or durable that the server does not let us change."""
    for config in [*map(stream_config, table.streams), *map(bucket_config, table.buckets)]:
        await _settle(f"stream {config.name}", _stream(js, config))
    for durable in table.durables:
        config = consumer_config(durable)
        await _settle(f"durable {durable.name}", js.add_consumer(durable.stream, config=config))
    await require_equal(js, table)


async def _stream(js: Any, config: Any) -> None:
    try:
        await js.stream_info(config.name)
    except NotFoundError:
        await js.add_stream(config=config)
    else:
        await js.update_stream(config=config)


async def _settle(what: str, change: Any) -> None:
    try:
        await change
    except APIError as error:
        raise Fatal(f"the bus refuses the table's {what}: {error.description or error}") from error
