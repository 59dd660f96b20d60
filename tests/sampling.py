"""What tests of sampling services share: a small base, sums, and a sampler that knows the answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mint_schemas.common import FileRef

from shared.bases import Base
from shared.engine.port import SampleRequest
from shared.sampling.fake import FakeSampler
from shared.text import TextCodec
from tests.tiny import TINY_NAME, tokenizer_directory

BASE_SHA256 = "b" * 64
ADAPTER_SHA256 = "c" * 64
REVISION = "acme/adder@3"


def small_base(max_context: int = 1024) -> Base:
    """Names and digests only; nothing of it is on disk."""
    return Base(
        name=TINY_NAME,
        token="tiny-llama",
        directory=Path("/nowhere"),
        max_rank=32,
        target_modules=("q_proj",),
        sha256=BASE_SHA256,
        tokenizer_sha256="d" * 64,
        chat_template_sha256="e" * 64,
        max_context=max_context,
        bytes=1,
    )


def load_codec() -> TextCodec:
    return TextCodec.load(tokenizer_directory())


def answering(codec: TextCodec, answer: Callable[[int, int, int], str]) -> FakeSampler:
    """A sampler that answers `What is a+b?` with `answer(a, b, sequence index)` and the end token."""

    def reply(request: SampleRequest, index: int) -> tuple[int, ...]:
        question = codec.decode(request.prompt).rsplit("What is ", 1)[1].split("?", 1)[0]
        a, b = map(int, question.split("+"))
        return (*codec.encode(answer(a, b, index)), *codec.eos_ids)

    return FakeSampler(reply, {REVISION: ADAPTER_SHA256}, BASE_SHA256)


class KeptFiles:
    """Stands in for the files of an attempt: keeps what is put."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    async def put(self, name: str, data: bytes) -> FileRef:
        assert name not in self.files
        self.files[name] = data
        return FileRef(key=f"attempts/{name}", sha256=hashlib.sha256(data).hexdigest(), size=len(data))


class Lease:
    """Counts its checks; `lost` (an error) is raised from check number `after` on."""

    def __init__(self, after: int = 1_000_000, lost: Exception | None = None) -> None:
        self.checks, self._after, self._lost = 0, after, lost

    def check(self) -> None:
        self.checks += 1
        if self._lost is not None and self.checks > self._after:
            raise self._lost


async def no_files(ref: FileRef) -> bytes:
    raise AssertionError(f"{ref.key} must not be read")


def as_any(value: object) -> Any:
    """For stand-ins that have what a job uses of a class, and no more."""
    return value
