"""Taking away from this process, for good, what scoring needs none of; uses the standard library alone.

In: nothing but this process, after its imports. Out: the same process, in which a file can be read only
below the Python installation and none be written, no program and no connection be opened, no other process
be reached. Two walls, neither of which is trusted alone: the kernel ends the process at a forbidden call
(seccomp; Linux on x86-64 and aarch64), and an audit hook of the interpreter ends it at
anything that it does not know to be harmless. Invariant: what is taken away does not come back.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

_FORBIDDEN = {
    "x86_64": (
        *(59, 322, 41, 42, 53, 49, 50, 101, 62, 200, 234, 129, 297, 310, 311, 434, 438, 424, 437, 303, 304),
        *(82, 264, 316, 87, 263, 83, 258, 84, 86, 265, 88, 266, 90, 91, 268, 92, 93, 94, 260, 76, 77, 85, 133, 259),
        *(112, 109, 160, 165, 166, 161, 272, 308, 321, 298, 425, 250, 248, 249, 323, 319, 188, 189, 190, 280, 235, 132),
    ),
    "aarch64": (
        *(221, 281, 198, 203, 199, 200, 201, 117, 129, 130, 131, 138, 240, 270, 271, 434, 438, 424, 437, 264, 265),
        *(38, 276, 35, 34, 37, 36, 52, 53, 54, 55, 45, 46, 33, 157, 154, 164, 40, 39, 51, 97, 268, 280, 241, 425),
        *(219, 217, 218, 282, 279, 5, 6, 7, 88),
    ),
}
"""By number: programs, connections, other processes, and whatever changes files, mounts or privileges."""
_FORBIDDEN_IN_A_FORK = {"x86_64": (56, 57, 58, 435, 38, 157, 317), "aarch64": (220, 435, 103, 167, 277)}
"""New processes and threads, timers, and what this module itself calls."""
_OPENING = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}
"""Each call that opens a file, with the place of its flags."""
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_KILL, _ALLOW = 0x80000000, 0x7FFF0000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

_HARMLESS = frozenset(
    ("compile", "exec", "marshal.loads", "code.__new__", "function.__new__", "array.__new__", "builtins.id")
    + ("sys._getframe", "sys.unraisablehook", "sys.excepthook", "os.putenv", "os.unsetenv", "glob.glob", "os.walk")
    + ("object.__getattr__", "object.__setattr__", "object.__delattr__")
)
_NOT_IMPORTED = frozenset(
    ("ctypes", "_ctypes", "subprocess", "_posixsubprocess", "multiprocessing", "_multiprocessing", "_posixshmem")
    + ("socket", "_socket", "mmap", "fcntl", "pty", "resource", "faulthandler", "gc", "_testcapi", "_xxsubinterpreters")
)

_libc = ctypes.CDLL(None, use_errno=True)
_prctl: Callable[..., int] = _libc.prctl


def end_with_parent(parent: int) -> None:
    """Die when `parent` does, which is a process of one thread: the kernel watches threads."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def give_up_writing() -> None:
    """No file grows, no core is dumped, and no program run from here has more rights than this process."""
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    _prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


class Filter:
    """A system call filter, made ready: once the hook is in place nothing of `ctypes` can be made."""

    def __init__(self, in_a_fork: bool) -> None:
        program = _program(platform.machine(), in_a_fork)
        self._code = ctypes.create_string_buffer(program, len(program))
        self._header = ctypes.create_string_buffer(
            struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(self._code)), 16
        )

    def install(self) -> None:
        """Where the kernel has no filters, the hook is the only wall."""
        _prctl(PR_SET_SECCOMP, 2, self._header, 0, 0)


def _program(machine: str, in_a_fork: bool) -> bytes:
    """Classic BPF over `struct seccomp_data`: number at 0, architecture at 4, arguments from 16."""
    if machine not in _FORBIDDEN or sys.byteorder != "little":
        return struct.pack("HBBI", _RETURN, 0, 0, _ALLOW)
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURE[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    # Numbers from here on are the x32 twins of the forbidden ones.
    code += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
    for number in _FORBIDDEN[machine] + (_FORBIDDEN_IN_A_FORK[machine] if in_a_fork else ()):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _KILL)]
    for number, flags in _OPENING[machine]:
        code += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, 16 + 8 * flags), (_ANY_BIT, 0, 1, _WRITES)]
        code += [(_RETURN, 0, 0, _KILL), (_RETURN, 0, 0, _ALLOW)]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def refuse(status: int, forks: Callable[[], bool]) -> None:
    """Add the hook, which ends the process with `status`. `forks` says whether a fork is the process's own."""
    sys.addaudithook(_hook(status, forks))
    for name in ("_signal", "signal"):
        vars(sys.modules[name]).pop("raise_signal", None)
    for name in ("_posixsubprocess", "_testcapi"):
        if name in sys.modules:
            vars(sys.modules[name]).clear()


def _hook(status: int, forks: Callable[[], bool]) -> Callable[[str, tuple[Any, ...]], None]:
    # Bound here, and asked only what exact strings answer: a completion may change any module's names.
    end, roots, harmless, not_imported = os._exit, _roots(), _HARMLESS, _NOT_IMPORTED
    writes = _WRITES
    listing, kind, text, number = frozenset(("os.listdir", "os.scandir")), type, str, int

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in harmless:
            return
        if event == "import":
            if kind(arguments[0]) is text and arguments[0] not in not_imported:
                return
        elif event == "open" or event in listing:
            path, flags = arguments[0], 0 if event in listing else arguments[2]
            inside = kind(path) is text and path.startswith(roots) and ".." not in path
            if inside and kind(flags) is number and not flags & writes:
                return
        elif event == "os.fork" and forks():
            return
        end(status)

    return hook


def _roots() -> tuple[str, ...]:
    """Where Python and its libraries are, as found and with links followed."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {sysconfig.get_path(name) for name in names}
    paths |= {sysconfig.get_path(name, vars={"base": sys.base_prefix, "platbase": sys.base_prefix}) for name in names}
    return tuple(sorted({f"{found}/" for path in paths if path for found in (path, os.path.realpath(path))}))
