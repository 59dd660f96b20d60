"""Structured logs: one JSON object a line on stderr, with the trace and run that it belongs to.

`log_fields(run_id=…)` adds fields to every line that is logged inside it, in this task and those that
it starts. Keyword fields of a call go under `extra={"fields": {...}}`, or through `log(…)`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from .tracing import current_ids

__all__ = ["log", "log_fields", "setup_logging"]

_fields: ContextVar[dict[str, Any] | None] = ContextVar("log_fields", default=None)


class JsonFormatter(logging.Formatter):
    """`ts`, `level`, `service`, `logger`, `message`, then trace, context and call fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if ids := current_ids():
            line["trace_id"], line["span_id"] = ids
        line |= _fields.get() or {}
        line |= getattr(record, "fields", None) or {}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def setup_logging(service: str, level: str = "INFO") -> None:
    """Once per process: replaces the root handlers; chatty libraries speak from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for name in ("httpx", "httpcore", "botocore", "boto3", "urllib3", "nats", "faststream", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def log_fields(**fields: Any) -> Iterator[None]:
    """Adds the fields that are not None to every line logged inside."""
    kept = {key: value for key, value in fields.items() if value is not None}
    token = _fields.set((_fields.get() or {}) | kept)
    try:
        yield
    finally:
        _fields.reset(token)


def log(logger: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """One line with fields of its own."""
    logger.log(level, message, extra={"fields": fields})
