"""Many futures in one question: which samples of a sampling session are over.

In: a sampling session, which of its clients asks, and the cursor of the last answer. Out: what ended since, as soon as
something has, each with the size of its result, which `retrieve_future` then has. Invariants: with the cursors that
were answered nothing is missed and nothing named twice; a part that is away makes clients wait, not spin; what a client
says it has retrieved stays readable until it expires, as every result does.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.requests import Request

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.streaming import until_disconnect
from services.gateway.tinker.futures import PAUSE_S
from services.gateway.tinker.messages import MAX_CLIENTS, JoinSamplingSession, RetrieveFutures
from services.gateway.tinker.rest.paths import checked_name
from services.gateway.tinker.sessions import said_by
from shared.catalog.operations import AwaitSamples, EndedSample, SamplesEnded
from shared.errors import Retryable

__all__ = ["join_sampling_session", "retrieve_futures"]

logger = logging.getLogger(__name__)


async def retrieve_futures(body: RetrieveFutures, request: Request, gateway: Here, caller: Caller) -> dict[str, Any]:
    """Held for `timeout` seconds or as long as a future is, whichever is less; 0 answers at once."""
    session = checked_name(body.target.sampling_session_id, "sampling session id")
    hold = gateway.settings.gateway_hold_s
    first = body.target.cloned_sampler_id * MAX_CLIENTS
    asked = AwaitSamples(
        tenant=caller.tenant,
        actor=caller.actor,
        after=body.prev_cursor,
        first=first,
        last=first + MAX_CLIENTS - 1,
        wait_s=hold if body.timeout is None else min(body.timeout, hold),
    )
    found = await until_disconnect(request, _waited(gateway, session, asked))
    return {"completions": [_completion(item) for item in found.items], "cursor": found.cursor}


async def join_sampling_session(body: JoinSamplingSession, gateway: Here, caller: Caller) -> dict[str, Any]:
    """A number of its own for one more client of the session, so that no two number their samples alike."""
    session = checked_name(body.sampling_session_id, "sampling session id")
    joined = await gateway.operations.join_sampler(session, said_by(caller))
    return {"type": "join_sampling_session", "client_counter": joined.client}


async def _waited(gateway: Gateway, session: str, asked: AwaitSamples) -> SamplesEnded:
    """What ended, or nothing where the catalog did not answer until the hold was over."""
    loop = asyncio.get_running_loop()
    until = loop.time() + asked.wait_s
    while True:
        left = max(0.0, until - loop.time())
        try:
            return await gateway.operations.ended_samples(session, asked.model_copy(update={"wait_s": left}))
        except Retryable as error:
            # Also one that would not be held is answered late, or it would be asked again at once.
            await asyncio.sleep(PAUSE_S)
            if left <= PAUSE_S:
                logger.warning("the samples of %s: %s", session, error)
                return SamplesEnded(cursor=asked.after)


def _completion(item: EndedSample) -> dict[str, Any]:
    if item.failed:
        return {"state": "failed", "request_id": item.request_id}
    size = {} if item.size is None else {"response_payload_uncompressed_size": item.size}
    return {"state": "finished", "request_id": item.request_id} | size
