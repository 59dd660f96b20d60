"""What a transaction has to say once it is committed: which operations are over, which files nobody needs any more.

In: calls from within a transaction. Out: a mapping that `Database` hands to its listener behind the commit. Invariant:
a transaction that is rolled back says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy.orm import Session

__all__ = ["ended", "ended_in", "freed", "freed_in"]

_ENDED, _FREED = "ended", "freed"


def ended(session: Session, name: str) -> None:
    """An operation by its request id, or one more sample of the sampler with that id."""
    session.info.setdefault(_ENDED, []).append(name)


def freed(session: Session, keys: Iterable[str]) -> None:
    session.info.setdefault(_FREED, []).extend(keys)


def ended_in(told: Mapping[Any, Any]) -> list[str]:
    return list(told.get(_ENDED, ()))


def freed_in(told: Mapping[Any, Any]) -> list[str]:
    return list(told.get(_FREED, ()))
