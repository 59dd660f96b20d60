"""The demonstrations that this learner used last, so that a step does not parse its file again."""

from __future__ import annotations

from collections.abc import Sequence

from mint_schemas.training import Data

from shared.errors import Fatal
from shared.tasks import Chat, load_demonstrations
from shared.tasks.load import Read

KEPT = 4


class ChatLoader:
    """Immutable data, named by its sha256 or by the task that makes it; the `KEPT` newest stay."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._loaded: dict[str, Sequence[Chat]] = {}

    async def load(self, data: Data) -> Sequence[Chat]:
        """Raises Fatal, with the line or reason, for data that cannot be trained on."""
        key = data.model_dump_json()
        chats = self._loaded.pop(key, None)
        if chats is None:
            try:
                chats = await load_demonstrations(data, self._read)
            except ValueError as error:
                raise Fatal(f"the training data cannot be used: {error}") from error
        self._loaded[key] = chats
        while len(self._loaded) > KEPT:
            del self._loaded[next(iter(self._loaded))]
        return chats
