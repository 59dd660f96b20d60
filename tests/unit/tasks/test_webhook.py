"""Rewards over HTTP, against a real server: what is sent, and everything that may come back."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from mint_schemas.training import ArithmeticTask, WebhookReward

from shared.errors import Fatal, MintError, Retryable
from shared.tasks import RewardError, RewardSettings, TaskItem, TaskLoader, TaskSet, load_task, scorer_name, webhook
from shared.tasks.webhook import ANSWER_BYTES, Webhook
from tests.unit.tasks.test_taskset import SUMS, nothing

ITEMS = [TaskItem(f"line-{i}", ({"role": "user", "content": f"p{i}"},), str(i)) for i in range(5)]
Reply = Callable[[dict[str, Any]], tuple[int, bytes]]


def right(body: dict[str, Any]) -> tuple[int, bytes]:
    scores = [float(item["completion"] == item["answer"]) for item in body["items"]]
    return 200, json.dumps({"scores": scores}).encode()


class Server:
    """One HTTP exchange a connection; `replies` are used one by one, then `right`."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.hooks: list[Webhook] = []
        self.delay_s = 0.0
        self.now = self.most = 0
        self.port = 0
        self.cookie = ""
        self.asked, self.answered = asyncio.Event(), asyncio.Event()
        self.open: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(asyncio.create_task(self._exchange(reader, writer)))

    async def close(self) -> None:
        for hook in self.hooks:
            await hook.aclose()
        for exchange in self.open:
            exchange.cancel()
        await asyncio.gather(*self.open, return_exceptions=True)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(int(h.split(":")[1]) for h in head.split("\r\n") if h.startswith("content-length:"))
        body = json.loads(await reader.readexactly(length))
        self.heads.append(head)
        self.bodies.append(body)
        self.asked.set()
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.delay_s)
        self.now -= 1
        status, content = (self.replies.pop(0) if self.replies else right)(body)
        location = "location: http://127.0.0.1:1/\r\n" if 300 <= status < 400 else ""
        writer.write(f"HTTP/1.1 {status} X\r\n{location}{self.cookie}content-length: {len(content)}\r\n\r\n".encode())
        writer.write(content)
        await writer.drain()
        self.answered.set()

    def url(self, path: str = "/score") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def task(self, at_once: int = 4, first_delay_s: float = 0.001, **changes: Any) -> TaskSet:
        values = {"kind": "webhook", "url": self.url(), "retries": 2, "timeout_s": 5, **changes}
        reward = WebhookReward.model_validate(values)
        hook = Webhook(reward, frozenset({"127.0.0.1"}), at_once, first_delay_s)
        self.hooks.append(hook)
        return TaskSet((), (), hook, scorer_name(reward), "y", None)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    yield server
    await server.close()
    listening.close()
    await listening.wait_closed()


def constant(status: int, content: bytes = b"") -> Reply:
    return lambda body: (status, content)


async def test_batches_are_posted_and_their_scores_come_back_in_order(server: Server) -> None:
    scores = await server.task(batch_size=2).score_batch([(item, "3") for item in ITEMS])
    assert scores == [0.0, 0.0, 0.0, 1.0, 0.0]
    assert sorted(len(body["items"]) for body in server.bodies) == [1, 2, 2]
    items = {item["id"]: item for body in server.bodies for item in body["items"]}
    prompt = [{"role": "user", "content": "p3"}]
    assert items["line-3"] == {"id": "line-3", "prompt": prompt, "completion": "3", "answer": "3"}
    assert all(head.startswith("post /score http/1.1") for head in server.heads)


async def test_no_more_requests_than_allowed_are_open(server: Server) -> None:
    server.delay_s = 0.02
    await server.task(at_once=2, batch_size=1).score_batch([(item, "3") for item in ITEMS])
    assert server.most == 2


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_what_may_pass_is_tried_again(server: Server, status: int) -> None:
    server.replies = [constant(status), constant(status)]
    assert await server.task().score_batch([(ITEMS[1], "1")]) == [1.0]
    assert len(server.bodies) == 3


async def test_retries_end(server: Server) -> None:
    server.replies = [constant(502, b"upstream is down")] * 9
    with pytest.raises(Retryable, match="failed 3 times, at last: it answered 502: upstream is down"):
        await server.task().score_batch([(ITEMS[1], "1")])
    assert len(server.bodies) == 3


async def test_a_service_that_is_slow_or_gone_is_tried_again(server: Server) -> None:
    server.delay_s = 0.5
    with pytest.raises(Retryable, match="failed 2 times, at last: TimeoutError"):
        await server.task(timeout_s=0.1, retries=1).score_batch([(ITEMS[1], "1")])
    server.port = 1
    with pytest.raises(Retryable, match="failed 1 times, at last: ConnectError"):
        await server.task(retries=0).score_batch([(ITEMS[1], "1")])


async def test_a_refusal_is_final_and_quoted(server: Server) -> None:
    server.replies = [constant(422, b"no field answer")]
    with pytest.raises(Fatal, match="refused a batch: it answered 422: no field answer"):
        await server.task().score_batch([(ITEMS[1], "1")])
    assert len(server.bodies) == 1


async def test_a_redirect_is_not_followed(server: Server) -> None:
    server.replies = [constant(307)]
    with pytest.raises(Fatal, match="it answered 307"):
        await server.task().score_batch([(ITEMS[1], "1")])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine", "on prompt line-0 answered no JSON: 'fine'"),
        (b"[1, 1]", "on prompt line-0 answered a list without a list `scores`"),
        (b'{"scores": 1}', "without a list `scores`"),
        (b'{"scores": [1]}', "on prompt line-0 answered 1 scores for 2 items"),
        (b'{"scores": [1, "2"]}', "answered a text as the score of a completion of prompt line-1"),
        (b'{"scores": [true, 1]}', "answered true or false as the score of a completion of prompt line-0"),
        (b'{"scores": [1, NaN]}', "gave nan on prompt line-1"),
        (b'{"scores": [1, 1e999]}', "gave inf on prompt line-1"),
        (b'{"scores": [1, ' + b"9" * 400 + b"]}", "failed on prompt line-1: OverflowError"),
        (b"[" * 100_000, "on prompt line-0 answered no JSON"),
    ],
)
async def test_an_answer_that_is_none_names_the_prompt(server: Server, content: bytes, message: str) -> None:
    server.replies = [constant(200, content)]
    with pytest.raises(RewardError, match=message):
        await server.task().score_batch([(item, "x") for item in ITEMS[:2]])


async def test_an_endless_answer_is_cut(server: Server) -> None:
    server.replies = [constant(200, b" " * (ANSWER_BYTES + 1))]
    with pytest.raises(Fatal, match="answered more than 1048576 bytes"):
        await server.task().score_batch([(ITEMS[0], "x")])


@pytest.mark.parametrize(
    ("url", "hosts", "allowed"),
    [
        ("http://rewards.internal/x", "rewards.internal", True),
        ("https://Rewards.Internal:8443/x", "rewards.internal:8443", True),
        ("http://rewards.internal/x", "rewards.internal:80", True),
        ("https://rewards.internal/x", "rewards.internal:443", True),
        ("http://[::1]:9/x", "[::1]:9", True),
        ("http://rewards.internal:81/x", "rewards.internal:80", False),
        ("http://rewards.internal/x", "", False),
        ("http://evil.example/rewards.internal", "rewards.internal", False),
        ("http://rewards.internal.evil.example/", "rewards.internal", False),
        ("http://rewards.internal@evil.example/", "rewards.internal,evil.example", False),
        ("http://rewards.internal:x/", "rewards.internal", False),
        ("http://evil.example\\@rewards.internal/", "rewards.internal", False),
        ("http:///x", "rewards.internal", False),
        ("http://[v1.a]/", "rewards.internal", False),
        ("http://１２７.0.0.1/", "127.0.0.1", False),
        ("http://rewards.internal:８０/", "rewards.internal", False),
        ("http://rewards.internal\n/", "rewards.internal", False),
        ("http://rewards.internal\0/", "rewards.internal", False),
    ],
)
async def test_only_listed_hosts_are_called(url: str, hosts: str, allowed: bool) -> None:
    task = ArithmeticTask(kind="arithmetic", reward=WebhookReward(kind="webhook", url=url))
    if allowed:
        assert (await load_task(task, nothing, RewardSettings.parsed(hosts))).scorer.startswith("webhook:")
    else:
        with pytest.raises(ValueError, match=r"webhook's (host|url)"):
            await load_task(task, nothing, RewardSettings.parsed(hosts))


async def test_without_a_list_no_host_is_allowed_and_the_setting_is_named() -> None:
    task = ArithmeticTask(kind="arithmetic", reward=WebhookReward(kind="webhook", url="http://127.0.0.1:1/"))
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:1 is not allowed; allowed are: none\. .*MINT_REWARD_HOSTS"):
        await load_task(task, nothing)


async def test_a_cancelled_batch_closes_its_request(server: Server) -> None:
    server.delay_s = 30
    scoring = asyncio.create_task(server.task().score_batch([(ITEMS[0], "x")]))
    await server.asked.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring


class Counted:
    """Makes clients as `Webhook` does, and keeps them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clients: list[httpx.AsyncClient] = []
        self.threads: set[threading.Thread] = set()
        self._make = webhook._new_client
        monkeypatch.setattr(webhook, "_new_client", self)

    def __call__(self) -> httpx.AsyncClient:
        self.threads.add(threading.current_thread())
        self.clients.append(self._make())
        return self.clients[-1]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def hooked(url: str, **changes: Any) -> ArithmeticTask:
    reward = WebhookReward.model_validate({"kind": "webhook", "url": url, "retries": 0, **changes})
    return SUMS.model_copy(update={"reward": reward})


async def test_a_webhook_that_hangs_delays_no_other_reward(server: Server) -> None:
    """Neither a local reward of the same worker nor another webhook, however many batches wait for it."""
    server.delay_s = 30
    loader = TaskLoader(nothing, RewardSettings.parsed("127.0.0.1", concurrency=1))
    slow, local = await loader.load(hooked(server.url("/slow"))), await loader.load(SUMS)
    item = local.train_items[0]
    hanging = [asyncio.create_task(slow.score_batch([(item, "x")])) for _ in range(8)]
    await server.asked.wait()
    assert await local.score_batch([(item, item.answer)]) == [1.0]
    server.delay_s = 0.0
    other = await loader.load(hooked(server.url("/other")))
    assert await other.score_batch([(item, item.answer)]) == [1.0]
    assert server.most <= 2, "each webhook has one place"
    for scoring in hanging:
        scoring.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    await loader.aclose()


async def test_a_batch_that_waits_to_be_tried_again_holds_no_place(server: Server) -> None:
    server.replies = [constant(503)]
    task = server.task(at_once=1, first_delay_s=30)
    waiting = asyncio.create_task(task.score_batch([(ITEMS[0], "0")]))
    await server.answered.wait()
    assert await task.score_batch([(ITEMS[1], "1")]) == [1.0]
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_one_client_is_shared_by_all_batches_and_made_off_the_loop(server: Server, counted: Counted) -> None:
    task = server.task(batch_size=1)
    assert counted.clients == [], "a webhook that is only looked at opens nothing"
    for _ in range(3):
        await task.score_batch([(item, "3") for item in ITEMS])
    assert len(counted.clients) == 1
    assert threading.main_thread() not in counted.threads


async def test_a_task_that_is_forgotten_closes_its_client_when_its_batches_are_done(
    server: Server, counted: Counted
) -> None:
    loader = TaskLoader(nothing, RewardSettings.parsed("127.0.0.1"), keep=1)
    task = await loader.load(hooked(server.url()))
    item = task.train_items[0]
    server.delay_s = 0.05
    scoring = asyncio.create_task(task.score_batch([(item, item.answer)]))
    await server.asked.wait()
    await loader.load(SUMS)
    (client,) = counted.clients
    assert not client.is_closed, "a batch is on its way"
    assert await scoring == [1.0]
    assert client.is_closed
    assert await task.score_batch([(item, item.answer)]) == [1.0], "a command goes on with the task it has"
    assert [client.is_closed for client in counted.clients] == [True, True]


async def test_cookies_are_not_sent_back(server: Server) -> None:
    server.cookie = "set-cookie: seen=1\r\n"
    task = server.task()
    for _ in range(2):
        await task.score_batch([(ITEMS[0], "0")])
    assert not any("cookie:" in head for head in server.heads)


def test_a_webhook_is_named_by_its_address() -> None:
    one, same, other = (
        WebhookReward(kind="webhook", url=url, retries=retries)
        for url, retries in (("http://a/", 1), ("http://a/", 2), ("http://b/", 1))
    )
    assert scorer_name(one) == scorer_name(same) != scorer_name(other)
    assert issubclass(RewardError, MintError)
