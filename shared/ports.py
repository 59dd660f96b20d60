"""Free TCP ports on this machine, from below the range that the kernel gives to outgoing connections:
one from inside it may be the near end of anybody's connection by the time that a server binds it."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port", "is_free"]

_FIRST, _LAST = 15_000, 32_000


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on it now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listened on a moment ago; whoever binds it later must still expect it taken.
    Raises OSError when a thousand tries find none."""
    for _ in range(1000):
        port = random.SystemRandom().randint(_FIRST, _LAST)
        if is_free(port, host):
            return port
    raise OSError(f"found no free TCP port between {_FIRST} and {_LAST}; see what listens on this machine")
