"""One trace from the request to the moved alias, as an OTLP collector sees it from all seven services."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from cli.stack.services import SERVICES
from tests.e2e.conftest import FP32
from tests.stacks import LETTERS, StackProcess, write_prompts
from tests.tiny import TINY_NAME


class Collector:
    """Keeps every span that is sent to it, by trace id, each with the service that it came from."""

    def __init__(self) -> None:
        self.traces: dict[str, list[tuple[str, Span]]] = {}
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self, trace_id: str) -> list[tuple[str, Span]]:
        with self._lock:
            return list(self.traces.get(trace_id, []))

    def _take(self, request: ExportTraceServiceRequest) -> None:
        with self._lock:
            for resource in request.resource_spans:
                named = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self.traces.setdefault(span.trace_id.hex(), []).append((named["service.name"], span))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


@pytest.fixture(scope="module")
def traced_stack(tmp_path_factory: pytest.TempPathFactory, bases: Path, collector: Collector) -> Iterator[StackProcess]:
    exporting = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    found = StackProcess(tmp_path_factory.mktemp("traced") / "data", "transformers", bases, FP32 | exporting)
    try:
        yield found.up()
    finally:
        found.down()


def test_one_trace_through_all_services(traced_stack: StackProcess, collector: Collector, tmp_path: Path) -> None:
    """nats-server#7564, argo-events#2163: no hop starts a trace of its own or hangs off the origin."""
    data = traced_stack.mint_json("data", "put", str(write_prompts(tmp_path / "prompts.jsonl")), "--tenant", "acme")
    task = {"kind": "jsonl", "data": data, "reward": LETTERS}
    method = {"kind": "grpo", "steps": 2, "task": task, "prompts_per_step": 4, "group_size": 4, "max_tokens": 4}
    evaluation = {"task": task, "items": 4, "max_tokens": 4, "gate": {"at_least": -1.0}}
    request = {"policy": "acme/traced", "base": TINY_NAME, "method": method, "evaluation": evaluation}
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(request))
    run_id = traced_stack.mint_json("train", str(spec))["run_id"]
    run = _ended(traced_stack, run_id)
    assert run["promoted"], run["outcome"]
    trace_id = run["traceparent"].split("-")[1]
    spans = _when_published(collector, trace_id, "mint.v1.alias.moved")

    assert {service for service, _ in spans} == set(SERVICES)
    of = {span.span_id: (service, span) for service, span in spans}
    assert [s.name for _, s in spans if s.parent_span_id and s.parent_span_id not in of] == []
    crossed = {
        (of[span.parent_span_id][0], service)
        for service, span in spans
        if span.parent_span_id and of[span.parent_span_id][0] != service
    }
    expected = {("gateway", "catalog"), ("rollout", "serving"), ("evaluator", "serving")}
    expected |= {("catalog", worker) for worker in ("rollout", "learner", "exporter", "evaluator")}
    expected |= {(worker, "catalog") for worker in ("rollout", "learner", "exporter", "evaluator")}
    assert expected <= crossed


def _ended(stack: StackProcess, run_id: str) -> dict[str, object]:
    deadline = time.monotonic() + 120
    while True:
        run: dict[str, object] = stack.mint_json("run", "show", run_id)
        if run["state"] in ("completed", "failed", "cancelled"):
            return run
        assert time.monotonic() < deadline, run
        time.sleep(0.5)


def _when_published(collector: Collector, trace_id: str, fact: str) -> list[tuple[str, Span]]:
    """The trace's spans once the publication of `fact` is among them and no more come."""
    deadline, before = time.monotonic() + 30, -1
    while True:
        spans = collector.spans(trace_id)
        if len(spans) == before and any(fact in span.name for _, span in spans):
            return spans
        assert time.monotonic() < deadline, sorted({f"{service}: {span.name}" for service, span in spans})
        before = len(spans)
        time.sleep(1.0)
