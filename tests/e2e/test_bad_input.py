"""What bad input gets, by HTTP and on the bus: a reason that says what is allowed, and no run half alive."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
from mint_schemas import Envelope, RunEnded, headers_for
from mint_schemas.cloudevents import run_id_for

from tests.e2e.bad_requests import BAD, POLICY, Refs, grpo, sft, text_of
from tests.e2e.method_specs import PAIRS
from tests.stacks import StackProcess, lines, write_prompts
from tests.tiny import TINY_NAME, TINY_TOKEN

TRAIN = "mint.v1.train.requested"
SUBJECT = f"{TRAIN}.{TINY_TOKEN}"
SOURCE = f"test/{uuid.uuid4()}"
JSON = {"content-type": "application/json"}
ENDED = ("completed", "failed", "cancelled")


@pytest.fixture(scope="module")
def http(shared_stack: StackProcess) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=shared_stack.url, headers={"authorization": "Bearer tml-dev"}, trust_env=False, timeout=60
    ) as client:
        yield client


@pytest.fixture(scope="module")
def refs(http: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> Refs:
    chat = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    prompts = write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", each=1).read_bytes()
    files = {
        "chats": f"{chat}\n".encode(),
        "broken": f"{chat}\n{chat}\n{{half\n".encode(),
        "prompts": prompts,
        "broken prompts": prompts + b"half\n",
        "pairs": PAIRS,
        "equal pairs": lines(*({"prompt": "p", "chosen": "same", "rejected": it} for it in ("other", "same"))),
    }
    found = {}
    for name, content in files.items():
        answer = http.post("/mint/v1/data", params={"tenant": "bad"}, content=content)
        found[name] = answer.raise_for_status().json()
    return found


@pytest.mark.parametrize("name", BAD)
def test_refused_by_http(http: httpx.Client, refs: Refs, name: str) -> None:
    make, words = BAD[name]
    answer = http.post("/mint/v1/runs", content=text_of(make(refs)), headers=JSON)
    assert answer.status_code == 422
    message = answer.json()["error"]["message"]
    assert [word for word in words if word not in message] == [], message


def test_nothing_of_what_http_refused_exists(http: httpx.Client) -> None:
    assert http.get("/mint/v1/runs", params={"policy": POLICY}).json()["items"] == []
    assert not [it for it in http.get("/mint/v1/policies").json()["items"] if it["policy"].startswith("bad/")]


DRY = ("name with ../", "no steps", "learning rate NaN", "learning rate 1e999", "rank of no engine", "data missing")


@pytest.mark.parametrize("name", DRY)
def test_refused_by_the_command_line(shared_stack: StackProcess, refs: Refs, tmp_path: Path, name: str) -> None:
    make, words = BAD[name]
    spec = tmp_path / "spec.json"
    spec.write_text(text_of(make(refs)))
    done = shared_stack.mint("train", str(spec), "--dry-run", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert [word for word in words if word not in done.stderr] == [], done.stderr


@dataclass
class Bus:
    """What the bus says about the requests of this module, by ce-id."""

    stream: Any
    dead: dict[str, dict[str, str]] = field(default_factory=dict)
    ended: dict[str, RunEnded] = field(default_factory=dict)

    async def send(self, id_: str, body: bytes, headers: dict[str, str] | None = None, subject: str = SUBJECT) -> None:
        whole = headers_for(Envelope(type=TRAIN, source=SOURCE, id=id_)) if headers is None else headers
        await self.stream.publish(subject, body, headers=whole, stream="COMMANDS")

    async def until(self, dead: set[str], ended: set[str], within_s: float = 60) -> None:
        deadline = asyncio.get_running_loop().time() + within_s
        while not (dead <= set(self.dead) and ended <= set(self.ended)):
            assert asyncio.get_running_loop().time() < deadline, (dead - set(self.dead), ended - set(self.ended))
            await asyncio.sleep(0.05)


@asynccontextmanager
async def bus_of(stack: StackProcess) -> AsyncIterator[Bus]:
    client = await nats.connect(stack.nats_url)
    found = Bus(client.jetstream(timeout=10))

    async def dead(message: Any) -> None:
        found.dead[message.headers.get("ce-id") or message.headers["Nats-Msg-Id"]] = message.headers

    async def ended(message: Any) -> None:
        body = RunEnded.model_validate_json(message.data)
        if body.request_source == SOURCE:
            found.ended[body.request_id] = body

    await found.stream.subscribe("mint.v1.dead.>", stream="DEAD", ordered_consumer=True, cb=dead)
    for state in ENDED:
        await found.stream.subscribe(f"mint.v1.run.{state}.*", stream="EVENTS", ordered_consumer=True, cb=ended)
    try:
        yield found
    finally:
        await client.close()


@pytest.fixture(scope="module")
def on_the_bus(shared_stack: StackProcess, refs: Refs) -> Bus:
    """Every bad request published at once, and all answers to them."""

    async def publish_all() -> Bus:
        async with bus_of(shared_stack) as bus:
            for name, (make, _) in BAD.items():
                await bus.send(name, text_of(make(refs)).encode())
            await bus.until(set(BAD), set(BAD))
            return bus

    return asyncio.run(publish_all())


@pytest.mark.parametrize("name", BAD)
def test_refused_on_the_bus(on_the_bus: Bus, http: httpx.Client, name: str) -> None:
    """One dead letter and one `run.failed` to the request's source and id; the run never began."""
    words = BAD[name][1]
    letter, ended = on_the_bus.dead[name], on_the_bus.ended[name]
    for said in (letter["mint-dead-reason"], ended.outcome):
        assert [word for word in words if word not in said] == [], said
    assert letter["mint-dead-subject"] == SUBJECT
    assert (ended.state, ended.run_id) == ("failed", run_id_for(SOURCE, name))
    run = http.get(f"/mint/v1/runs/{ended.run_id}").json()
    assert (run["state"], run["step"], run["revision"]) == ("failed", 0, None)


def nested(depth: int) -> bytes:
    return ('{"policy":' * depth + "1" + "}" * depth).encode()


MALFORMED: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{half", "the body is not JSON"),
    "empty": (b"", "the body is not JSON"),
    "no object": (b"[1, 2]", "an object is expected"),
    "no UTF-8": (b'{"policy": "\xff"}', "the body is not JSON"),
    "nested": (nested(500), "more than 32 levels deep"),
    "very nested": (nested(5000), "more than 32 levels deep"),
    "half a character": (b'{"method": {"kind": "\\ud800"}}', "half a character"),
    "line feeds in a name": (
        json.dumps({"a\r\nce-id: other\r\n\r\nb": 1}).encode(),
        r"'a\r\nce-id: other\r\n\r\nb': there is",
    ),
    "1 MB": (json.dumps(sft(colour="r" * 1_047_500)).encode(), "less than 65536 is allowed"),
    "4000 unknown fields": (json.dumps(sft() | {f"f{i}": 1 for i in range(4000)}).encode(), "no such field"),
    "number of 5000 digits": (b'{"seed": ' + b"9" * 5000 + b"}", "the body is not JSON"),
}


def test_malformed_messages_are_answered_and_the_next_request_runs(
    shared_stack: StackProcess, http: httpx.Client
) -> None:
    """nats-server#7564, argo-events#2163: a body of 1 MB must not end the connection of who buries it."""
    lost = f"no-headers-{uuid.uuid4()}"

    async def publish_all() -> Bus:
        async with bus_of(shared_stack) as bus:
            for name, (body, _) in MALFORMED.items():
                await bus.send(name, body)
            await bus.send(lost, json.dumps(sft()).encode(), {"Nats-Msg-Id": lost})
            other = headers_for(Envelope(type="mint.v1.update.requested", source=SOURCE, id="other type"))
            await bus.send("other type", json.dumps(sft()).encode(), other)
            await bus.send("unknown token", json.dumps(sft(base="no/such")).encode(), subject=f"{TRAIN}.no-such")
            await bus.send("good", json.dumps(sft(policy="good/after-bad")).encode())
            answered = {*MALFORMED, "unknown token"}
            await bus.until({*answered, lost, "other type"}, {*answered, "good"})
            return bus

    bus = asyncio.run(publish_all())
    for name, (_, words) in MALFORMED.items():
        assert words in bus.dead[name]["mint-dead-reason"]
        assert words in bus.ended[name].outcome
        assert bus.ended[name].state == "failed"
    assert "header ce-specversion is missing; send CloudEvents 1.0" in bus.dead[lost]["mint-dead-reason"]
    assert "they must agree" in bus.dead["other type"]["mint-dead-reason"]
    assert "known are" in bus.ended["unknown token"].outcome
    assert bus.ended["good"].state == "completed", bus.ended["good"].outcome
    for state in ("queued", "running", "evaluating", "promoting"):
        found = http.get("/mint/v1/runs", params={"state": state}).json()["items"]
        assert [run for run in found if run["request_source"] == SOURCE] == []


RUNAWAY = {"kind": "regex", "pattern": r"(?s)^(.|..)+(?!)"}
"""Matches nothing, and takes a time exponential in the text's length to find that out."""


def test_a_reward_that_fails_fails_the_run_and_the_policy_serves_on(
    shared_stack: StackProcess, http: httpx.Client
) -> None:
    policy = f"good/rewarded-{uuid.uuid4().hex[:8]}"
    runaway = grpo(task={"kind": "arithmetic", "reward": RUNAWAY}, max_tokens=64) | {"policy": policy}

    async def publish_both() -> Bus:
        async with bus_of(shared_stack) as bus:
            await bus.send("first", json.dumps(sft(policy=policy)).encode())
            await bus.send("runaway", json.dumps(runaway).encode())
            await bus.until(set(), {"first", "runaway"})
            return bus

    bus = asyncio.run(publish_both())
    assert (bus.ended["first"].state, bus.ended["first"].revision) == ("completed", f"{policy}@1")
    failed = bus.ended["runaway"]
    assert (failed.state, failed.revision) == ("failed", None)
    for words in ("rollout of step 1 failed", "failed on prompt", "CPU time"):
        assert words in failed.outcome
    revisions = http.get(f"/mint/v1/policies/{policy}/revisions").json()["items"]
    assert [it["revision"] for it in revisions] == [f"{policy}@1"]
    answer = _chat(http, model=policy)
    assert (answer.status_code, answer.headers["mint-revision"]) == (200, f"{policy}@1")


def _chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": TINY_NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}
    return http.post("/v1/chat/completions", json=body)


def test_an_unknown_policy_is_404_with_near_matches(http: httpx.Client) -> None:
    """Never the base model's answer."""
    for model in ("good/after-bat", "good/after-bad@9", "good/after-bad:canary"):
        answer = _chat(http, model=model)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert "good/after-bad" in str([error["message"].replace(model, ""), *error.get("near", [])]), error
    answer = _chat(http, model="tiny/lama")
    assert answer.status_code == 404
    assert TINY_NAME in str(answer.json()["error"])


def test_a_prompt_that_is_too_long_is_400(http: httpx.Client) -> None:
    answer = _chat(http, messages=[{"role": "user", "content": "word " * 5000}])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "this model's context is" in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/mint/v1/runs"])
@pytest.mark.parametrize(
    "content",
    [b"{half", b"", b"[1]", b'"text"', b"\xff\xfe", nested(500), nested(5000), b'{"model": "\\ud800"}'],
)
def test_a_malformed_body_is_refused_and_says_why(http: httpx.Client, path: str, content: bytes) -> None:
    answer = http.post(path, content=content, headers=JSON)
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["error"]["message"]
