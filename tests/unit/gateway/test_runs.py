"""/mint/v1/runs: submitting, following and ending a run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from mint_schemas.cloudevents import run_id_for
from mint_schemas.training import TrainRequested

from shared.catalog import api
from shared.errors import Retryable
from tests.unit.gateway.kit import BASE, Kit, run_view

TASK = {"kind": "arithmetic"}
REQUEST: dict[str, Any] = {
    "policy": "acme/adder",
    "base": BASE,
    "method": {"kind": "sft", "data": {"kind": "task", "task": TASK}, "steps": 8},
}


async def test_a_submitted_run_is_published_as_the_event_that_products_send(kit: Kit) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with kit.http("key-root") as http:
        answer = await http.post("/mint/v1/runs", json=REQUEST, headers={"traceparent": trace})
    assert answer.status_code == 202
    body = answer.json()
    (event,) = kit.bus.published
    assert (event["type"], event["source"], event["token"]) == (
        "mint.v1.train.requested",
        "mint/gateway",
        "smollm2-135m",
    )
    assert event["subject"] == "acme/adder"
    assert TrainRequested.model_validate(event["body"]) == TrainRequested.model_validate(REQUEST)
    assert event["traceparent"].split("-")[1] == trace.split("-")[1]
    assert body["run_id"] == run_id_for("mint/gateway", event["id"])
    assert (body["request_source"], body["request_id"]) == ("mint/gateway", event["id"])
    assert body["state"] == "accepted"
    assert body["resolved"] == {"parent": "acme/adder@2"}
    assert answer.headers["location"] == f"/mint/v1/runs/{body['run_id']}"


async def test_the_answer_waits_until_the_run_can_be_read() -> None:
    kit = Kit(gateway_run_visible_s=5)

    def read(event: dict[str, Any]) -> None:
        run_id = run_id_for("mint/gateway", event["id"])
        kit.catalog.run_views[run_id] = run_view(run_id, REQUEST, "queued")

    kit.bus.on_publish = read
    async with kit.http() as http:
        run = (await http.post("/mint/v1/runs", json=REQUEST)).json()
        assert run["state"] == "queued"
        assert (await http.get(f"/mint/v1/runs/{run['run_id']}")).json()["state"] == "queued"


async def test_an_idempotency_key_is_the_events_id_and_names_one_run(kit: Kit) -> None:
    async with kit.http() as http:
        first = (await http.post("/mint/v1/runs", json=REQUEST, headers={"Idempotency-Key": "k-1"})).json()
        assert kit.bus.published[0]["id"] == "k-1"
        kit.catalog.run_views[first["run_id"]] = run_view(first["run_id"], REQUEST)
        again = await http.post("/mint/v1/runs", json=REQUEST, headers={"Idempotency-Key": "k-1"})
        other = await http.post("/mint/v1/runs", json=REQUEST | {"seed": 3}, headers={"Idempotency-Key": "k-1"})
    assert again.json()["run_id"] == first["run_id"]
    assert len(kit.bus.published) == 1
    assert other.status_code == 409
    assert "another body" in other.json()["error"]["message"]


async def test_of_two_bodies_at_once_with_one_key_the_second_is_told() -> None:
    kit = Kit(gateway_run_visible_s=5)
    run_id = run_id_for("mint/gateway", "k-1")

    def kept_the_first(event: dict[str, Any]) -> None:
        kit.catalog.run_views[run_id] = run_view(run_id, REQUEST)

    kit.bus.on_publish = kept_the_first
    async with kit.http() as http:
        answer = await http.post("/mint/v1/runs", json=REQUEST | {"seed": 9}, headers={"Idempotency-Key": "k-1"})
    assert answer.status_code == 409


async def test_two_tenants_may_choose_the_same_idempotency_key(kit: Kit) -> None:
    ids = []
    for key in ("key-acme", "key-root"):
        async with kit.http(key) as http:
            ids.append((await http.post("/mint/v1/runs", json=REQUEST, headers={"Idempotency-Key": "1"})).json())
    assert ids[0]["run_id"] != ids[1]["run_id"]


@pytest.mark.parametrize("key", ["", "a b", "é".encode(), "x" * 201])
async def test_a_bad_idempotency_key_is_refused(kit: Kit, key: Any) -> None:
    async with kit.http() as http:
        answer = await http.post("/mint/v1/runs", json=REQUEST, headers={b"Idempotency-Key": key})
    assert answer.status_code == 422
    assert kit.bus.published == []


async def test_a_dry_run_validates_and_publishes_nothing(kit: Kit) -> None:
    async with kit.http() as http:
        good = await http.post("/mint/v1/runs", json=REQUEST | {"dry_run": True})
        kit.catalog.errors = ["lora.rank: 64 is above the learner's 32"]
        bad = await http.post("/mint/v1/runs", json=REQUEST | {"dry_run": True})
    assert good.status_code == 200
    assert good.json()["dry_run"] is True
    assert good.json()["run_id"] is None
    assert good.json()["resolved"] == {"parent": "acme/adder@2"}
    assert bad.status_code == 422
    assert bad.json()["error"]["errors"] == ["lora.rank: 64 is above the learner's 32"]
    assert kit.bus.published == []


async def test_what_the_catalog_refuses_is_said_in_full_and_not_published(kit: Kit) -> None:
    kit.catalog.errors = ["base: unknown", "lora.target_modules: 'foo' is no module"]
    async with kit.http() as http:
        answer = await http.post("/mint/v1/runs", json=REQUEST)
    assert answer.status_code == 422
    assert answer.json()["error"]["errors"] == kit.catalog.errors
    assert kit.bus.published == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": "acme/../x"}, "policy: "),
        ({"policy": "Acme/X"}, "each part is 1 to 63"),
        ({"policy": "acme/" + "a" * 300}, "is not a reference"),
        ({"method": {"kind": "ppo", "steps": 1}}, "'sft'"),
        ({"method": {**REQUEST["method"], "steps": 0}}, "greater than or equal to 1"),
        ({"method": {"kind": "grpo", "task": TASK, "steps": 1, "group_size": 0}}, "greater than or equal to 2"),
        ({"method": {"kind": "grpo", "task": {"kind": "chess"}, "steps": 1}}, "'arithmetic'"),
        ({"method": {**REQUEST["method"], "lr": 1}}, "lr: there is no such field"),
        ({"surprise": 1}, "surprise: there is no such field"),
    ],
)
async def test_bad_requests_are_refused_at_the_edge_in_words(kit: Kit, change: dict[str, Any], words: str) -> None:
    async with kit.http() as http:
        answer = await http.post("/mint/v1/runs", json=REQUEST | change)
    assert answer.status_code == 422
    assert words in answer.json()["error"]["message"]
    assert kit.bus.published == []


async def test_a_body_that_does_not_say_it_is_json_is_told_so(kit: Kit) -> None:
    async with kit.http() as http:
        form = {"content-type": "application/x-www-form-urlencoded"}
        answer = await http.post("/mint/v1/runs", content=json.dumps(REQUEST), headers=form)
    assert answer.status_code == 422
    assert "content-type: application/json" in answer.json()["error"]["message"]


async def test_a_learning_rate_of_nan_is_refused(kit: Kit) -> None:
    method = {**REQUEST["method"], "optimizer": {"learning_rate": float("nan")}}
    text = json.dumps(REQUEST | {"method": method})
    async with kit.http() as http:
        answer = await http.post("/mint/v1/runs", content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert "learning_rate" in answer.json()["error"]["message"]


async def test_several_faults_are_all_said(kit: Kit) -> None:
    async with kit.http() as http:
        answer = await http.post("/mint/v1/runs", json={"policy": "NO", "method": REQUEST["method"], "x": 1})
    assert len(answer.json()["error"]["errors"]) == 3


async def test_a_body_that_is_no_json_is_said_so(kit: Kit) -> None:
    async with kit.http() as http:
        answer = await http.post("/mint/v1/runs", content=b"{nope", headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert "not JSON" in answer.json()["error"]["message"]


async def test_when_bus_or_catalog_is_away_the_answer_is_503(kit: Kit) -> None:
    async with kit.http() as http:
        kit.bus.failure = Retryable("the bus does not answer")
        first = await http.post("/mint/v1/runs", json=REQUEST)
        kit.catalog.down = Retryable("the catalog does not answer")
        second = await http.post("/mint/v1/runs", json=REQUEST)
    assert [first.status_code, second.status_code] == [503, 503]
    assert "retry-after" in first.headers


async def test_a_tenant_trains_its_own_policies_only(kit: Kit) -> None:
    async with kit.http("key-acme") as http:
        answer = await http.post("/mint/v1/runs", json=REQUEST | {"policy": "beta/x"})
    assert answer.status_code == 404
    assert kit.bus.published == []
    assert kit.catalog.calls == []


async def test_runs_are_listed_for_the_callers_tenant(kit: Kit) -> None:
    async with kit.http("key-acme") as http:
        await http.get("/mint/v1/runs", params={"policy": "acme/adder", "state": "running", "limit": 5})
        assert kit.catalog.calls[-1] == ("runs", ("acme", "acme/adder", "running", 5, None))
        assert (await http.get("/mint/v1/runs", params={"tenant": "beta"})).status_code == 404
        assert (await http.get("/mint/v1/runs", params={"state": "sleeping"})).status_code == 422


async def test_another_tenants_run_does_not_exist(kit: Kit) -> None:
    kit.catalog.run_views["r1"] = run_view("r1", {"policy": "beta/secret"})
    async with kit.http("key-acme") as http:
        for method, path in (
            ("GET", ""),
            ("GET", "/progress"),
            ("GET", "/journal"),
            ("POST", "/cancel"),
            ("GET", "/rollouts/1"),
        ):
            foreign = await http.request(method, f"/mint/v1/runs/r1{path}")
            unknown = await http.request(method, f"/mint/v1/runs/r2{path}")
            assert foreign.status_code == unknown.status_code == 404
            assert foreign.text.replace("r1", "r2") == unknown.text


async def test_cancel_says_who_and_why(kit: Kit) -> None:
    kit.catalog.run_views["r1"] = run_view("r1", REQUEST)
    async with kit.http() as http:
        plain = await http.post("/mint/v1/runs/r1/cancel")
        said = await http.post("/mint/v1/runs/r1/cancel", json={"reason": "wrong data"})
    assert plain.json()["state"] == "cancelled"
    assert said.json()["outcome"] == "wrong data"
    assert kit.catalog.calls[-1][1][1] == api.CancelRequest(actor="key:local", reason="wrong data")


def _events(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append(fields | {"data": json.loads(fields["data"])})
    return found


def _entry(seq: int, type_: str, **body: Any) -> api.JournalEntry:
    return api.JournalEntry(seq=seq, at="2026-01-02T03:04:05Z", type=f"mint.v1.{type_}", body=body)


async def test_progress_is_the_journal_and_ends_with_the_run(kit: Kit) -> None:
    kit.catalog.run_views["r1"] = run_view("r1", REQUEST, "completed")
    kit.catalog.entries = [_entry(4, "run.running", state="running"), _entry(9, "run.completed", state="completed")]
    async with kit.http() as http:
        answer = await http.get("/mint/v1/runs/r1/progress")
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = _events(answer.text)
        rest = _events((await http.get("/mint/v1/runs/r1/progress", headers={"Last-Event-ID": "4"})).text)
        over = _events((await http.get("/mint/v1/runs/r1/progress", headers={"Last-Event-ID": "9"})).text)
        bad = await http.get("/mint/v1/runs/r1/progress", headers={"Last-Event-ID": "x"})
    assert [(e.get("id"), e["event"]) for e in events] == [
        ("4", "mint.v1.run.running"),
        ("9", "mint.v1.run.completed"),
        (None, "end"),
    ]
    assert events[0]["data"]["body"] == {"state": "running"}
    assert events[-1]["data"]["state"] == "completed"
    assert rest == events[1:]
    assert over == events[2:]
    assert bad.status_code == 400


async def test_progress_waits_for_news_and_outlasts_a_silent_catalog() -> None:
    kit = Kit(gateway_keep_alive_s=0.02)
    kit.catalog.run_views["r1"] = run_view("r1", REQUEST)
    calls = 0
    journal = kit.catalog.journal

    async def growing(run_id: str, after: int = 0) -> list[api.JournalEntry]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Retryable("down")
        if calls == 8:
            kit.catalog.entries.append(_entry(1, "policy.updated", step=1))
        if calls == 9:
            kit.catalog.entries.append(_entry(2, "run.failed", state="failed"))
            kit.catalog.run_views["r1"] = run_view("r1", REQUEST, "failed")
        return await journal(run_id, after)

    kit.catalog.journal = growing  # type: ignore[method-assign]
    async with kit.http() as http:
        text = (await http.get("/mint/v1/runs/r1/progress")).text
    assert [event["event"].removeprefix("mint.v1.") for event in _events(text)] == [
        "policy.updated",
        "run.failed",
        "end",
    ]
    assert ": the catalog does not answer" in text
    assert ": waiting" in text
