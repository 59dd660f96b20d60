"""The driver: keeps every run moving, and the desired residency in step with the database.

In: a nudge (an event, a replica's change, boot, every 30 s). Out: transactions of `advance`, and the
`residency` bucket. Invariant: a nudge may come at any time and any number of times; a lost one costs at
most the period.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping

from sqlalchemy import delete, not_, or_, select
from sqlalchemy.orm import Session

from services.catalog import commands, retention, runs, sampler_saves, upkeep
from services.catalog.advance import Surroundings, advance
from services.catalog.clock import Clock
from services.catalog.config import CatalogSettings
from services.catalog.database import Database
from services.catalog.model_end import TINKER
from services.catalog.operation_rules import rules_of
from services.catalog.readiness import Readiness, Replicas
from services.catalog.residency import desired
from services.catalog.situation import ReadyRules
from services.catalog.tables import PrewarmRow, RunRow
from shared.bases import Base
from shared.residency import Desired, Replica
from shared.store.port import ObjectStore
from shared.telemetry.metrics import REDRIVEN

WriteDesired = Callable[[str, Desired], Awaitable[object]]
"""(base token, what to hold)."""

_log = logging.getLogger(__name__)


class Driver:
    def __init__(
        self,
        database: Database,
        bases: Mapping[str, Base],
        store: ObjectStore,
        settings: CatalogSettings,
        clock: Clock,
        write_desired: WriteDesired,
        wake_relay: Callable[[], None],
    ) -> None:
        self.replicas = Replicas()
        self._database, self._bases, self._store = database, bases, store
        self._settings, self._clock = settings, clock
        self.rules = rules_of(settings, bases)
        self._listening_since = clock()
        self._write_desired, self._wake_relay = write_desired, wake_relay
        self._written: dict[str, Desired] = {}
        self._residency = asyncio.Lock()

    def readiness(self) -> Readiness:
        return self.replicas.now(self._clock())

    async def advance(self, run_id: str) -> None:
        around = Surroundings(
            bases=self._bases,
            readiness=self.readiness(),
            ready=ReadyRules(self._settings.ready_timeout_s, self._settings.min_ready),
            deadline_s=self._settings.command_deadline_s,
            now=self._clock(),
            operations=self.rules,
        )
        await self._database.write(advance, run_id, around)
        await self.settle()

    def wake(self) -> None:
        """After a transaction that needs nothing resident: send what it promised."""
        self._wake_relay()

    async def settle(self) -> None:
        """After a transaction: send what it promised, and want resident what it needs."""
        self._wake_relay()
        try:
            await self.refresh_residency()
        except Exception as error:
            _log.warning("cannot write the desired residency, trying again with the next look: %s", error)

    async def refresh_residency(self, rewrite: bool = False) -> None:
        """Write what differs from what was written last; with `rewrite` everything."""
        async with self._residency:
            for base in self._bases.values():
                wanted = await self._database.read(desired, base.name, self._clock())
                if rewrite or self._written.get(base.token) != wanted:
                    await self._write_desired(base.token, wanted)
                    self._written[base.token] = wanted

    async def advance_all(self) -> None:
        """Every run that is not over, and the queued ones behind them."""
        await self._advance_each(await self._database.read(_unfinished, self._bases))

    async def _advance_each(self, run_ids: list[str]) -> None:
        """One run that cannot be looked at keeps none of the others from moving on."""
        for run_id in run_ids:
            try:
                await self.advance(run_id)
            except Exception:
                _log.exception("cannot advance run %s, trying again with the next look", run_id)

    async def replica_changed(self, key: str, announcement: bytes | None) -> None:
        """An announcement as it is in the bucket; None = it ended. Moves on what waited for it."""
        before = self.readiness()
        if announcement is None:
            self.replicas.gone(key)
        else:
            self.replicas.heard(key, Replica.model_validate_json(announcement), self._clock())
        after = self.readiness()
        if (before.ready, before.failed) != (after.ready, after.failed):
            await self._advance_each(await self._database.read(_waiting))

    async def look(self) -> None:
        """The periodic look, and the one at boot: silent commands are sent again, waits are re-examined,
        and the bucket is written afresh in case it was lost."""
        silent = await self._database.write(commands.reissue_silent, self._clock(), self._settings.command_deadline_s)
        REDRIVEN.inc(len(silent))
        if silent:
            _log.warning("sent again, silent past the deadline: %s", ", ".join(silent))
        await self._database.write(_forget_prewarms, self._clock())
        for chore in upkeep.CHORES:
            for _ in range(upkeep.ROUNDS):
                done = await self._database.write(chore, self.rules, self._listening_since, self._clock())
                if done:
                    _log.info("%s: %d, among them %s", chore.__name__, len(done), ", ".join(done[:5]))
                if len(done) < upkeep.BATCH:
                    break
        await self.advance_all()
        await self.refresh_residency(rewrite=True)

    async def run(self) -> None:
        """Until cancelled; the first look is the caller's."""
        while True:
            await asyncio.sleep(self._settings.drive_every_s)
            try:
                await self.look()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                _log.warning(
                    "the periodic look failed, trying again in %.0f s: %s", self._settings.drive_every_s, error
                )

    async def thin(self, run_id: str) -> None:
        """Let go of training checkpoints that need not stay. Files that cannot be deleted now are swept later."""
        await self.remove(await self._database.write(retention.thin, run_id))

    async def remove(self, keys: Iterable[str]) -> None:
        """Files that no row names any more."""
        for key in keys:
            try:
                await self._store.delete(key)
            except Exception as error:
                _log.warning("cannot delete %s now, the sweeper will: %s", key, error)


def _unfinished(session: Session, bases: Mapping[str, Base]) -> list[str]:
    """Without the models that a client has open and that no save waits for, of which there may be thousands."""
    query = select(RunRow.run_id).where(RunRow.state.in_((*runs.ACTIVE, "queued"))).order_by(RunRow.seq)
    idle = (RunRow.method == TINKER) & RunRow.base.in_(list(bases)) & RunRow.run_id.not_in(sampler_saves.run_ids())
    return list(session.scalars(query.where(or_(RunRow.method.is_(None), not_(idle)))))


def _waiting(session: Session) -> list[str]:
    return list(session.scalars(select(RunRow.run_id).where(RunRow.waiting_for.is_not(None)).order_by(RunRow.seq)))


def _forget_prewarms(session: Session, now: float) -> None:
    session.execute(delete(PrewarmRow).where(PrewarmRow.until <= now))
