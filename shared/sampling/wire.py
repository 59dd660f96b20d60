"""The sampling protocol between a caller and a serving replica, as both sides write and read it.

POST /internal/v1/sample?base=<public name> carries one `SampleRequest` as JSON; the answer is NDJSON: one
`served` line, `chunk` lines, and a last `done` or `error` line. A stream without a last line was cut.
Floats that JSON lacks (top-k and grammars give logprobs of -inf) travel as the strings "-Infinity",
"Infinity" and "NaN".
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from shared.engine.port import SampleChunk, SampleRequest
from shared.sampling.port import Served

__all__ = [
    "MEDIA_TYPE",
    "RESIDENCY_PATH",
    "SAMPLE_PATH",
    "ErrorCode",
    "Line",
    "WireError",
    "decode_line",
    "decode_request",
    "encode_chunk",
    "encode_done",
    "encode_error",
    "encode_request",
    "encode_served",
    "error_body",
]

SAMPLE_PATH = "/internal/v1/sample"
RESIDENCY_PATH = "/internal/v1/residency"
MEDIA_TYPE = "application/x-ndjson"

ErrorCode = Literal[
    "invalid_request",
    "unknown_revision",
    "wrong_base",
    "refused",
    "loading",
    "queue_full",
    "unavailable",
    "engine_down",
    "rate_limited",
    "internal",
]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class _Request(_Message):
    request: SampleRequest


class WireError(_Message):
    """`code` is one of `ErrorCode` (open: a reader accepts others); `message` is for people."""

    code: str
    message: str
    queue_position: int | None = None
    expected_wait_s: float | None = None


class Line(_Message):
    """One line of the answer; exactly one field is set."""

    served: Served | None = None
    chunk: SampleChunk | None = None
    done: bool = False
    error: WireError | None = None


def encode_request(request: SampleRequest) -> bytes:
    text = _Request(request=request).model_dump_json()
    return text[len('{"request":') : -1].encode()


def decode_request(body: bytes) -> SampleRequest:
    """Raises ValueError naming the first field that is wrong and what is wrong with it."""
    try:
        return _Request.model_validate_json(b'{"request":' + body + b"}").request
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or "body"
        raise ValueError(f"{field}: {first['msg']}") from None


def encode_served(served: Served) -> bytes:
    return _line(Line(served=served))


def encode_chunk(chunk: SampleChunk) -> bytes:
    return _line(Line(chunk=chunk))


def encode_done() -> bytes:
    return b'{"done":true}\n'


def encode_error(code: ErrorCode, message: str) -> bytes:
    return _line(Line(error=WireError(code=code, message=message)))


def error_body(
    code: ErrorCode, message: str, queue_position: int | None = None, expected_wait_s: float | None = None
) -> dict[str, Any]:
    """The body of an answer that never became a stream."""
    error = WireError(code=code, message=message, queue_position=queue_position, expected_wait_s=expected_wait_s)
    return {"error": error.model_dump(exclude_none=True, exclude_defaults=True)}


def decode_line(line: str | bytes) -> Line:
    """Raises ValueError for what is no line of this protocol."""
    return Line.model_validate_json(line)


def _line(line: Line) -> bytes:
    return line.model_dump_json(exclude_defaults=True).encode() + b"\n"
