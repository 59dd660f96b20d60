"""Every object key of the system, in one place.

Files that a worker writes live under an attempt path until a committed row names them; what no row
names and is older than a day is swept. Blobs are named by their own hash.
"""

from __future__ import annotations

BLOBS = "blobs/sha256/"
ATTEMPTS = "attempts/"
DATA = "data/"


def blob(sha256: str) -> str:
    """An adapter file, shared by every revision with the same bytes."""
    return f"{BLOBS}{sha256}"


def attempt(run_id: str, command_id: str, attempt_id: str, name: str) -> str:
    """A file of one attempt at one command; `command_id` may hold colons, which become dashes."""
    return f"{ATTEMPTS}{run_id}/{command_id.split(':', 1)[-1].replace(':', '-')}/{attempt_id}/{name}"


def data(tenant: str, sha256: str) -> str:
    """A tenant's own uploaded file."""
    return f"{DATA}{tenant}/{sha256}"
