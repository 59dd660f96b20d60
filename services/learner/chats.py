"""The training data that this learner used last, so that a step does not parse its file again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from mint_schemas.training import Data, Pairs

from shared.errors import Fatal
from shared.tasks import Chat, Pair, load_demonstrations, load_pairs
from shared.tasks.load import Read

KEPT = 16

T = TypeVar("T")
D = TypeVar("D", Data, Pairs)


class ChatLoader:
    """Immutable data, named by its sha256 or by the task that makes it; the `KEPT` newest stay."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._loaded: dict[tuple[str, str], Sequence[Any]] = {}

    async def load(self, data: Data, train_on: str = "assistant") -> Sequence[Chat]:
        """Demonstrations, each with something to learn under `train_on` (see `Sft`). Raises Fatal, with the
        line or reason, for data that cannot be trained on."""
        return await self._load(f"chats, {train_on}", data, partial(load_demonstrations, train_on=train_on))

    async def load_pairs(self, data: Pairs) -> Sequence[Pair]:
        """Preference pairs. Raises like `load`."""
        return await self._load("pairs", data, load_pairs)

    async def _load(self, kind: str, data: D, parse: Callable[[D, Read], Awaitable[Sequence[T]]]) -> Sequence[T]:
        # the kind is part of the key: one file may be asked for as chats and as pairs, and for other turns
        key = (kind, data.model_dump_json())
        loaded: Sequence[T] | None = self._loaded.pop(key, None)
        if loaded is None:
            try:
                loaded = await parse(data, self._read)
            except ValueError as error:
                raise Fatal(f"the training data cannot be used: {error}") from error
        self._loaded[key] = loaded
        while len(self._loaded) > KEPT:
            del self._loaded[next(iter(self._loaded))]
        return loaded
