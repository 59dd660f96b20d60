"""GET /mint/v1/runs/{id}/progress: the run's journal as server-sent events, until the run ends.

In: a run id and the number behind which to continue (Last-Event-ID). Out: one event per journal entry
(`id` = its number, `event` = its type, `data` = the entry), then `event: end` with the run.
Invariant: every entry once and in order, also over reconnections; the gateway keeps nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Header
from pydantic.json_schema import SkipJsonSchema
from starlette.responses import Response

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.mint_v1.owned import RunId, owned_run
from services.gateway.streaming import EventStream, event
from shared.catalog.api import RunView
from shared.errors import Refused, Retryable

__all__ = ["run_progress"]

END_STATES = frozenset({"completed", "failed", "cancelled"})
KEEP_ALIVE = ": waiting\n\n"
NUMBER_PATTERN = "^[0-9]{0,15}$"
UNREACHABLE = ": the catalog does not answer; still trying\n\n"

LastEventId = Annotated[
    str | SkipJsonSchema[None],
    Header(
        alias="Last-Event-ID", description="continue behind this event", json_schema_extra={"pattern": NUMBER_PATTERN}
    ),
]


async def run_progress(run_id: RunId, gateway: Here, caller: Caller, last_event_id: LastEventId = None) -> Response:
    """The journal as server-sent events, each once and in order, until the run ends."""
    await owned_run(gateway, caller, run_id)
    return EventStream(_follow(gateway, run_id, _number(last_event_id)))


def _number(text: str | None) -> int:
    if text is None:
        return 0
    if not re.fullmatch(NUMBER_PATTERN, text):
        raise Refused(f"Last-Event-ID {text[:40]!r} is not the id of an event of this stream, which are numbers")
    return int(text or 0)


async def _follow(gateway: Gateway, run_id: str, after: int) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    said = loop.time()
    while True:
        lines, over = [], None
        try:
            # The run before its journal: what ended the run is then surely in the entries read after it.
            run = await gateway.catalog.run(run_id)
            for entry in await gateway.catalog.journal(run_id, after):
                lines.append(event(entry.model_dump(mode="json"), entry.type, entry.seq))
                after = max(after, entry.seq)
            over = run if run.state in END_STATES else None
        except Retryable:
            lines.append(UNREACHABLE)
        for line in lines:
            yield line
        if over is not None:
            yield _end(over)
            return
        if lines:
            said = loop.time()
        elif loop.time() - said >= gateway.settings.gateway_keep_alive_s:
            yield KEEP_ALIVE
            said = loop.time()
        await asyncio.sleep(gateway.settings.gateway_progress_poll_s)


def _end(run: RunView) -> str:
    return event(run.model_dump(mode="json"), "end")
