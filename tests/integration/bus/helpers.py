"""What the bus tests share: a command, its durable, and looks at the streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from mint_schemas import EvaluationRequested
from mint_schemas.training import ArithmeticTask

from shared.bus import Bus, command_durable

TYPE = "mint.v1.evaluation.requested"
TOKEN = "tiny-llama"
SUBJECT = f"{TYPE}.{TOKEN}"
DURABLE = command_durable(TYPE, TOKEN)


def command(number: int = 1) -> EvaluationRequested:
    return EvaluationRequested(
        command_id=f"r{number}:evaluation:base",
        run_id=f"r{number}",
        policy="acme/adder",
        base="tiny/llama",
        revision=None,
        task=ArithmeticTask(kind="arithmetic"),
        items=8,
        max_tokens=4,
        seed=0,
    )


async def send(bus: Bus, number: int = 1) -> None:
    await bus.publish(TYPE, f"r{number}:evaluation", "mint/catalog", TOKEN, command(number))


def jetstream(bus: Bus) -> Any:
    return bus._js()


async def waiting(bus: Bus, stream: str = "COMMANDS") -> int:
    info = await jetstream(bus).stream_info(stream)
    return int(info.state.messages)


async def reconnected(bus: Bus) -> bool:
    return await bus.ping(0.5)


async def eventually(condition: Callable[[], Awaitable[bool]] | Callable[[], bool], within_s: float = 5.0) -> float:
    """Seconds until it held. Fails after `within_s`."""
    started = time.monotonic()
    while time.monotonic() - started < within_s:
        held = condition()
        if held if isinstance(held, bool) else await held:
            return time.monotonic() - started
        await asyncio.sleep(0.02)
    raise AssertionError(f"did not hold within {within_s} s")


async def empty(bus: Bus) -> bool:
    return await waiting(bus) == 0
