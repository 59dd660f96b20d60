"""`tinker://<model id>/<kind>/<name>`: read, written, and refused in words before anyone is asked.

Invariant: no part of a path that passes is empty, `.` or `..`, or holds a slash, a control character or a blank at
its ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.errors import Refused

__all__ = ["Kind", "TinkerPath", "checkpoint_path", "checked_name", "parse_path"]

Kind = Literal["weights", "sampler_weights"]

SCHEME = "tinker://"
MAX_PART = 200
KINDS = "the kind being weights or sampler_weights"


@dataclass(frozen=True)
class TinkerPath:
    model_id: str
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"


def parse_path(text: str) -> TinkerPath:
    """Raises Refused (400, `invalid_path`)."""
    model_id, _, rest = text.removeprefix(SCHEME).partition("/")
    kind, _, name = rest.partition("/")
    if not text.startswith(SCHEME) or not rest or not name:
        raise _bad(f"{text[:200]!r} is no checkpoint path; write {SCHEME}<training run>/<kind>/<name>, {KINDS}")
    return checkpoint_path(model_id, kind, name)


def checkpoint_path(run_id: str, kind: str, name: str) -> TinkerPath:
    """Of a training run and the two parts of a checkpoint id. Raises Refused (400, `invalid_path`)."""
    if kind not in ("weights", "sampler_weights"):
        raise _bad(f"{kind[:80]!r} is no kind of checkpoint: {KINDS}")
    checked: Kind = "weights" if kind == "weights" else "sampler_weights"
    return TinkerPath(checked_name(run_id, "training run"), checked, checked_name(name, "checkpoint name"))


def checked_name(text: str, what: str) -> str:
    """Raises Refused (400, `invalid_path`)."""
    faulty = text in ("", ".", "..") or "/" in text or not text.isprintable() or text != text.strip()
    if faulty or len(text) > MAX_PART:
        raise _bad(f"{text[:80]!r} is no {what}: 1 to {MAX_PART} printable characters without '/', and not '..'")
    return text


def _bad(message: str) -> Refused:
    return Refused(message, code="invalid_path")
