"""Trace context in and out, and one JSON object a line."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared.telemetry import current_traceparent, log, log_fields, setup_tracing, span
from shared.telemetry import tracing as tracing_module
from shared.telemetry.logs import JsonFormatter

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    exporter, before = InMemorySpanExporter(), tracing_module._provider
    setup_tracing("test", SimpleSpanProcessor(exporter))
    yield exporter
    tracing_module._provider = before


def test_no_span_no_traceparent() -> None:
    assert current_traceparent() is None


def test_a_span_continues_the_trace_it_is_given() -> None:
    with span("outer", PARENT):
        outer = current_traceparent() or ""
        with span("inner"):
            inner = current_traceparent() or ""
    assert outer.split("-")[1] == inner.split("-")[1] == "a" * 32
    assert len({PARENT, outer, inner}) == 3


@pytest.mark.parametrize("broken", ["", "nonsense", "00-xyz-1-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_broken_traceparent_starts_a_new_trace(broken: str) -> None:
    with span("outer", broken):
        made = current_traceparent()
    assert made is not None
    assert "0" * 32 not in made


def test_a_given_parent_wins_over_the_current_span() -> None:
    with span("current"), span("other", PARENT):
        assert (current_traceparent() or "").split("-")[1] == "a" * 32


def test_failures_are_marked_and_pass_through(exported: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="why"), span("fails", attributes={"kept": 1, "dropped": None}):
        raise ValueError("why")
    (ended,) = exported.get_finished_spans()
    assert (ended.status.is_ok, ended.status.description) == (False, "ValueError: why")
    assert dict(ended.attributes or {}) == {"kept": 1}
    assert ended.resource.attributes["service.name"] == "test"


def test_log_lines_are_json_with_trace_and_run() -> None:
    stream = io.StringIO()
    logger = logging.getLogger("test.logs")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("rollout"))
    logger.addHandler(handler)
    logger.propagate = False
    with span("work", PARENT), log_fields(run_id="r1", nothing=None), log_fields(step=3):
        log(logger, logging.WARNING, 'a "quoted" line\nwith two', reward=0.5)
    try:
        raise RuntimeError("no")
    except RuntimeError:
        logger.exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    expected: dict[str, Any] = {
        "level": "warning",
        "service": "rollout",
        "logger": "test.logs",
        "message": 'a "quoted" line\nwith two',
        "trace_id": "a" * 32,
        "run_id": "r1",
        "step": 3,
        "reward": 0.5,
    }
    assert expected.items() <= first.items()
    assert "nothing" not in first
    assert "RuntimeError: no" in second["error"]
    assert "run_id" not in second
