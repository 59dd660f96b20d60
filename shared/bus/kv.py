"""Key-value buckets on the bus: last value per key, compare-and-set, and a watch that survives restarts.

The watch is a plain subscription that only says "look again", and a look at all keys every few seconds:
it needs no consumer on the server, and it also sees keys that ended by TTL, which no message announces.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import nats.errors
from nats.js.errors import APIError, KeyNotFoundError, KeyWrongLastSequenceError, NoStreamResponseError

from shared.errors import MintError, Retryable

__all__ = ["Bucket", "Entry", "StaleRevision"]

T = TypeVar("T")

# A change is announced as it is published, perhaps a moment before it can be read.
_SETTLE_S = 0.03

_DOWN = (nats.errors.Error, NoStreamResponseError, asyncio.TimeoutError, OSError)


@dataclass(frozen=True)
class Entry:
    """`value` None: the key was deleted or its TTL ended."""

    key: str
    value: bytes | None
    revision: int


class StaleRevision(MintError):
    """A compare-and-set lost: the key has another revision by now. Read it again and decide anew."""


class Bucket:
    """One bucket. Every call raises Retryable when the bus does not answer."""

    def __init__(self, name: str, jetstream: Callable[[], Any]) -> None:
        self._name, self._jetstream = name, jetstream
        self._held: Any = None

    async def get(self, key: str) -> Entry | None:
        kv = await self._kv()
        try:
            found = await self._ask(kv.get(key))
        except KeyNotFoundError:
            return None
        return Entry(key, found.value or b"", found.revision)

    async def put(self, key: str, value: bytes) -> int:
        """Returns the new revision."""
        kv = await self._kv()
        return int(await self._ask(kv.put(key, value)))

    async def cas(self, key: str, value: bytes, revision: int) -> int:
        """Put only if the key's revision is `revision` (0: it must not exist). Raises StaleRevision."""
        kv = await self._kv()
        try:
            return int(await self._ask(kv.update(key, value, last=revision) if revision else kv.create(key, value)))
        except KeyWrongLastSequenceError as error:
            raise StaleRevision(f"{self._name}/{key} is not at revision {revision} any more") from error

    async def delete(self, key: str) -> None:
        """Unknown key: no-op."""
        kv = await self._kv()
        await self._ask(kv.delete(key))

    async def entries(self, pattern: str = ">") -> dict[str, Entry]:
        """Every key that holds a value now. `pattern` as in NATS subjects: `smollm2-135m.*`."""
        prefix = f"$KV.{self._name}."
        info = await self._ask(self._jetstream().stream_info(f"KV_{self._name}", subjects_filter=prefix + pattern))
        keys = [subject.removeprefix(prefix) for subject in sorted(info.state.subjects or {})]
        found = {key: await self.get(key) for key in keys}
        return {key: entry for key, entry in found.items() if entry is not None}

    async def watch(self, pattern: str = ">", resync_s: float = 3.0) -> AsyncIterator[Entry]:
        """The entries now, then each change, without end; keys that ended come with value None. While
        the bus is away nothing comes; afterwards, what changed meanwhile (the last value per key)."""
        seen: dict[str, int] = {}
        changed = asyncio.Event()

        async def wake(_: Any) -> None:
            changed.set()

        client = self._jetstream()._nc
        subscription = await client.subscribe(f"$KV.{self._name}.{pattern}", cb=wake)
        try:
            while True:
                changed.clear()
                with suppress(Retryable):
                    now = await self.entries(pattern)
                    for entry in self._news(seen, now):
                        yield entry
                with suppress(TimeoutError):
                    async with asyncio.timeout(resync_s):
                        await changed.wait()
                    await asyncio.sleep(_SETTLE_S)
        finally:
            with suppress(nats.errors.Error):
                await subscription.unsubscribe()

    @staticmethod
    def _news(seen: dict[str, int], now: dict[str, Entry]) -> list[Entry]:
        news = [entry for key, entry in now.items() if seen.get(key) != entry.revision]
        news += [Entry(key, None, revision) for key, revision in seen.items() if key not in now]
        seen.clear()
        seen.update({key: entry.revision for key, entry in now.items()})
        return news

    async def _kv(self) -> Any:
        if self._held is None:
            self._held = await self._ask(self._jetstream().key_value(self._name))
        return self._held

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except (KeyNotFoundError, KeyWrongLastSequenceError):
            raise
        except (APIError, *_DOWN) as error:
            raise Retryable(
                f"the bus did not answer for bucket {self._name}: {type(error).__name__} {error}"
            ) from error
