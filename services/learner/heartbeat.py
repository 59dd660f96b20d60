"""Whether all processes of a group are alive, seen by each of them within seconds, idle or at work.

Every process's thread adds to one sum a second, over connections that nothing else uses. Invariant: when
one process is gone each of the others hears `lost`, unless the first had said before that all may go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

__all__ = ["Heartbeat"]

EVERY_S = 1.0


class Heartbeat:
    """`alive` is a gloo group of its own; its timeout is how long a silent process may stay silent."""

    def __init__(self, alive: dist.ProcessGroup, lost: Callable[[str], None]) -> None:
        self._alive, self._lost = alive, lost
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self, patience_s: float = 10.0) -> None:
        """End the beats of all processes, of whichever process says it, so that they may go one by one."""
        self._leaving.set()
        self._thread.join(patience_s)

    def _beat(self) -> None:
        while True:
            leaving = torch.tensor([int(self._leaving.is_set())])
            try:
                dist.all_reduce(leaving, group=self._alive)
            except RuntimeError as error:
                self._lost(f"a process of this base's group is gone: {error}")
                return
            if leaving.item():
                return
            self._leaving.wait(EVERY_S)
