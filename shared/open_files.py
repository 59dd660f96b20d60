"""How many files, and so connections, this process may have open.

A request that waits holds a connection for as long as it waits, and systems start a process with a bound that a few
hundred such reach. Invariant: the bound is never lowered, and never raised beyond what the system allows.
"""

from __future__ import annotations

import resource
from contextlib import suppress

__all__ = ["allow_more"]

MOST = 1 << 16


def allow_more() -> int:
    """Raise the bound to what the system allows, at most 65,536. Returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return soft
    wanted = hard
    if hard == resource.RLIM_INFINITY or hard > MOST:
        wanted = max(soft, MOST)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
