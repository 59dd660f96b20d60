"""Bodies in and out: bounded, compressed or not, JSON or protobuf.

In: a request; a result's bytes. Out: a request whose body is plain and bounded; a message; a response in what the
client takes. Invariants: a body is never longer than the bound, neither as it is sent nor when it is decompressed; what
may be long is parsed beside the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message

from services.gateway.edge import Gateway, bounded
from services.gateway.errors import Invalid
from services.gateway.streaming import ClientGone
from services.gateway.tinker.json_wire import parsed
from services.gateway.tinker.proto_wire import PROTOBUF
from services.gateway.tinker.zstd import compress, decompress
from shared.errors import Refused
from shared.validation import explain

__all__ = ["answer", "beside", "few", "is_protobuf", "message", "plain", "takes_protobuf", "whole", "written"]

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

COMPRESS_BYTES = 16 << 10
"""Less is sent as it is."""
LARGE_BYTES = 1 << 20
SMALL_BYTES = 8 << 10


def plain(request: Request, bound: int) -> Request:
    """The same request with a body of at most `bound` bytes, decompressed. Raises Refused (415) for an unknown
    compression; reading it ends in a 413 for what is longer."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return bounded(request, bound)
    if encoding != "zstd":
        raise Refused(f"content-encoding {encoding[:40]!r} is not known here; zstd is", "unsupported", status=415)
    packed, read = bounded(request, bound), False

    async def receive() -> Message:
        nonlocal read
        if read:
            return await request.receive()
        read = True
        data = await packed.body()
        try:
            body = await asyncio.to_thread(decompress, data, bound)
        except Refused as error:
            # FastAPI passes on no other error of a body that it reads.
            raise HTTPException(error.status, str(error)) from error
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(request.scope, receive)


async def whole(request: Request, bound: int) -> bytes:
    """The body, for handlers that read it by themselves."""
    try:
        return await plain(request, bound).body()
    except ClientDisconnect as error:
        raise ClientGone from error


def few(gateway: Gateway, size: int) -> AbstractAsyncContextManager[object]:
    """Within it a body of `size` bytes may be decoded; whoever brings a large one waits for its turn."""
    if size >= LARGE_BYTES:
        return gateway.large
    return nullcontext()


async def beside(size: int, work: Callable[[], T]) -> T:
    """What `work` makes of `size` bytes: in a thread, unless they are so few that the way there would take longer."""
    return work() if size < SMALL_BYTES else await asyncio.to_thread(work)


def message(body: bytes, kind: type[M]) -> M:
    """Blocks. Raises Refused (422), with every fault in words."""
    try:
        return kind.model_validate(parsed(body))
    except ValidationError as error:
        raise Invalid(explain(error)) from error


def is_protobuf(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == PROTOBUF


def takes_protobuf(request: Request) -> bool:
    """Whoever names it can read it, and it is the exact one of the two."""
    return PROTOBUF in _accepted(request.headers.get("accept", ""))


def written(value: Mapping[str, Any]) -> bytes:
    """As JSON; what is not finite becomes null."""
    return pydantic_core.to_json(value, inf_nan_mode="null")


async def answer(
    request: Request, body: bytes, media_type: str = "application/json", headers: Mapping[str, str] | None = None
) -> Response:
    """200 with the body, compressed where it is long and the client takes that."""
    sent = dict(headers or {})
    if len(body) >= COMPRESS_BYTES and "zstd" in _accepted(request.headers.get("accept-encoding", "")):
        body = await asyncio.to_thread(compress, body)
        sent |= {"content-encoding": "zstd", "vary": "accept-encoding"}
    return Response(body, media_type=media_type, headers=sent)


def _accepted(header: str) -> set[str]:
    """The names of an Accept header, without those that it rules out."""
    found = set()
    for part in header.split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((piece[2:].strip() for piece in parameters if piece.startswith("q=")), "1")
        if quality.rstrip("0") not in ("", "0."):
            found.add(name)
    return found
