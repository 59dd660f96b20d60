"""Groups of processes for tests: each runs one scene, and what process r found goes to `rank<r>.pt`.

They are forked from a server that has imported everything once. Scenes read the tiny base from `base` of
their directory.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Awaitable, Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.learner.app import follow_bench, lead_bench
from services.learner.follower import follow
from services.learner.group_bench import GroupBench
from services.learner.leader import Leader
from services.learner.peers import OutOfStep
from services.learner.ranks import Open, Ranks, end_process, join
from services.learner.workbench import Workbench
from tests.unit.learner import job_scenes, operation_scene, scenes

PATIENCE_S = 60.0
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["tests.unit.learner.rank_process"])


def primitives(ranks: Ranks, directory: Path) -> dict[str, Any]:
    rig = scenes.Rig.of(directory / "base", ranks)
    found = scenes.everything(rig, torch.load(directory / "others.pt", weights_only=False))
    shares = {name: (p.to_local().numel(), p.numel()) for name, p in rig.base.module.named_parameters()}
    return found | {"shares": shares}


def jobs(ranks: Ranks, directory: Path) -> dict[str, Any]:
    """The first process has the store and the commands, the others the production loop."""
    return _led(ranks, directory, job_scenes.jobs)


def operations(ranks: Ranks, directory: Path) -> dict[str, Any]:
    """Likewise, with a catalog in the first process."""
    return _led(ranks, directory, operation_scene.operations)


def _led(ranks: Ranks, directory: Path, scene: Callable[[Workbench], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    if not ranks.leads:
        follow(ranks, follow_bench)
        return {}
    leader = Leader(ranks)
    bench = lead_bench(job_scenes.tiny_base(directory / "base"), job_scenes.SETTINGS, leader)

    async def play() -> dict[str, Any]:
        return await scene(bench)

    found = asyncio.run(play())
    leader.close(PATIENCE_S)
    return found


def drift(ranks: Ranks, directory: Path) -> dict[str, Any]:
    """As `jobs`, with a follower whose slots are not what the leader's are."""
    if ranks.leads:
        return jobs(ranks, directory)
    follow(ranks, _drifting_bench)
    return {}


class _Drifting(GroupBench):
    def take_turn(self, requests: Any, held: Any) -> Any:
        for slot in self._slots._slots.values():
            slot.buffers.second[0] = 1.0
        return super().take_turn(requests, held)


def _drifting_bench(order: Open, ranks: Ranks) -> GroupBench:
    bench = follow_bench(order, ranks)
    bench.__class__ = _Drifting
    return bench


def differ(ranks: Ranks, directory: Path) -> dict[str, Any]:
    ranks.peers.agree("their number", str(ranks.peers.size))
    try:
        ranks.peers.agree("their rank", str(ranks.peers.rank))
    except OutOfStep as error:
        return {"error": str(error)}
    return {}


def idle(ranks: Ranks, directory: Path) -> dict[str, Any]:
    """A leader that gives no order."""
    _say(ranks, directory)
    if ranks.leads:
        time.sleep(600)
    follow(ranks, follow_bench)
    return {}


def busy(ranks: Ranks, directory: Path) -> dict[str, Any]:
    """Passes until the end of the process."""
    rig = scenes.Rig.of(directory / "base", ranks)
    while True:
        scenes.forward(rig)
        _say(ranks, directory)


def _say(ranks: Ranks, directory: Path) -> None:
    (directory / f"ready{ranks.peers.rank}").touch()


SCENES = {f.__name__: f for f in (primitives, jobs, operations, drift, differ, idle, busy)}


def start(scene: str, directory: Path, size: int = 2) -> list[BaseProcess]:
    """One process for each rank, in order."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    group: list[BaseProcess] = [
        _FORK.Process(target=_run, args=(rank, size, port, scene, directory)) for rank in range(size)
    ]
    for process in group:
        process.start()
    return group


def wait_for(marks: list[Path]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < deadline, f"not all of {[mark.name for mark in marks]} came"
        time.sleep(0.05)


def codes(group: list[BaseProcess]) -> list[int | None]:
    """Their exit codes once all have ended; None for one that had to be killed."""
    deadline = time.monotonic() + PATIENCE_S
    found = []
    for process in group:
        process.join(max(0.0, deadline - time.monotonic()))
        found.append(process.exitcode)
    for process in group:
        process.kill()
        process.join()
    return found


def results(directory: Path, size: int = 2) -> list[dict[str, Any]]:
    return [torch.load(directory / f"rank{rank}.pt", weights_only=False) for rank in range(size)]


def _run(rank: int, size: int, port: int, scene: str, directory: Path) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    ranks = join("cpu")
    if ranks is None:
        end_process("started without others")
    torch.save(SCENES[scene](ranks, directory), directory / f"rank{rank}.pt")
    ranks.heartbeat.stop()
    dist.destroy_process_group()
