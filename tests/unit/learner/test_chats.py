"""What the learner keeps of the data that it read."""

from __future__ import annotations

import hashlib
import json

import pytest
from mint_schemas.common import FileRef
from mint_schemas.training import JsonlMessages, JsonlPairs

from services.learner.chats import KEPT, ChatLoader
from shared.errors import Fatal


class Shelf:
    """Files by key, and how often each was read."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.reads: list[str] = []

    def put(self, key: str, *lines: object) -> FileRef:
        data = "\n".join(json.dumps(line) for line in lines).encode()
        self.files[key] = data
        return FileRef(key=key, sha256=hashlib.sha256(data).hexdigest(), size=len(data))

    async def get(self, ref: FileRef) -> bytes:
        self.reads.append(ref.key)
        return self.files[ref.key]


LINE = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
    "prompt": "hi", "chosen": "hello", "rejected": "go away",
}  # fmt: skip


async def test_one_file_read_as_chats_and_as_pairs_is_two_things():
    shelf = Shelf()
    loader, ref = ChatLoader(shelf.get), shelf.put("a", LINE)
    chats = await loader.load(JsonlMessages(kind="jsonl", data=ref))
    pairs = await loader.load_pairs(JsonlPairs(kind="jsonl", data=ref))
    assert chats[0][1]["content"] == pairs[0].chosen[0]["content"] == "hello"
    assert pairs[0].rejected[0]["content"] == "go away"
    assert await loader.load(JsonlMessages(kind="jsonl", data=ref)) is chats
    assert await loader.load_pairs(JsonlPairs(kind="jsonl", data=ref)) is pairs
    assert shelf.reads == ["a", "a"]


async def test_the_newest_stay_and_what_was_used_last_is_new():
    shelf = Shelf()
    loader = ChatLoader(shelf.get)
    data = [JsonlPairs(kind="jsonl", data=shelf.put(f"file-{i}", LINE)) for i in range(KEPT + 1)]
    for one in (*data[:KEPT], data[0], data[KEPT], data[0]):
        await loader.load_pairs(one)
    assert shelf.reads == [f"file-{i}" for i in range(KEPT + 1)]
    await loader.load_pairs(data[1])
    assert shelf.reads[-1] == "file-1"


async def test_data_that_is_none_is_refused_with_its_line():
    shelf = Shelf()
    ref = shelf.put("a", LINE, {"prompt": "hi", "chosen": "hello"})
    with pytest.raises(Fatal, match="the training data cannot be used: line 2: `rejected`"):
        await ChatLoader(shelf.get).load_pairs(JsonlPairs(kind="jsonl", data=ref))
