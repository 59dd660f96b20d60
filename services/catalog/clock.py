"""The catalog's clock: every lease, deadline and timestamp goes by it, so that tests can turn it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], float]

wall: Clock = time.time


def iso(at: float) -> str:
    """Seconds since the epoch → RFC 3339 in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def iso_or_none(at: float | None) -> str | None:
    return None if at is None else iso(at)
