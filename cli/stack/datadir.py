"""The data directory: where it is, which format it has, and the lock that one change at a time holds.

Invariant: a directory is opened only by a build that knows its format; an older format is migrated
first, a newer one refused, and a directory that is not MinT's is never written to.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cli.errors import BAD_INPUT, CliError

FORMAT = 1
VERSION_FILE = "version.json"

Migration = Callable[[Path], None]
MIGRATIONS: Sequence[Migration] = ()
"""Entry i turns format i + 1 into i + 2. The database has migrations of its own (Alembic)."""


def default_data_dir() -> Path:
    return Path(os.environ.get("MINT_DATA") or ".mint")


def read_format(data: Path) -> int | None:
    """The directory's format, or None where it is not a data directory yet."""
    try:
        content = json.loads((data / VERSION_FILE).read_text())
        return int(content["format"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CliError(f"{data / VERSION_FILE} cannot be read ({error}); restore it or use another --data") from error


def open_data_dir(
    data: Path, current: int = FORMAT, migrations: Sequence[Migration] = MIGRATIONS
) -> list[tuple[int, int]]:
    """Create or check the directory; migrate an older one. Returns the (from, to) steps made.

    Raises CliError for a newer format and for a directory with other people's files."""
    found = read_format(data)
    if found is None:
        if data.exists() and any(entry.name != "stack.lock" for entry in data.iterdir()):
            raise CliError(f"{data} holds files but is not a MinT data directory; choose another --data", BAD_INPUT)
        data.mkdir(parents=True, exist_ok=True)
        _write_format(data, current)
        return []
    if found > current:
        raise CliError(
            f"{data} has format {found}, this build knows up to {current}; run the newer build, or use another --data"
        )
    steps = []
    for number in range(found, current):
        migrations[number - 1](data)
        _write_format(data, number + 1)
        steps.append((number, number + 1))
    return steps


class Busy(CliError):
    """Another `mint` is changing this stack now."""


@contextmanager
def locked(data: Path) -> Iterator[None]:
    """Held while parts are started or stopped. Raises Busy when another `mint` does so now."""
    data.mkdir(parents=True, exist_ok=True)
    with (data / "stack.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"another mint command is starting or stopping the stack in {data}; try again") from None
        yield


def _write_format(data: Path, number: int) -> None:
    write_atomic(data / VERSION_FILE, json.dumps({"format": number}) + "\n")


def write_atomic(path: Path, text: str) -> None:
    """Write beside it, flush to disk, rename: a reader sees the old file or the new one, whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    beside.replace(path)
