"""Traces: one trace from the request to the moved alias, whatever number of processes it crosses.

In: a W3C `traceparent` from a message, a request or a database row. Out: spans, exported over OTLP/HTTP
only when OTEL_EXPORTER_OTLP_ENDPOINT is set; without it ids are still made and passed on, so that logs
and messages of one run carry one trace id. `tracestate` and baggage are not passed on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

__all__ = ["SpanKind", "current_traceparent", "flush", "setup_tracing", "span"]

Attribute = str | int | float | bool

_propagator = TraceContextTextMapPropagator()
_provider = TracerProvider(shutdown_on_exit=False)


def setup_tracing(service: str, processor: SpanProcessor | None = None) -> None:
    """Once per process, before the first span. `processor` replaces the OTLP exporter (tests)."""
    global _provider
    resource = Resource.create({"service.name": service, "service.namespace": "mint"})
    _provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if processor is not None:
        _provider.add_span_processor(processor)
    elif os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))


def flush(timeout_s: float = 3.0) -> None:
    """Send what is buffered; called last at shutdown."""
    _provider.force_flush(int(timeout_s * 1000))


def current_traceparent() -> str | None:
    """The W3C header of the current span, or None outside of any."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get("traceparent")


def current_ids() -> tuple[str, str] | None:
    """(trace id, span id) in hex of the current span, or None outside of any."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)


@contextmanager
def span(
    name: str,
    traceparent: str | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, Attribute | None] | None = None,
) -> Iterator[Span]:
    """A span as the current one; its parent is `traceparent` if given (and well formed), else the
    current span. An exception marks it as failed and passes through."""
    context: Context | None = _propagator.extract({"traceparent": traceparent}, Context()) if traceparent else None
    kept = {key: value for key, value in (attributes or {}).items() if value is not None}
    tracer = _provider.get_tracer("mint")
    with tracer.start_as_current_span(name, context, kind, kept, set_status_on_exception=False) as opened:
        try:
            yield opened
        except Exception as error:
            opened.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"[:500]))
            raise
