"""Publishing: every message is stored on a named stream, once per id within the dedupe window.

In: a contract's type, an id and a body. Out: a `PubAck` that was checked. Invariant: a publish that
returns is on disk; one that no stream took is an error, never silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import nats.errors
from faststream.nats import NatsBroker
from mint_schemas import Envelope, headers_for
from mint_schemas.registry import contract_for
from nats.js.errors import APIError, NoStreamResponseError
from pydantic import BaseModel, ValidationError

from shared.errors import Fatal, Retryable
from shared.telemetry import SpanKind, current_traceparent, span, spans
from shared.telemetry.metrics import BUS_DEAD, BUS_PUBLISHED
from shared.validation import explain

from .received import DEAD_REASON, DEAD_SIZE, DEAD_SUBJECT, MAX_BODY
from .table import DEAD, dead_subject

__all__ = ["Publisher", "Stored"]

_MAX_DEAD_HEADERS = 16 * 1024
_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Stored:
    """`duplicate`: the stream had this id already and stored nothing new."""

    stream: str
    sequence: int
    duplicate: bool


class Publisher:
    def __init__(self, broker: NatsBroker) -> None:
        self._broker = broker

    async def publish(
        self,
        type: str,
        id: str,
        source: str,
        token: str,
        body: BaseModel | Mapping[str, Any],
        subject: str | None = None,
        traceparent: str | None = None,
        replay: int | None = None,
    ) -> Stored:
        """Publish one event or command. `subject` is the CloudEvents subject; `traceparent` the parent of
        its span (default: the current one); `replay` n marks a deliberate re-publication.

        Raises Fatal for an unknown type, a body that breaks its contract or is 64 KiB or more, and
        Retryable when the bus does not answer or no stream listens."""
        try:
            contract = contract_for(type)
            payload = encode(contract.body, body)
        except ValidationError as error:
            raise Fatal(f"refusing to publish {type}: {'; '.join(explain(error))}") from error
        except ValueError as error:
            raise Fatal(f"refusing to publish: {error}") from error
        if len(payload) >= MAX_BODY:
            raise Fatal(
                f"{type} {id} has a body of {len(payload)} bytes and less than {MAX_BODY} is allowed; "
                "put the data into the object store and send its reference"
            )
        with span(f"{spans.PUBLISH} {type}", traceparent, SpanKind.PRODUCER, {"mint.ce_id": id}):
            envelope = Envelope(type, source, id, subject, traceparent=current_traceparent())
            stored = await self._store(contract.subject(token), payload, headers_for(envelope, replay), contract.stream)
        BUS_PUBLISHED.labels(type).inc()
        return stored

    async def bury(
        self, durable: str, subject: str, headers: Mapping[str, str], body: bytes, sequence: str, reason: str
    ) -> None:
        """Store a dead letter: the original headers and body, with why and from where. Of what is too
        long to be ours, the beginning. Buried twice is stored once. Raises Retryable when the bus does
        not take it."""
        kept = _bounded(headers)
        kept.setdefault("Nats-Msg-Id", f"dead|{sequence}")
        kept |= {DEAD_REASON: reason[:2000], DEAD_SUBJECT: subject}
        if len(body) > MAX_BODY:
            kept[DEAD_SIZE] = str(len(body))
        await self._store(dead_subject(subject), body[:MAX_BODY], kept, DEAD)
        BUS_DEAD.labels(durable).inc()

    async def _store(self, subject: str, payload: bytes, headers: dict[str, str], stream: str) -> Stored:
        try:
            ack = await self._broker.publish(payload, subject, headers, stream=stream, timeout=_TIMEOUT_S)
        except NoStreamResponseError as error:
            raise Retryable(
                f"no stream listens on {subject}; provision the bus with `python -m shared.bus.provision`"
            ) from error
        except APIError as error:
            raise Retryable(f"stream {stream} did not take {subject}: {error.description or error}") from error
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise Retryable(f"the bus did not confirm {subject}: {type(error).__name__} {error}") from error
        if ack.stream != stream:
            raise Fatal(f"{subject} was stored on {ack.stream}, not on {stream}; the streams overlap")
        return Stored(ack.stream, int(ack.seq), bool(ack.duplicate))


def _bounded(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that a dead letter keeps. The server closes the connection, for good, over a message
    that is longer than it allows, and the dead letter is longer than what it tells of."""
    kept, room = {}, _MAX_DEAD_HEADERS
    for key, value in sorted(headers.items(), key=lambda header: not header[0].lower().startswith("ce-")):
        size = len(key.encode()) + len(value.encode())
        if size <= room and not key.lower().startswith("nats-expected-"):
            kept[key] = value
            room -= size
    return kept


def encode(model: type[BaseModel], body: BaseModel | Mapping[str, Any]) -> bytes:
    """JSON of a body that keeps its contract: no unknown fields, no NaN. Raises ValueError."""
    if isinstance(body, BaseModel):
        if not isinstance(body, model):
            raise ValueError(f"a body of {model.__name__} is expected, not {type(body).__name__}")
        return body.model_dump_json().encode()
    model.model_validate_json(json.dumps(body, allow_nan=False), extra="forbid")
    return json.dumps(body, allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode()
