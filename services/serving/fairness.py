"""Who is next among the requests that wait for a turn.

In flow waiting `Ask`s, out flows the first one that may enter. Three rules, in this order:

- class: interactive before prewarm before background, except that a class goes first once `OVERTAKES` turns
  of more urgent ones went before it (the rule of `order`, here for turns that can be barred);
- of a class, every (`OVERTAKES` + 1)-th turn is the one's that came first, so that an endless row of newcomers
  passes nobody by; the others are shared by tenants, and inside a tenant by policies, by start-time fair queueing
  (Goyal, Vin, Cheng 1996): a share's tag grows by the cost of each turn that it gets, the lowest tag is next, and a
  share that comes back from idleness, or was barred, goes on from the tag that was served last: nobody saves up;
- inside a policy, first come first served.

Invariant: of those that may enter, the p-th of a class has its turn within p · (`OVERTAKES` + 1) turns of the class;
the only request of a tenant is passed over at most once by each other tenant and by one of these turns in
`OVERTAKES` + 1; and a class has to wait for at most `OVERTAKES` + 1 turns of more urgent ones per turn of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import TypeVar

from services.serving.order import CLASSES, OVERTAKES

SPARE = 16
"""So many idle shares are kept in any case."""


@dataclass(eq=False)
class Ask:
    """One waiting request; `number` is its place among all arrivals, `urgency` one of `CLASSES`, `cost` in
    tokens."""

    number: int
    tenant: str
    revision: str | None
    urgency: int
    sequences: int
    cost: int


Enters = Callable[[Ask], bool]
Queue = dict[Ask, None]


@dataclass(eq=False)
class _Share:
    """`waits_since` is the arrival that ended its last idleness: it decides between equal tags."""

    tag: float = 0.0
    waits_since: int = 0
    waiting: int = 0

    def joined(self, number: int, served: float) -> None:
        if not self.waiting:
            self.tag, self.waits_since = max(self.tag, served), number
        self.waiting += 1


@dataclass(eq=False)
class _Policy(_Share):
    queues: dict[str | None, Queue] = field(default_factory=dict)

    def first(self) -> Ask:
        return min((next(iter(queue)) for queue in self.queues.values()), key=attrgetter("number"))


@dataclass(eq=False)
class _Tenant(_Share):
    served: float = 0.0
    policies: dict[str, _Policy] = field(default_factory=dict)


@dataclass(eq=False)
class _Class:
    """`asks` are in the order of their arrival, `given` counts turns, `served` is the highest tag that had one;
    `passed` counts turns of more urgent classes while this waits; `asking` has the tenants that wait for a revision,
    each with how many of its requests do."""

    asks: dict[Ask, None] = field(default_factory=dict)
    given: int = 0
    served: float = 0.0
    passed: int = 0
    tenants: dict[str, _Tenant] = field(default_factory=dict)
    asking: dict[str | None, Counter[str]] = field(default_factory=dict)

    def first(self) -> Ask:
        if self._by_arrival():
            return next(iter(self.asks))
        return _least(_least(self.tenants.values()).policies.values()).first()

    def first_of(self, revisions: Iterable[str | None], enters: Enters) -> Ask | None:
        """The first whose revision is one of these and that `enters`."""
        found = []
        for revision in revisions:
            for name in self.asking.get(revision, ()):
                tenant = self.tenants[name]
                policy = tenant.policies[_policy_of(revision)]
                ask = next(iter(policy.queues[revision]))
                if enters(ask):
                    tags = (tenant.tag, tenant.waits_since, policy.tag, policy.waits_since)
                    found.append(((ask.number,) if self._by_arrival() else (*tags, ask.number), ask))
        return min(found, key=itemgetter(0))[1] if found else None

    def _by_arrival(self) -> bool:
        return self.given % (OVERTAKES + 1) == OVERTAKES


class Waiting:
    """The waiting requests. Looking for the first of all takes a step per tenant that waits and per policy of one
    of them; looking among some revisions, a step per tenant that waits for one of those."""

    def __init__(self) -> None:
        self._classes = {urgency: _Class() for urgency in CLASSES}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def up_to(self, urgency: int) -> int:
        """How many wait in this class and in more urgent ones."""
        return sum(len(cls.asks) for of, cls in self._classes.items() if of <= urgency)

    def add(self, ask: Ask) -> None:
        cls = self._classes[ask.urgency]
        tenant = cls.tenants.setdefault(ask.tenant, _Tenant())
        policy = tenant.policies.setdefault(_policy_of(ask.revision), _Policy())
        tenant.joined(ask.number, cls.served)
        policy.joined(ask.number, tenant.served)
        policy.queues.setdefault(ask.revision, {})[ask] = None
        cls.asking.setdefault(ask.revision, Counter())[ask.tenant] += 1
        cls.asks[ask] = None
        self._count += 1

    def remove(self, ask: Ask) -> None:
        """It waits no more; its shares are charged by `take` alone."""
        cls, tenant, policy = self._shares(ask)
        del policy.queues[ask.revision][ask]
        if not policy.queues[ask.revision]:
            del policy.queues[ask.revision]
        asking = cls.asking[ask.revision]
        asking[ask.tenant] -= 1
        if not asking[ask.tenant]:
            del asking[ask.tenant]
        if not asking:
            del cls.asking[ask.revision]
        policy.waiting -= 1
        tenant.waiting -= 1
        del cls.asks[ask]
        self._count -= 1
        _forget_idle(cls, tenant)

    def take(self, ask: Ask) -> None:
        """It enters: its tenant and its policy are charged, and the classes that were passed over know it."""
        cls, tenant, policy = self._shares(ask)
        # From what is served, not from its own tag: a share that was barred for long goes first once, not often.
        cls.served, tenant.served = max(cls.served, tenant.tag), max(tenant.served, policy.tag)
        tenant.tag, policy.tag = cls.served + ask.cost, tenant.served + ask.cost
        cls.given += 1
        cls.passed = 0
        for urgency, other in self._classes.items():
            if urgency > ask.urgency and other.asks:
                other.passed += 1
        self.remove(ask)

    def first(self) -> Ask | None:
        """The next one, where any may enter."""
        return next((cls.first() for cls in self._in_turn()), None)

    def first_of(self, revisions: Collection[str | None], enters: Enters) -> Ask | None:
        """The next one that asks for one of these revisions and `enters`. Of one revision, a tenant's earliest
        request enters if any of its class does."""
        return next((ask for cls in self._in_turn() if (ask := cls.first_of(revisions, enters))), None)

    def ahead_of(self, ask: Ask) -> int:
        """How many of its class and of more urgent ones came before it: about its place in the queue."""
        classes = (cls for urgency, cls in self._classes.items() if urgency <= ask.urgency)
        return sum(other.number < ask.number for cls in classes for other in cls.asks)

    def most_urgent_beside(self, revisions: Collection[str]) -> int | None:
        """The most urgent class that waits for a revision which is not among `revisions`."""
        for urgency, cls in self._classes.items():
            known = sum(revision in cls.asking for revision in (None, *revisions))
            if len(cls.asking) > known:
                return urgency
        return None

    def _shares(self, ask: Ask) -> tuple[_Class, _Tenant, _Policy]:
        cls = self._classes[ask.urgency]
        tenant = cls.tenants[ask.tenant]
        return cls, tenant, tenant.policies[_policy_of(ask.revision)]

    def _in_turn(self) -> list[_Class]:
        waiting = [cls for cls in self._classes.values() if cls.asks]
        return sorted(waiting, key=lambda cls: cls.passed < OVERTAKES)


ShareT = TypeVar("ShareT", bound=_Share)


def _least(shares: Iterable[ShareT]) -> ShareT:
    return min((share for share in shares if share.waiting), key=attrgetter("tag", "waits_since"))


def _policy_of(revision: str | None) -> str:
    return (revision or "").rpartition("@")[0]


def _forget_idle(cls: _Class, tenant: _Tenant) -> None:
    """An idle share owes at most its last request, which is forgiven where there are many such."""
    if not cls.asks:
        cls.tenants.clear()
        cls.served, cls.given, cls.passed = 0.0, 0, 0
        return
    _sweep(tenant.policies, tenant.waiting)
    _sweep(cls.tenants, len(cls.asks))


def _sweep(shares: dict[str, ShareT], waiting: int) -> None:
    if len(shares) > 2 * waiting + SPARE:
        for name in [name for name, share in shares.items() if not share.waiting]:
            del shares[name]
