"""This process among those that hold one base together: started by torchrun, the first of them leads.

In: the environment that torchrun gives (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). Out: the
groups to talk over, and the orders that are talked. Invariant: a process that can no longer do what the
others do ends with code 1, and then they all do.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from services.learner.config import LearnerSettings
from services.learner.heartbeat import Heartbeat
from services.learner.one_operation import TurnRequest
from services.learner.peers import Group
from services.learner.slots import SlotShape
from shared.bases import Base
from shared.errors import Fatal

__all__ = ["Held", "Leave", "Open", "Order", "Ranks", "Steps", "end_process", "join"]

_log = logging.getLogger(__name__)

# A process may be idle for as long as nobody trains; whether it is alive is the heartbeat's to say.
_IDLE = timedelta(days=365)
_SILENT = timedelta(minutes=5)


@dataclass(frozen=True)
class Ranks:
    """`device`: of this process's shards and slots."""

    peers: Group
    mesh: DeviceMesh
    device: str
    heartbeat: Heartbeat

    @property
    def leads(self) -> bool:
        return self.peers.rank == 0


@dataclass(frozen=True)
class Held:
    """What the leader's slot of `key` holds."""

    key: str
    shape: SlotShape
    holds: str | None


@dataclass(frozen=True)
class Open:
    """Load a base; what is not of this process alone comes from the leader's settings."""

    base: Base
    settings: LearnerSettings


@dataclass(frozen=True)
class Steps:
    """Take one turn at the base named `base`."""

    base: str
    requests: Sequence[TurnRequest]
    held: Sequence[Held]


@dataclass(frozen=True)
class Leave:
    """The service ends."""


Order = Open | Steps | Leave


def end_process(reason: str) -> NoReturn:
    """At once, whatever other threads are waiting for; the commands in hand come again elsewhere."""
    _log.critical("this process of the group ends: %s", reason)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(1)


def join(device: str, lost: Callable[[str], None] = end_process) -> Ranks | None:
    """Meet the other processes; None when there are none. Blocks until all are there.

    `device`: cpu or cuda, of which each process takes the one of its LOCAL_RANK. `lost` hears, in a
    thread of its own, that a process is gone. Raises Fatal for another device."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        return None
    if device not in ("cpu", "cuda"):
        raise Fatal(f"MINT_LEARNER_DEVICE is {device!r}; over {size} processes it is cpu or cuda")
    own = device
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local)
        own = f"cuda:{local}"
    store, rank, size = _store()
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    control = dist.new_group(backend="gloo", timeout=_IDLE)
    alive = dist.new_group(backend="gloo", timeout=_SILENT)
    mesh = init_device_mesh(device, (size,))
    return Ranks(Group(control), mesh, own, Heartbeat(alive, lost))


def _store() -> tuple[dist.Store, int, int]:
    """Where processes leave their addresses, this process's rank, their number."""
    store, rank, size = next(rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun keeps its store when it starts the processes again, with the addresses of the dead ones in it
        store = dist.PrefixStore(f"start-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    return store, rank, size
