"""What a handler gets: one message, decoded as far as its CloudEvents headers.

In: whatever somebody published. Out: a `Received`, or Fatal with a reason for people. Invariant: a body
that is opened is a JSON object of bounded size and depth, whose texts can be stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mint_schemas import Envelope, decode
from mint_schemas.cloudevents import MAX_NAME
from pydantic import BaseModel, ValidationError

from shared.errors import Fatal
from shared.validation import explain

from .table import DEAD

__all__ = ["DEAD_REASON", "DEAD_SIZE", "DEAD_SUBJECT", "MAX_BODY", "Received", "json_object", "open_message"]

DEAD_REASON, DEAD_SUBJECT = "mint-dead-reason", "mint-dead-subject"
DEAD_SIZE = "mint-dead-size"
"""Bytes of the original body, on a dead letter that holds only the beginning of it."""

MAX_BODY = 64 * 1024
_MAX_DEPTH = 32
_TOO_DEEP = f"the body is nested more than {_MAX_DEPTH} levels deep"

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Received:
    """`token` is the base token (the last part of the subject), `deliveries` counts from 1, shutdowns
    and busy leases included. For a dead letter, `envelope`, `token` and `body` are the original's."""

    envelope: Envelope
    body: bytes
    token: str
    subject: str
    deliveries: int
    headers: Mapping[str, str]

    def decode(self, model: type[M]) -> M:
        """The body as its contract. Raises Fatal saying which field is wrong and how."""
        try:
            return model.model_validate_json(self.body)
        except ValidationError as error:
            raise Fatal(f"the body of {self.envelope.type} is not valid: {'; '.join(explain(error))}") from error

    @property
    def dead_reason(self) -> str:
        """Why it was dead-lettered; empty for what was not."""
        return self.headers.get(DEAD_REASON, "")


def open_message(stream: str, subject: str, headers: Mapping[str, str], body: bytes, deliveries: int) -> Received:
    """Raises Fatal with a reason for people when the message is not ours to understand. A dead letter
    is always opened, since there is nowhere further to put it."""
    token = subject.rsplit(".", 1)[-1]
    if stream == DEAD:
        return Received(_dead_envelope(headers), body, token, subject, deliveries, headers)
    try:
        envelope = decode(headers)
    except ValueError as error:
        raise Fatal(f"the message on {subject} has no usable CloudEvents headers: {error}") from error
    if subject != f"{envelope.type}.{token}":
        raise Fatal(f"ce-type is {envelope.type!r} but the subject is {subject!r}; they must agree")
    json_object(body)
    return Received(envelope, body, token, subject, deliveries, headers)


def json_object(body: bytes) -> dict[str, Any]:
    """Raises Fatal saying where the body stops being a JSON object that can be worked with."""
    if len(body) >= MAX_BODY:
        raise Fatal(
            f"the body has {len(body)} bytes and less than {MAX_BODY} is allowed; "
            "put the data into the object store and send its reference"
        )
    try:
        value = json.loads(body)
    except RecursionError:
        raise Fatal(_TOO_DEEP) from None
    except ValueError as error:
        raise Fatal(f"the body is not JSON: {error}; it begins with {body[:60]!r}") from error
    if not isinstance(value, dict):
        raise Fatal(f"the body is a JSON {type(value).__name__}; an object is expected")
    if _deeper_than(_MAX_DEPTH, value):
        raise Fatal(_TOO_DEEP)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Fatal(f"the body holds half a character: {error.object[error.start]!r} cannot stand alone") from error
    return value


def _deeper_than(levels: int, value: Any) -> bool:
    """Level by level: a recursion would end where the question begins."""
    layer = [value]
    for _ in range(levels):
        inner: list[Any] = []
        for item in layer:
            inner += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        layer = inner
    return any(isinstance(item, dict | list) for item in layer)


def _dead_envelope(headers: Mapping[str, str]) -> Envelope:
    try:
        return decode(headers)
    except ValueError:
        found = {key.lower(): value for key, value in headers.items()}
        type_ = headers.get(DEAD_SUBJECT, "unknown").rsplit(".", 1)[0]
        source, id_ = found.get("ce-source", ""), found.get("ce-id", "")
        if source and id_ and len(source) <= MAX_NAME and len(id_) <= MAX_NAME:
            return Envelope(type=type_, source=source, id=id_, time="")
        return Envelope(type=type_, source="unknown", id=headers.get("Nats-Msg-Id", "unknown"), time="")
