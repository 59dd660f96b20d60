"""One message and its one answer, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from mint_schemas import Envelope, TrainRequested, headers_for

from shared.bus.delivery import Delivery, retry_delay
from shared.bus.received import Received
from shared.bus.table import DEAD, Durable
from shared.errors import Fatal, Retryable

SUBJECT = "mint.v1.train.requested.one"
HEADERS = headers_for(Envelope("mint.v1.train.requested", "product", "e1"))


@dataclass
class Sequence:
    stream: int = 7


@dataclass
class Metadata:
    num_delivered: int = 1
    stream: str = "COMMANDS"
    sequence: Sequence = field(default_factory=Sequence)


@dataclass
class Message:
    """What the delivery needs of the client library's message; remembers the answers."""

    data: bytes = b"{}"
    headers: dict[str, str] | None = field(default_factory=lambda: dict(HEADERS))
    subject: str = SUBJECT
    metadata: Metadata = field(default_factory=Metadata)
    said: list[Any] = field(default_factory=list)

    async def ack(self) -> None:
        self.said.append("ack")

    async def nak(self, delay: float | None = None) -> None:
        self.said.append(("nak", delay))

    async def in_progress(self) -> None:
        self.said.append("in progress")


@dataclass
class Grave:
    buried: list[str] = field(default_factory=list)
    away: bool = False

    async def __call__(
        self, durable: str, subject: str, headers: Mapping[str, str], body: bytes, sequence: str, reason: str
    ) -> None:
        if self.away:
            raise Retryable("the bus is away")
        self.buried.append(reason)


def delivery(outcome: BaseException | None, grave: Grave, stream: str = "COMMANDS", **limits: Any) -> Delivery:
    async def handle(received: Received) -> None:
        if outcome is not None:
            raise outcome

    return Delivery(Durable("d", stream, (SUBJECT,), **limits), handle, grave)


@pytest.mark.parametrize(
    ("outcome", "deliveries", "said"),
    [
        (None, 1, "ack"),
        (Retryable("busy", delay_s=4.2), 1, ("nak", 4.2)),
        (Retryable("later"), 1, ("nak", 0.5)),
        (Retryable("later"), 4, ("nak", 4.0)),
        (RuntimeError("a bug"), 50, ("nak", 30.0)),
        (Retryable("now", delay_s=0.0), 9, ("nak", 0.0)),
    ],
)
async def test_answers(outcome: Exception | None, deliveries: int, said: Any) -> None:
    message, grave = Message(metadata=Metadata(deliveries)), Grave()
    await delivery(outcome, grave)(message)
    assert message.said == [said]
    assert grave.buried == []


async def test_a_dead_letter_is_stored_before_the_ack() -> None:
    message, grave = Message(), Grave(away=True)
    handle = delivery(Fatal("bad"), grave)
    await handle(message)
    assert message.said == [("nak", 0.5)]
    grave.away = False
    await handle(message)
    assert message.said[1:] == ["ack"]
    assert grave.buried == ["bad"]


async def test_the_last_delivery_is_dead_lettered() -> None:
    message, grave = Message(metadata=Metadata(5)), Grave()
    await delivery(Retryable("still away"), grave, max_deliver=5)(message)
    assert (message.said, grave.buried) == (["ack"], ["gave up after 5 deliveries: still away"])


async def test_a_dead_letter_that_fails_is_not_buried_again() -> None:
    message, grave = Message(), Grave()
    await delivery(Fatal("bad"), grave, stream=DEAD)(message)
    assert (message.said, grave.buried) == (["ack"], [])


async def test_a_dead_letter_without_headers_is_still_handed_over() -> None:
    seen: list[Received] = []

    async def handle(received: Received) -> None:
        seen.append(received)

    headers = {"mint-dead-reason": "no headers", "mint-dead-subject": SUBJECT, "Nats-Msg-Id": "dead|COMMANDS|7"}
    message = Message(data=b"\xff", headers=headers, subject="mint.v1.dead.train.requested.one")
    await Delivery(Durable("d", DEAD, (SUBJECT,)), handle, Grave())(message)
    assert message.said == ["ack"]
    (received,) = seen
    assert (received.envelope.type, received.envelope.source, received.token) == (
        "mint.v1.train.requested",
        "unknown",
        "one",
    )
    assert received.dead_reason == "no headers"


async def test_a_dead_letter_that_lacks_one_header_still_says_whose_it_is() -> None:
    seen: list[Received] = []

    async def handle(received: Received) -> None:
        seen.append(received)

    headers = {"ce-source": "acme/shop", "ce-id": "7", "mint-dead-reason": "no version", "mint-dead-subject": SUBJECT}
    message = Message(data=b"{}", headers=headers, subject="mint.v1.dead.train.requested.one")
    await Delivery(Durable("d", DEAD, (SUBJECT,)), handle, Grave())(message)
    assert [(it.envelope.source, it.envelope.id) for it in seen] == [("acme/shop", "7")]


async def test_heartbeats_for_as_long_as_the_handler_runs() -> None:
    async def handle(received: Received) -> None:
        await asyncio.sleep(0.35)

    message = Message()
    await Delivery(Durable("d", "COMMANDS", (SUBJECT,), ack_wait_s=0.3), handle, Grave())(message)
    assert message.said == ["in progress"] * 3 + ["ack"]
    await asyncio.sleep(0.2)
    assert len(message.said) == 4


async def test_shutdown_gives_back_what_runs_and_what_comes() -> None:
    async def handle(received: Received) -> None:
        await asyncio.sleep(60)

    running, coming = Message(), Message()
    handled = Delivery(Durable("d", "COMMANDS", (SUBJECT,)), handle, Grave())
    task = asyncio.create_task(handled(running))
    await asyncio.sleep(0.01)
    handled.refuse()
    await handled.give_back()
    assert running.said == [("nak", None)]
    await task
    await handled(coming)
    assert coming.said == [("nak", None)]


async def test_an_invalid_body_is_explained() -> None:
    grave = Grave()
    body = b'{"policy": "Acme/../x", "base": "b", "method": {"kind": "distil"}, "lora": {"rank": 0}, "steps": 3}'

    async def handle(received: Received) -> None:
        received.decode(TrainRequested)

    await Delivery(Durable("d", "COMMANDS", (SUBJECT,)), handle, grave)(Message(data=body))
    (reason,) = grave.buried
    for words in (
        "policy: 'Acme/../x' is not a reference; write tenant/policy",
        "method: 'distil' is not known; known are 'sft', 'dpo', 'grpo'",
        "lora.rank: Input should be greater than or equal to 1 (got 0)",
        "steps: there is no such field",
    ):
        assert words in reason


def test_delays_grow_to_a_bound() -> None:
    assert [retry_delay(n) for n in (1, 2, 3, 7, 100)] == [0.5, 1.0, 2.0, 30.0, 30.0]
