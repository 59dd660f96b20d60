"""CloudEvents 1.0 in binary mode over NATS: attributes are headers, the body is the JSON data.

`Nats-Msg-Id` is ce-source + "|" + ce-id, so that JetStream stores one message per fact within its
dedupe window; consumers are idempotent beyond it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

__all__ = ["MAX_NAME", "Envelope", "decode", "headers_for", "run_id_for"]

MAX_NAME = 512
"""Characters of a ce-id or ce-source."""

RUN_NAMESPACE = uuid.UUID("8f6f2f0e-5a39-5d61-9f5e-6d1c5a0e7b11")


@dataclass(frozen=True)
class Envelope:
    """The attributes of one event. `type` is `mint.v1.<noun>.<verb>`."""

    type: str
    source: str
    id: str
    subject: str | None = None
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat().replace("+00:00", "Z"))
    traceparent: str | None = None

    @property
    def message_id(self) -> str:
        return f"{self.source}|{self.id}"


def headers_for(envelope: Envelope, replay: int | None = None) -> dict[str, str]:
    """The message headers of an event; `replay` n marks a deliberate re-publication."""
    headers = {
        "ce-specversion": "1.0",
        "ce-id": envelope.id,
        "ce-source": envelope.source,
        "ce-type": envelope.type,
        "ce-time": envelope.time,
        "content-type": "application/json",
        "Nats-Msg-Id": envelope.message_id + (f"|replay-{replay}" if replay is not None else ""),
    }
    if envelope.subject is not None:
        headers["ce-subject"] = envelope.subject
    if envelope.traceparent is not None:
        headers["traceparent"] = envelope.traceparent
    return headers


def decode(headers: Mapping[str, str] | None) -> Envelope:
    """Read the attributes back. Raises ValueError naming the header that is missing or wrong."""
    found = {k.lower(): v for k, v in (headers or {}).items()}
    for name in ("ce-specversion", "ce-id", "ce-source", "ce-type"):
        if not found.get(name):
            raise ValueError(f"header {name} is missing; send CloudEvents 1.0 in binary mode")
    if found["ce-specversion"] != "1.0":
        raise ValueError(f"ce-specversion is {found['ce-specversion']!r}; only '1.0' is understood")
    for name in ("ce-id", "ce-source"):
        if len(found[name]) > MAX_NAME:
            raise ValueError(f"header {name} has {len(found[name])} characters; at most {MAX_NAME} are allowed")
    return Envelope(
        type=found["ce-type"],
        source=found["ce-source"],
        id=found["ce-id"],
        subject=found.get("ce-subject"),
        time=found.get("ce-time", ""),
        traceparent=found.get("traceparent"),
    )


def run_id_for(source: str, event_id: str) -> str:
    """The run that a request becomes: UUIDv5 of both, so that publishing it twice is one run."""
    return str(uuid.uuid5(RUN_NAMESPACE, f"{source}|{event_id}"))
