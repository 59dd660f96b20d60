"""The lease of a command or of a policy while its work runs: renewed beside it, looked at by it.

The lease is what fences: a heartbeat to the bus keeps a message from coming again, but only the epoch
in the catalog keeps a slow worker's commit out. A job calls `check` between its parts and stops early.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from shared.catalog import api
from shared.errors import MintError, Refused
from shared.telemetry import log

__all__ = ["LEASE_TTL_S", "LeaseLost", "LeaseView", "Renew"]

LEASE_TTL_S = 30.0

_log = logging.getLogger(__name__)


class LeaseLost(MintError):
    """Stop: nothing that this attempt does will be accepted. `cancelled`: because the run is over."""

    def __init__(self, message: str, cancelled: bool) -> None:
        super().__init__(message)
        self.cancelled = cancelled


Renew = Callable[[], Awaitable[api.RenewAnswer]]


class LeaseView:
    """`check` is cheap and safe from any thread; `about` says in errors what is leased."""

    def __init__(self, renew: Renew, epoch: int, about: str, every_s: float, ttl_s: float = LEASE_TTL_S) -> None:
        self.epoch = epoch
        self._ask, self._about, self._every_s, self._ttl_s = renew, about, every_s, ttl_s
        self._held_until = time.monotonic() + ttl_s
        self._answer = api.RenewAnswer(held=True)
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raises LeaseLost when the lease was lost, ran out unrenewed, or the run was cancelled."""
        about = self._about
        if self._answer.cancelled:
            raise LeaseLost(f"the run of {about} is over; its work is dropped", cancelled=True)
        if not self._answer.held:
            raise LeaseLost(f"another worker holds the lease of {about} by now", cancelled=False)
        if time.monotonic() > self._held_until:
            raise LeaseLost(f"the lease of {about} ran out: the catalog did not renew it in time", cancelled=False)

    async def __aenter__(self) -> LeaseView:
        self._task = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _renew(self) -> None:
        while self._answer.held and not self._answer.cancelled:
            await asyncio.sleep(self._every_s)
            asked = time.monotonic()
            try:
                self._answer = await self._ask()
            except Refused as error:
                log(_log, logging.WARNING, "lease refused", reason=str(error))
                self._answer = api.RenewAnswer(held=False, cancelled=error.code == "run_ended")
            except MintError as error:
                # whatever it is, nobody has said that the lease is lost; unrenewed, it runs out
                log(_log, logging.WARNING, "lease not renewed", reason=str(error))
            else:
                self._held_until = asked + self._ttl_s
