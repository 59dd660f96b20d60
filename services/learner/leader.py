"""The leading process: it runs the service, and the others do what it does to the base.

In: turns of the workbenches it opened, from their threads. Out: orders to the other processes, one at a
time. Invariant: an order is given to all before the leader does its own part, and no other one is given
until that is done.
"""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from services.learner.group_bench import GroupBench, keys_of
from services.learner.one_operation import TurnOutcome, TurnRequest
from services.learner.ranks import Leave, Order, Ranks, Steps, end_process
from services.learner.workbench import Placed
from shared.errors import Retryable

__all__ = ["LeadBench", "Leader"]

_log = logging.getLogger(__name__)

End = Callable[[str], NoReturn]


class Leader:
    """`end` is called when the processes can no longer be kept in step."""

    def __init__(self, ranks: Ranks, end: End = end_process) -> None:
        self.ranks, self._end = ranks, end
        self._lock = threading.Lock()
        self._left = False

    def lead(self, order: Order, part: Callable[[], Any]) -> Any:
        """Give an order and do this process's part of it. What cannot be pickled raises, and is not given."""
        told = pickle.dumps(order)
        with self._lock:
            if self._left:
                raise Retryable("the learner is shutting down; another one takes the step", delay_s=0.0)
            try:
                self.ranks.peers.hear(told)
                return part()
            except Exception as error:
                _log.critical("the order %s failed", type(order).__name__, exc_info=True)
                self._end(f"the leader cannot go on: {error}")

    def close(self, patience_s: float) -> None:
        """Let the others go. A turn that does not end in time is left to the end of the process."""
        if self._left or not self._lock.acquire(timeout=patience_s):
            return
        try:
            self._left = True
            self.ranks.heartbeat.stop()
            self.ranks.peers.hear(pickle.dumps(Leave()))
        finally:
            self._lock.release()


class LeadBench(GroupBench):
    """The leader's own: each of its turns is one of all processes."""

    def __init__(self, *arguments: Any, leader: Leader) -> None:
        super().__init__(*arguments, peers=leader.ranks.peers)
        self._leader = leader
        self._noting = threading.Lock()
        self._busy: frozenset[str] = frozenset()

    def steps(self, requests: Sequence[TurnRequest]) -> list[TurnOutcome | Exception]:
        with self._noting:
            # From here until the turn took them, what these slots hold is what the others are told.
            self._busy = frozenset(key for key, _ in keys_of(requests))
            held = self.held(requests)
        told = [replace(request, check=_go_on) for request in requests]
        try:
            answers: list[TurnOutcome | Exception] = self._leader.lead(
                Steps(self.base.name, told, held), lambda: self.take_turn(requests, held)
            )
            return answers
        finally:
            self._busy = frozenset()

    def keep(self, outcome: Placed, holds: str) -> None:
        with self._noting:
            if outcome.slot.policy not in self._busy:
                super().keep(outcome, holds)


def _go_on() -> None:
    return None
