"""The product system's side: publish a TrainRequested on the bus and wait for its answer there.

Uses nats-py and mint-schemas only, as any product would. Publishing the same source and id again is the
same run, and its answer is found even if it came long before.
"""

from __future__ import annotations

import json
from asyncio import timeout
from collections.abc import Callable
from typing import Any

import nats
from mint_schemas import Envelope, RunEnded, TrainRequested, headers_for
from mint_schemas.cloudevents import run_id_for

TRAIN_REQUESTED = "mint.v1.train.requested"
ENDED = ("mint.v1.run.completed", "mint.v1.run.failed", "mint.v1.run.cancelled")

Watch = Callable[[str, dict[str, Any]], None]


def ignore(kind: str, body: dict[str, Any]) -> None:
    """The watcher of whoever wants the answer alone."""


async def train(
    nats_url: str,
    token: str,
    source: str,
    event_id: str,
    request: TrainRequested,
    watch: Watch = ignore,
    timeout_s: float = 600.0,
) -> RunEnded:
    """Publish and wait. `watch` sees each fact of the run: (type without `mint.v1.`, body).

    Raises TimeoutError when there is no answer in time."""
    run_id = run_id_for(source, event_id)
    client = await nats.connect(nats_url)
    try:
        bus = client.jetstream(timeout=10)
        facts = await bus.subscribe(f"mint.v1.*.*.{token}", stream="EVENTS", ordered_consumer=True)
        await bus.publish(
            f"{TRAIN_REQUESTED}.{token}",
            request.model_dump_json(exclude_unset=True).encode(),
            headers=headers_for(Envelope(type=TRAIN_REQUESTED, source=source, id=event_id, subject=request.policy)),
            stream="COMMANDS",
        )
        async with timeout(timeout_s):
            async for message in facts.messages:
                kind = (message.headers or {}).get("ce-type", "")
                body = json.loads(message.data)
                if body.get("run_id") == run_id:
                    watch(kind.removeprefix("mint.v1."), body)
                if kind in ENDED and (body["request_source"], body["request_id"]) == (source, event_id):
                    return RunEnded.model_validate(body)
        raise TimeoutError(f"the bus ended the subscription before run {run_id} was over")
    finally:
        await client.close()
