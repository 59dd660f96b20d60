"""/mint/v1/runs/{id}/rollouts/{step}: the samples a step learned from, by the record that its journal names."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

from services.gateway.mint_v1.rollouts import RECORDS_KEPT, TEXT_CHARS
from shared.catalog import api
from shared.rl.record import Group, RolloutRecord, Trajectory
from tests.unit.gateway.kit import BASE, BASE_SHA256, CODEC, Kit, run_view

TASK = {"kind": "arithmetic"}


def _request(**method: Any) -> dict[str, Any]:
    return {"policy": "acme/adder", "base": BASE, "method": {"kind": "grpo", "task": TASK, "steps": 12, **method}}


def _trajectory(text: str, reward: float) -> Trajectory:
    ids = tuple(CODEC.encode(text))
    return Trajectory(token_ids=ids, logprobs=(-0.5,) * len(ids), reward=reward, finish_reason="stop", text=text)


def _group(number: int, rewards: list[float], prompt: str = "") -> Group:
    ids = tuple(CODEC.encode(f"<|im_start|>What is {number}+1?<|im_end|>"))
    trajectories = tuple(_trajectory(f"g{number} s{place}", reward) for place, reward in enumerate(rewards))
    given: dict[str, Any] = {"prompt": prompt} if prompt else {}
    return Group(prompt_id=f"p{number}", prompt_ids=ids, answer=str(number + 1), trajectories=trajectories, **given)


def _record(step: int, *groups: Group) -> RolloutRecord:
    return RolloutRecord(
        run_id="r1",
        step=step,
        policy="acme/adder",
        base=BASE,
        base_sha256=BASE_SHA256,
        revision="acme/adder@1",
        adapter_sha256="1" * 64,
        temperature=0.6,
        max_tokens=4,
        task_sha256="e" * 64,
        seed=0,
        groups=groups,
    )


async def _committed(kit: Kit, request: dict[str, Any], *records: RolloutRecord) -> None:
    kit.catalog.run_views["r1"] = run_view("r1", request)
    for record in records:
        ref = await kit.store.put(f"attempts/r1/rollout-{record.step}/a/record.json.gz", record.to_bytes())
        body = {"step": record.step, "record": ref.model_dump()}
        entry = api.JournalEntry(seq=record.step, at="", type="mint.v1.rollout.completed", body=body)
        kit.catalog.entries.append(entry)


async def _get(kit: Kit, step: int, status: int = 200, **query: Any) -> Any:
    async with kit.http() as http:
        answer = await http.get(f"/mint/v1/runs/r1/rollouts/{step}", params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_step_shows_prompts_completions_rewards_advantages_and_lengths(kit: Kit) -> None:
    await _committed(kit, _request(), _record(2, _group(1, [1.0, 0.0, 0.0, 1.0]), _group(2, [0.5, 0.5], "as asked")))
    page = await _get(kit, 2)
    assert (page["step"], page["record_step"], page["revision"], page["temperature"]) == (2, 2, "acme/adder@1", 0.6)
    assert (page["groups"], page["total"], page["reward_mean"], page["next_cursor"]) == (2, 6, 0.5, None)
    first = page["items"][0]
    # mean 0.5, std (ddof 1) sqrt(1/3): (1 − 0.5)/(0.57735 + 1e-4)
    assert first["advantage"] == pytest.approx(0.5 / (3**-0.5 + 1e-4), rel=1e-12)
    assert {**first, "advantage": 0} == {
        "group": 0,
        "sample": 0,
        "prompt_id": "p1",
        "prompt": "What is 1+1?",
        "answer": "2",
        "completion": "g1 s0",
        "reward": 1.0,
        "advantage": 0,
        "tokens": 5,
        "finish_reason": "stop",
        "text_cut": False,
    }
    assert [item["prompt"] for item in page["items"][4:]] == ["as asked", "as asked"]
    assert [item["advantage"] for item in page["items"][4:]] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("mode", "advantage"), [("std", 0.75 / (0.5 + 1e-4)), ("no_std", 0.75), ("leave_one_out", 1.0)]
)
async def test_advantages_are_those_of_the_runs_method(kit: Kit, mode: str, advantage: float) -> None:
    # mean 0.25, std (ddof 1) sqrt((0.75² + 3·0.25²)/3) = 0.5, mean of the others 0
    await _committed(kit, _request(advantage=mode), _record(1, _group(1, [1.0, 0.0, 0.0, 0.0])))
    assert (await _get(kit, 1))["items"][0]["advantage"] == pytest.approx(advantage, rel=1e-12)


async def test_a_group_without_a_baseline_has_no_advantages(kit: Kit) -> None:
    await _committed(kit, _request(), _record(1, _group(1, [1.0])))
    assert (await _get(kit, 1))["items"][0]["advantage"] is None


async def test_worst_and_best_are_by_reward_and_pages_join_up(kit: Kit) -> None:
    await _committed(kit, _request(), _record(1, _group(1, [0.5, 1.0, 0.0]), _group(2, [1.0, 0.0, 0.5])))
    for order, rewards in (("worst", [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]), ("best", [1.0, 1.0, 0.5, 0.5, 0.0, 0.0])):
        items, cursor = list[Any](), None
        while True:
            query = {"cursor": cursor} if cursor else {}
            page = await _get(kit, 1, order=order, limit=2, **query)
            assert len(page["items"]) == 2
            items += page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert [item["reward"] for item in items] == rewards
        places = [(item["group"], item["sample"]) for item in items]
        # Equal rewards stay as they were sampled.
        assert all(one < two for one, two in zip(places[::2], places[1::2], strict=True))
        assert len(set(places)) == 6
    assert (await _get(kit, 1, cursor="6"))["items"] == []


async def test_steps_of_one_record_show_the_same_record(kit: Kit) -> None:
    request = _request(epochs=2, minibatches=2)
    await _committed(kit, request, _record(1, _group(1, [1.0, 0.0])), _record(5, _group(5, [1.0, 0.0])))
    for step, record_step in ((1, 1), (2, 1), (4, 1), (5, 5), (8, 5)):
        page = await _get(kit, step)
        assert (page["step"], page["record_step"]) == (step, record_step)
        assert page["items"][0]["prompt_id"] == f"p{record_step}"
    missing = await _get(kit, 9, status=404)
    assert missing["error"]["message"] == "step 9 of run r1 has no rollout record; steps 1–8 have one"


async def test_a_step_without_a_record_names_those_that_have_one(kit: Kit) -> None:
    await _committed(kit, _request(), *(_record(step, _group(1, [1.0, 0.0])) for step in (1, 2, 4)))
    assert "steps 1–2, 4 have one" in (await _get(kit, 3, status=404))["error"]["message"]
    sft = {"policy": "acme/adder", "base": BASE, "method": {"kind": "sft"}}
    kit.catalog.run_views["r1"], kit.catalog.entries = run_view("r1", sft), []
    assert "none of its steps has one (method sft)" in (await _get(kit, 1, status=404))["error"]["message"]


async def test_long_texts_are_cut_and_say_so(kit: Kit) -> None:
    group = _group(1, [1.0, 0.0], prompt="x" * (TEXT_CHARS + 1))
    await _committed(kit, _request(), _record(1, group))
    item = (await _get(kit, 1))["items"][0]
    assert len(item["prompt"]) == TEXT_CHARS
    assert item["text_cut"]


@pytest.mark.parametrize(
    "query", [{"limit": 101}, {"limit": 0}, {"order": "middling"}, {"cursor": "x"}, {"cursor": "-1"}]
)
async def test_what_is_not_allowed_is_said(kit: Kit, query: dict[str, Any]) -> None:
    await _committed(kit, _request(), _record(1, _group(1, [1.0, 0.0])))
    body = await _get(kit, 1, status=400 if "cursor" in query else 422, **query)
    assert next(iter(query)) in body["error"]["message"]


DAMAGED = gzip.compress(b"x" * 9, mtime=0)[:10] + b"\xff" * 20


@pytest.mark.parametrize("data", [b"no gzip", DAMAGED, gzip.compress(b"{}")[:-9]], ids=["none", "damaged", "cut"])
async def test_a_record_that_cannot_be_read_is_named(kit: Kit, data: bytes) -> None:
    ref = await kit.store.put("attempts/r1/rollout-1/a/record.json.gz", data)
    body = {"step": 1, "record": ref.model_dump()}
    kit.catalog.run_views["r1"] = run_view("r1", _request())
    kit.catalog.entries = [api.JournalEntry(seq=1, at="", type="mint.v1.rollout.completed", body=body)]
    failed = await _get(kit, 1, status=500)
    assert "record of step 1 of run r1 cannot be read" in failed["error"]["message"]


async def test_the_records_looked_at_last_are_read_once(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    get = kit.store.get

    async def counted(ref: Any) -> bytes:
        reads.append(ref.key.split("/")[2])
        return await get(ref)

    monkeypatch.setattr(kit.store, "get", counted)
    # A prompt of this test's own, so that no other test has shown these records.
    await _committed(kit, _request(), *(_record(step, _group(step, [1.0, 0.0], "read once")) for step in range(1, 7)))
    for _ in range(2):
        first = await _get(kit, 1, limit=1)
        second = await _get(kit, 1, limit=1, cursor=first["next_cursor"], order="best")
        assert (first["items"][0]["sample"], second["items"][0]["sample"]) == (0, 1)
    assert reads == ["rollout-1"]
    for step in range(2, RECORDS_KEPT + 1):
        await _get(kit, step)
    await _get(kit, 1)
    await _get(kit, RECORDS_KEPT + 1)
    assert len(reads) == RECORDS_KEPT + 1
    await _get(kit, 1)
    assert len(reads) == RECORDS_KEPT + 1, "the one that was looked at later is kept"
    await _get(kit, 2)
    assert reads[-1] == "rollout-2"
    assert len(reads) == RECORDS_KEPT + 2


async def test_another_tenants_samples_do_not_exist(kit: Kit) -> None:
    await _committed(kit, _request(), _record(1, _group(1, [1.0, 0.0])))
    kit.catalog.run_views["r1"] = run_view("r1", _request() | {"policy": "beta/secret"})
    async with kit.http("key-acme") as http:
        foreign = await http.get("/mint/v1/runs/r1/rollouts/1")
        unknown = await http.get("/mint/v1/runs/r2/rollouts/1")
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text.replace("r1", "r2") == unknown.text


async def test_openapi_describes_the_samples(kit: Kit) -> None:
    described = kit.app.openapi()
    route = described["paths"]["/mint/v1/runs/{run_id}/rollouts/{step}"]["get"]
    assert {parameter["name"] for parameter in route["parameters"]} == {"run_id", "step", "order", "limit", "cursor"}
    assert "RolloutPage" in str(route["responses"]["200"])
    assert set(described["components"]["schemas"]["RolloutSample"]["properties"]) >= {"advantage", "tokens", "reward"}
