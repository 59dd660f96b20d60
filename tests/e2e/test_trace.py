"""One trace from the request to the moved alias, as an OTLP collector sees it from all seven services."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
from mint_schemas import Envelope, headers_for
from mint_schemas.cloudevents import run_id_for
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from cli.stack.services import SERVICES
from tests.e2e.conftest import FP32
from tests.stacks import LETTERS, StackProcess, write_prompts
from tests.tiny import TINY_NAME, TINY_TOKEN


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


def test_a_request_on_the_bus_continues_its_publishers_trace(traced_stack: StackProcess, collector: Collector) -> None:
    """From the publisher's own span to the moved alias, hop by hop, with nothing hanging loose."""
    trace_id, client = secrets.token_hex(16), secrets.token_hex(8)
    run = _published(traced_stack, f"00-{trace_id}-{client}-01")
    assert run["promoted"], run["outcome"]
    spans = _when_published(collector, trace_id, "mint.v1.alias.moved")
    known = {span.span_id.hex() for _, span in spans}
    assert {span.parent_span_id.hex() for _, span in spans} - known == {client}

    names = {span.span_id: (service, span.name) for service, span in spans}
    edges = {(names.get(span.parent_span_id, ("client", "")), names[span.span_id]) for _, span in spans}
    moved = {(parent[0], *child) for parent, child in edges}
    assert ("client", "catalog", "bus consume mint.v1.train.requested") in moved
    work = {"update": ("learner", "policy.updated"), "export": ("exporter", "revision.exported")}
    for kind, (worker, fact) in work.items():
        consumed = (worker, f"bus consume mint.v1.{kind}.requested")
        assert (("catalog", f"bus publish mint.v1.{kind}.requested"), consumed) in edges
        assert (consumed, (worker, f"job {kind}")) in edges
        published = (worker, f"bus publish mint.v1.{fact}")
        assert (consumed, published) in edges
        assert (published, ("catalog", f"bus consume mint.v1.{fact}")) in edges
    assert any(child == ("catalog", "bus publish mint.v1.alias.moved") for _, child in edges)


def test_the_logs_of_a_run_name_its_trace_and_run(traced_stack: StackProcess) -> None:
    trace_id = secrets.token_hex(16)
    run = _published(traced_stack, f"00-{trace_id}-{secrets.token_hex(8)}-01")
    for part in ("catalog", "learner", "exporter"):
        text = (traced_stack.data / "logs" / f"{part}.log").read_text()
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        assert len(lines) == len(text.splitlines()), part
        ours = [line for line in lines if line.get("run_id") == run["run_id"]]
        assert ours, part
        assert {(line["trace_id"], line["service"]) for line in ours} == {(trace_id, part)}


def test_each_service_has_metrics(traced_stack: StackProcess) -> None:
    parts = traced_stack.status()["services"]
    for name in SERVICES:
        answer = httpx.get(f"http://127.0.0.1:{parts[name]['port']}/metrics", trust_env=False)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain")
        samples = [line.split(" ") for line in answer.text.splitlines() if line.startswith("mint_")]
        assert [float(value) for *_, value in samples], name
        assert "# TYPE mint_bus_handled_total counter" in answer.text, name


def _published(stack: StackProcess, traceparent: str) -> dict[str, Any]:
    """An SFT of one step, asked for on the bus within `traceparent`; its final view."""
    type_, event_id = "mint.v1.train.requested", secrets.token_hex(8)
    data = {"kind": "task", "task": {"kind": "arithmetic"}}
    method = {"kind": "sft", "steps": 1, "batch_size": 2, "data": data}
    body = {"policy": f"acme/traced-{event_id}", "base": TINY_NAME, "method": method}

    async def publish() -> None:
        client = await nats.connect(stack.nats_url)
        headers = headers_for(Envelope(type_, "test", event_id, traceparent=traceparent))
        await client.jetstream().publish(f"{type_}.{TINY_TOKEN}", json.dumps(body).encode(), headers=headers)
        await client.close()

    asyncio.run(publish())
    return _ended(stack, run_id_for("test", event_id))


def _ended(stack: StackProcess, run_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while True:
        done = stack.mint("run", "show", run_id, "--json", check=False)
        run: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"state": done.stderr}
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
