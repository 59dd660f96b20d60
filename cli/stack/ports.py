"""Which ports the stack listens on: the usual ones, the ones it had before, or free ones instead."""

from __future__ import annotations

from collections.abc import Callable, Collection

import psutil

from cli.stack.file import HOST
from shared.ports import free_port, is_free

USUAL: dict[str, int] = {
    "nats": 4222,
    "nats_monitor": 8222,
    "s3": 8333,
    "s3_grpc": 8334,
    "s3_master": 8335,
    "s3_master_grpc": 8336,
    "s3_volume": 8337,
    "s3_volume_grpc": 8338,
    "s3_filer": 8339,
    "s3_filer_grpc": 8340,
    "gateway": 8700,
    "catalog": 8701,
    "rollout": 8702,
    "learner": 8703,
    "exporter": 8704,
    "evaluator": 8705,
    "serving": 8706,
}
STORE_PORTS = tuple(name for name in USUAL if name.startswith(("nats", "s3")))


def free_ports(count: int, avoid: Collection[int] = ()) -> list[int]:
    """`count` distinct free ports."""
    chosen: list[int] = []
    while len(chosen) < count:
        port = free_port(HOST)
        if port not in avoid and port not in chosen:
            chosen.append(port)
    return chosen


def choose(
    names: Collection[str],
    remembered: dict[str, int],
    in_use_by_us: Collection[str],
    say: Callable[[str], None],
    any_free: bool = False,
) -> dict[str, int]:
    """A port for every name; one that is not in USUAL gets a free one.

    Names in `in_use_by_us` keep theirs; for a taken one, `say` names the port and its holder, and a free
    one is taken instead. `any_free` takes free ones from the start."""
    ports = {name: remembered[name] for name in in_use_by_us if name in remembered}
    missing = [name for name in names if name not in ports]
    fresh = dict(zip(missing, free_ports(len(missing), avoid=set(USUAL.values())), strict=True))
    for name in missing:
        wanted = remembered.get(name) or (None if any_free else USUAL.get(name))
        if wanted is None:
            ports[name] = fresh[name]
        elif wanted not in ports.values() and is_free(wanted):
            ports[name] = wanted
        else:
            ports[name] = fresh[name]
            say(f"port {wanted} for {name} is taken{_holder(wanted)}; using {fresh[name]}")
    return ports


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr[1] == port
            if listens and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        return ""
    return ""
