"""The one door to the database: an engine, and transactions that never run on the event loop.

`write` runs a function in one transaction that excludes every other writer (BEGIN IMMEDIATE on SQLite; elsewhere those
of the same process), and again where another process wins a race for a row; `read` sees one consistent snapshot. A
function given to them must be plain, quick, free of I/O, and fit to be run again.

Invariant: a transaction is all or nothing; an exception out of the function rolls it back.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from shared.errors import MintError

P = ParamSpec("P")
R = TypeVar("R")

FILE = "catalog.db"
READERS = 4
ATTEMPTS = 3
"""Of a transaction that another process gets in the way of."""
DEADLOCKS = ("40P01", "40001")
"""As PostgreSQL calls them: one of two transactions that wait for each other, or that cannot both be, is ended."""
IMMEDIATE = "mint_immediate"


def open_engine(url: str) -> Engine:
    """An engine for `url`; on SQLite with write-ahead log, foreign keys, and explicit transactions."""
    if not url.startswith("sqlite"):
        return create_engine(url, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"check_same_thread": False, "timeout": 30.0}, pool_size=READERS + 1)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def sqlite_url(data_dir: Path) -> str:
    return f"sqlite:///{data_dir / FILE}"


def _configure_sqlite(connection: Any, record: Any) -> None:
    # The driver's own BEGIN comes too late to lock before the first read; ours is issued in _begin_sqlite.
    connection.isolation_level = None
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    immediate = connection.get_execution_options().get(IMMEDIATE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _is_race(error: DBAPIError | StaleDataError) -> bool:
    if isinstance(error, IntegrityError | StaleDataError):
        return True
    return getattr(error.orig, "sqlstate", None) in DEADLOCKS


class Database:
    """Owns the engine and the threads that use it. `committed` is called behind each write that left something in
    `session.info`, with that, in the thread of the write."""

    def __init__(self, url: str) -> None:
        self.engine = open_engine(url)
        self.committed: Callable[[Mapping[Any, Any]], None] | None = None
        self._writers = self.engine.execution_options(**{IMMEDIATE: True})
        self._write_thread = ThreadPoolExecutor(1, thread_name_prefix="catalog-write")
        self._read_threads = ThreadPoolExecutor(READERS, thread_name_prefix="catalog-read")

    async def write(self, work: Callable[Concatenate[Session, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._run(self._write_thread, lambda: self.write_now(work, *args, **kwargs))

    async def read(self, work: Callable[Concatenate[Session, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._run(self._read_threads, lambda: self.read_now(work, *args, **kwargs))

    def write_now(self, work: Callable[Concatenate[Session, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`write`, in the calling thread. Once more where another process wrote the same row meanwhile: the second
        time it is found."""
        for attempt in itertools.count(1):
            try:
                with self._transaction(self._writers) as session:
                    result = work(session, *args, **kwargs)
                break
            except (DBAPIError, StaleDataError) as error:
                if attempt == ATTEMPTS or not _is_race(error):
                    raise
        if session.info and self.committed is not None:
            self.committed(session.info)
        return result

    def read_now(self, work: Callable[Concatenate[Session, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`read`, in the calling thread."""
        with self._transaction(self.engine) as session:
            return work(session, *args, **kwargs)

    @contextmanager
    def _transaction(self, engine: Engine) -> Iterator[Session]:
        with Session(engine, expire_on_commit=False) as session, session.begin():
            try:
                yield session
            except MintError:
                raise
            except BaseException:
                # An unread result that the traceback keeps alive would hold its old snapshot on the
                # connection, and whoever gets that connection next could not write ("database is locked").
                session.invalidate()
                raise

    async def _run(self, pool: ThreadPoolExecutor, call: Callable[[], R]) -> R:
        # The span that is current here must be current in the thread too: rows keep its trace context.
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: context.run(call))

    def close(self) -> None:
        """Waits for the transactions that have begun."""
        self._write_thread.shutdown(wait=True)
        self._read_threads.shutdown(wait=True)
        self.engine.dispose()
