"""What one caller alone knows of the replicas: its own requests there, and whom it lost a moment ago.

In flow announcements, requests that begin and end, and losses; out flows `Mine` per replica for the
routing rule. Invariant: a suspicion ends by itself after `ASIDE_S`, or at once when the replica announces
another boot, so that no mistake about a replica lasts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shared.residency import Replica
from shared.sampling.routing import Mine

__all__ = ["ASIDE_S", "Ledger"]

ASIDE_S = 5.0
"""How long a lost replica is asked last; a third of the time after which a dead one is out of the view."""


@dataclass
class _Page:
    announced: tuple[str, float] = ("", 0.0)
    before: int = 0
    asked: Counter[str | None] = field(default_factory=Counter)
    aside_until: float = 0.0
    aside_boot: str = ""

    @property
    def open(self) -> int:
        return self.asked.total()


class Ledger:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pages: dict[str, _Page] = {}

    def hear(self, replicas: Iterable[Replica]) -> None:
        """Take in the announcements of now, all of them; call it before a request is entered or crossed out."""
        heard = set()
        for replica in replicas:
            heard.add(replica.replica)
            page = self._pages.setdefault(replica.replica, _Page())
            if page.announced != (replica.boot_id, replica.at):
                page.announced, page.before = (replica.boot_id, replica.at), page.open
        now = self._clock()
        self._pages = {
            name: page for name, page in self._pages.items() if name in heard or page.open or now < page.aside_until
        }

    def enter(self, replica: Replica, revision: str | None) -> None:
        self._pages.setdefault(replica.replica, _Page()).asked[revision] += 1

    def leave(self, replica: Replica, revision: str | None) -> None:
        page = self._pages[replica.replica]
        page.asked[revision] -= 1
        if not page.asked[revision]:
            del page.asked[revision]

    def put_aside(self, replica: Replica) -> None:
        """That boot of the replica was lost, or has no engine now."""
        page = self._pages.setdefault(replica.replica, _Page())
        page.aside_boot, page.aside_until = replica.boot_id, self._clock() + ASIDE_S

    def mine(self, replicas: Iterable[Replica], revision: str | None) -> dict[str, Mine]:
        """By replica name, for a request for `revision`."""
        return {replica.replica: self._of(replica, revision) for replica in replicas}

    def _of(self, replica: Replica, revision: str | None) -> Mine:
        page = self._pages.get(replica.replica, _Page())
        aside = page.aside_boot == replica.boot_id and self._clock() < page.aside_until
        return Mine(page.open, page.open - page.before, page.asked[revision] > 0, aside)
