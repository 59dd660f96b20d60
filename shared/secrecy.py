"""Keeping this process's memory and environment, which hold keys, from others of the same user.

Invariant: on Linux no process without privileges can attach to it or read its `/proc/<pid>/environ`. A
program that it runs starts readable again.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_from_others"]

_PR_SET_DUMPABLE = 4


def keep_from_others() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
