"""The index of the disk tier: which adapters are there, how large, least recently used first.

Read from the directory once, at start; from then on the files' owner tells it. Invariant: no question to
it costs more with more adapters on disk.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path

PARTIAL = ".partial-"


@dataclass(frozen=True)
class Stamp:
    """What changes with a file's content, unless someone who may write anything hides it: its change time
    cannot be set from outside the kernel."""

    size: int
    inode: int
    modified_ns: int
    changed_ns: int


Stamps = dict[str, Stamp]


@dataclass
class OnDisk:
    """`proved` = how the files looked just before this process hashed them; None = not yet hashed."""

    bytes: int
    proved: Stamps | None = None


class DiskIndex:
    def __init__(self, root: Path) -> None:
        found = [
            (entry.stat().st_mtime_ns, entry.name, _bytes(entry.path))
            for entry in os.scandir(root)
            if entry.is_dir() and not entry.name.startswith(PARTIAL)
        ]
        self._entries = OrderedDict((name, OnDisk(size)) for _, name, size in sorted(found))
        self.bytes = sum(entry.bytes for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def digests(self) -> list[str]:
        """Least recently used first."""
        return list(self._entries)

    def get(self, digest: str) -> OnDisk | None:
        return self._entries.get(digest)

    def use(self, digest: str) -> None:
        self._entries.move_to_end(digest)

    def add(self, digest: str, size: int, proved: Stamps) -> None:
        self.remove(digest)
        self._entries[digest] = OnDisk(size, proved)
        self.bytes += size

    def remove(self, digest: str) -> None:
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self.bytes -= entry.bytes

    def oldest(self, protected: Set[str]) -> str | None:
        """The first to leave; looks at no more entries than are protected, and one."""
        return next((digest for digest in self._entries if digest not in protected), None)


def stamps(directory: Path, names: Iterable[str]) -> Stamps | None:
    """None when a file is missing."""
    found = {}
    for name in names:
        try:
            stat = (directory / name).stat()
        except FileNotFoundError:
            return None
        found[name] = Stamp(stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
    return found


def _bytes(directory: str) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(directory) if entry.is_file())
