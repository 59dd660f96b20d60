"""Consumer advisories: the net below the dead-letter middleware.

The server announces a message that reached `max_deliver` and then leaves it behind for good; here it is
buried and taken off its stream. A terminated one is gone already and is only reported.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from nats.js.errors import APIError

from shared.errors import Retryable
from shared.telemetry import log
from shared.telemetry.metrics import BUS_ADVISORIES

from .delivery import Bury
from .table import COMMANDS, DEAD

__all__ = ["ADVISORY_SUBJECTS", "Advisory", "AdvisoryHandler", "handle_advisory"]

ADVISORY_SUBJECTS = tuple(f"$JS.EVENT.ADVISORY.CONSUMER.{kind}.>" for kind in ("MAX_DELIVERIES", "MSG_TERMINATED"))

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Advisory:
    """`buried`: the message is on DEAD now, where `catalog-dead` finds it."""

    kind: Literal["max_deliveries", "terminated"]
    stream: str
    durable: str
    sequence: int
    deliveries: int
    reason: str
    buried: bool


AdvisoryHandler = Callable[[Advisory], Awaitable[None]]


async def handle_advisory(js: Any, bury: Bury, data: bytes, handler: AdvisoryHandler) -> None:
    """Bury what it is about, then tell the handler. What is no advisory of ours is ignored."""
    told = json.loads(data)
    kind: Literal["max_deliveries", "terminated"] = (
        "max_deliveries" if told["type"].endswith("max_deliver") else "terminated"
    )
    stream, durable, sequence = told["stream"], told["consumer"], int(told["stream_seq"])
    reason = told.get("reason") or f"delivered {told.get('deliveries', 0)} times without an answer"
    BUS_ADVISORIES.labels(kind).inc()
    log(_log, logging.ERROR, "consumer advisory", kind=kind, stream=stream, durable=durable, sequence=sequence)
    buried = kind == "max_deliveries" and stream != DEAD and await _bury(js, bury, stream, durable, sequence, reason)
    await handler(Advisory(kind, stream, durable, sequence, int(told.get("deliveries", 0)), reason, buried))


async def _bury(js: Any, bury: Bury, stream: str, durable: str, sequence: int, reason: str) -> bool:
    try:
        message = await js.get_msg(stream, seq=sequence)
        await bury(durable, message.subject, message.headers or {}, message.data or b"", f"{stream}|{sequence}", reason)
        if stream == COMMANDS:
            await js.delete_msg(stream, sequence)
    except (APIError, Retryable) as error:
        log(_log, logging.ERROR, "could not bury", stream=stream, sequence=sequence, error=str(error))
        return False
    return True
