"""vLLM's executor on CPUs, which leaves the cores to what computes.

vLLM's core and its worker pass messages through shared memory. Who waits for one asks for it all the time, and sleeps
until it is told only after a second: on CPUs that takes a core from the very step that is waited for, and from a
learner beside an idle engine for a second after each look at it. Here they go to sleep after `SPIN_S`.

They are told over 0MQ, which drops what one socket sends within some milliseconds of the last (its high-water mark is
one message, and it looks for room in intervals), so `SPIN_S` has to be longer than that.
"""

from __future__ import annotations

import time

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

__all__ = ["SPIN_S", "VERSIONS", "SparingExecutor", "spin_shortly"]

VERSIONS = frozenset({"0.32.0"})
"""Those on whose internals this stands; any other keeps its own ways."""

SPIN_S = 0.01


class SparingExecutor(MultiprocExecutor):
    def _init_executor(self) -> None:
        spin_shortly()
        super()._init_executor()
        self.collective_rpc("mint_spin_shortly")


def spin_shortly() -> None:
    """For every reader in this process, from its next message on."""

    def record_read(self: SpinCondition) -> None:
        self.last_read = time.monotonic() - self.busy_loop_s + SPIN_S

    SpinCondition.record_read = record_read
