"""The other processes of a group: they load what the leader loads and step where it steps.

In: the leader's orders. Out: nothing but their part of each pass. Invariant: a follower decides nothing,
talks to no bus and writes no file.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
from collections.abc import Callable
from typing import NoReturn

from services.learner.group_bench import GroupBench
from services.learner.ranks import Leave, Open, Ranks, Steps, end_process
from shared.bases import load_base
from shared.errors import Fatal
from shared.telemetry import setup_logging

__all__ = ["follow", "run_follower"]

_log = logging.getLogger(__name__)

OpenBench = Callable[[Open, Ranks], GroupBench]


def run_follower(ranks: Ranks, log_level: str, open_bench: OpenBench) -> NoReturn:
    """Until the leader leaves, then end with 0; with 1 after a failure (see the log).

    A signal to stop is the leader's to answer: it may be in the middle of a pass that needs this process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    setup_logging(f"learner-{ranks.peers.rank}", log_level)
    try:
        follow(ranks, open_bench)
    except Exception as error:
        _log.critical("an order failed", exc_info=not isinstance(error, Fatal))
        end_process(str(error))
    logging.shutdown()
    os._exit(0)


def follow(ranks: Ranks, open_bench: OpenBench) -> None:
    """Returns when the leader leaves. Raises when this process cannot do what it is told, or the leader is
    gone."""
    benches: dict[str, GroupBench] = {}
    while True:
        match pickle.loads(ranks.peers.hear(b"")):
            case Open() as order:
                _same_files(order)
                benches[order.base.name] = open_bench(order, ranks)
            case Steps() as order:
                benches[order.base].take_turn(order.requests, order.held)
            case Leave():
                return


def _same_files(order: Open) -> None:
    """On another machine the directory may be another one."""
    base = order.base
    found = load_base(base.name, base.token, base.directory, base.max_rank).sha256
    if found != base.sha256:
        raise Fatal(f"{base.directory} has base {found[:12]}… here, the leader's is {base.sha256[:12]}…")
