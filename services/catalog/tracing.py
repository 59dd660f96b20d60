"""The W3C trace context of a run: one trace from its request to its last event.

A run keeps the traceparent of its request. Whatever the catalog sends for that run carries a context of
the same trace: the span that is current, when it belongs to that trace, else a child of the request's.
"""

from __future__ import annotations

import re
import secrets

from shared.telemetry.tracing import current_traceparent

_TRACEPARENT = re.compile(r"00-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})")


def for_run(received: str | None) -> str:
    """What a new run keeps: the request's context, else the current span's, else a fresh trace."""
    if received is not None and _TRACEPARENT.fullmatch(received):
        return received
    return current_traceparent() or f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def child_of(run_traceparent: str) -> str:
    """The context that a message of the run carries. Same trace id as `run_traceparent`."""
    match, now = _TRACEPARENT.fullmatch(run_traceparent), current_traceparent()
    if match is None:
        return now or run_traceparent
    if now is not None and now[3:35] == match["trace"]:
        return now
    return run_traceparent
