"""Files that are whole or not there: written beside their place and renamed when complete."""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path

__all__ = ["digest", "partial", "write_whole"]

_CHUNK = 1 << 20


def digest(data: bytes | Path) -> tuple[str, int]:
    """(sha256 in hex, size in bytes) of bytes or of a file, read in pieces."""
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest(), len(data)
    hasher, size = hashlib.sha256(), 0
    with data.open("rb") as file:
        while piece := file.read(_CHUNK):
            hasher.update(piece)
            size += len(piece)
    return hasher.hexdigest(), size


def partial(path: Path) -> Path:
    """A name of its own beside `path`, so that two downloads of one file never share bytes."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")


def write_whole(path: Path, content: bytes) -> None:
    """Blocks. Creates the parent directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = partial(path)
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
