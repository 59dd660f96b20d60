"""The lease of a command while its job runs: renewed beside it, looked at by it.

The lease is what fences: a heartbeat to the bus keeps a message from coming again, but only the epoch
in the catalog keeps a slow worker's commit out. A job calls `check` between its parts and stops early.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Protocol

from shared.catalog import api
from shared.errors import MintError, Refused, Retryable
from shared.telemetry import log

__all__ = ["LEASE_TTL_S", "LeaseLost", "LeaseView", "Renewer"]

LEASE_TTL_S = 30.0

_log = logging.getLogger(__name__)


class LeaseLost(MintError):
    """Stop: nothing that this attempt does will be accepted. `cancelled`: because the run is over."""

    def __init__(self, message: str, cancelled: bool) -> None:
        super().__init__(message)
        self.cancelled = cancelled


class Renewer(Protocol):
    async def renew(self, request: api.LeaseRequest) -> api.RenewAnswer: ...


class LeaseView:
    """`check` is cheap and safe from any thread."""

    def __init__(self, catalog: Renewer, request: api.LeaseRequest, every_s: float, ttl_s: float = LEASE_TTL_S) -> None:
        self._catalog, self._request, self._every_s, self._ttl_s = catalog, request, every_s, ttl_s
        self._held_until = time.monotonic() + ttl_s
        self._answer = api.RenewAnswer(held=True)
        self._task: asyncio.Task[None] | None = None

    @property
    def epoch(self) -> int:
        return self._request.epoch

    def check(self) -> None:
        """Raises LeaseLost when the lease was lost, ran out unrenewed, or the run was cancelled."""
        command = self._request.command_id
        if self._answer.cancelled:
            raise LeaseLost(f"the run of {command} is over; its work is dropped", cancelled=True)
        if not self._answer.held:
            raise LeaseLost(f"another worker holds the lease of {command} by now", cancelled=False)
        if time.monotonic() > self._held_until:
            raise LeaseLost(f"the lease of {command} ran out: the catalog did not renew it in time", cancelled=False)

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
                self._answer = await self._catalog.renew(self._request)
            except Refused as error:
                log(_log, logging.WARNING, "lease refused", reason=str(error))
                self._answer = api.RenewAnswer(held=False, cancelled=error.code == "run_ended")
            except Retryable as error:
                log(_log, logging.WARNING, "lease not renewed", reason=str(error))
            else:
                self._held_until = asked + self._ttl_s
