"""Traces, logs and metrics. Span names live in `spans`, metrics in `metrics`, and nowhere else."""

from .logs import log, log_fields, setup_logging
from .tracing import SpanKind, current_traceparent, flush, setup_tracing, span

__all__ = ["SpanKind", "current_traceparent", "flush", "log", "log_fields", "setup_logging", "setup_tracing", "span"]
