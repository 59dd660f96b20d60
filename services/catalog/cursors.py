"""Pages by cursor: an opaque text that says after which row to go on, stable while rows are added."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel
from sqlalchemy import ColumnElement, Select
from sqlalchemy.orm import InstrumentedAttribute, Session

from shared.catalog.api import Page
from shared.errors import Refused

V = TypeVar("V", bound=BaseModel)

MAX_LIMIT = 500
MAX_NUMBER = 2**63 - 1


def page(
    session: Session,
    query: Select[Any],
    key: InstrumentedAttribute[Any],
    limit: int,
    cursor: str | None,
    view: Callable[[Any], V],
    descending: bool = True,
    after: Any = None,
) -> Page[V]:
    """`limit` rows in order of `key`, which is unique; only those behind `after`, wherever the cursor is.
    Raises Refused for a cursor that is none of ours."""
    limit = max(1, min(limit, MAX_LIMIT))
    lasts = ([_decode(cursor, key)] if cursor else []) + ([after] if after is not None else [])
    if lasts:
        # One bound: of two, SQLite would seek the first and walk to the second.
        query = query.where(_after(key, min(lasts) if descending else max(lasts), descending))
    rows: Sequence[Any] = session.scalars(query.order_by(key.desc() if descending else key).limit(limit + 1)).all()
    more = len(rows) > limit
    following = _encode(getattr(rows[limit - 1], key.key)) if more else None
    return Page(items=[view(row) for row in rows[:limit]], next_cursor=following)


def _after(key: InstrumentedAttribute[Any], last: Any, descending: bool) -> ColumnElement[bool]:
    return key.__lt__(last) if descending else key.__gt__(last)


def _encode(value: object) -> str:
    return base64.urlsafe_b64encode(str(value).encode()).decode().rstrip("=")


def _decode(cursor: str, key: InstrumentedAttribute[Any]) -> Any:
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        if key.type.python_type is not int:
            return text
        if not 0 <= (number := int(text)) <= MAX_NUMBER:
            raise ValueError(text)
        return number
    except ValueError:
        raise Refused(f"{cursor[:80]!r} is no cursor of this list; start again without one") from None
