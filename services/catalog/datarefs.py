"""A tenant's own data: which references a request may name, and reading them with reasons for people."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from mint_schemas.common import FileRef
from mint_schemas.training import (
    Grpo,
    JsonlMessages,
    JsonlPairs,
    JsonlPrompts,
    Task,
    TaskDemonstrations,
    TrainRequested,
)
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog.clock import iso
from services.catalog.cursors import page
from services.catalog.tables import DataRow, FileRow
from shared.catalog.api import DataView, Page
from shared.errors import Refused
from shared.store import keys
from shared.store.port import BytesDiffer, ObjectMissing, ObjectStore


class DataProblem(Exception):
    """A reference that cannot be used; the message says why and what to do."""


def data_reader(store: ObjectStore, tenant: str) -> Callable[[FileRef], Awaitable[bytes]]:
    """Reads data of one tenant, verified. Raises DataProblem, and Retryable when the store is away."""

    async def read(ref: FileRef) -> bytes:
        # A store that cleans its paths would take "data/mine/../yours/x" for another tenant's file.
        if not ref.key.startswith(keys.data(tenant, "")) or not {"", ".", ".."}.isdisjoint(ref.key.split("/")):
            raise DataProblem(
                f"{ref.key} is no data of tenant {tenant}; its keys begin with {keys.data(tenant, '')}, "
                "upload with `mint data put FILE` and use the reference that it prints"
            )
        size = await store.size(ref.key)
        if size is None:
            raise DataProblem(f"there is no data at {ref.key}; upload it with `mint data put FILE`")
        if size != ref.size:
            raise DataProblem(f"the data at {ref.key} has {size} bytes, the reference says {ref.size}")
        try:
            return await store.get(ref)
        except ObjectMissing:
            raise DataProblem(f"there is no data at {ref.key}; upload it with `mint data put FILE`") from None
        except BytesDiffer:
            raise DataProblem(
                f"the data at {ref.key} has another sha256 than the reference ({ref.sha256}); upload it again"
            ) from None

    return read


def register(session: Session, tenant: str, ref: FileRef, now: float) -> FileRef:
    """Name an uploaded file, so that it stays. The same bytes again: the reference that exists."""
    row = session.get(DataRow, (tenant, ref.sha256))
    if row is None:
        row = DataRow(tenant=tenant, sha256=ref.sha256, key=ref.key, size=ref.size, created_at=now)
        session.add(row)
        if session.get(FileRow, ref.key) is None:
            session.add(FileRow(key=ref.key, sha256=ref.sha256, size=ref.size, owner=f"data of {tenant}"))
    return FileRef(key=row.key, sha256=row.sha256, size=row.size)


def named_by(request: TrainRequested) -> list[FileRef]:
    """The files of its tenant that a request trains or is scored on."""
    method, evaluation = request.method, request.evaluation
    parts = [method.task if isinstance(method, Grpo) else method.data, evaluation.task if evaluation else None]
    inner = [part.task if isinstance(part, TaskDemonstrations) else part for part in parts]
    return [part.data for part in inner if isinstance(part, JsonlPrompts | JsonlMessages | JsonlPairs)]


def of_task(task: Task) -> list[FileRef]:
    return [task.data] if isinstance(task, JsonlPrompts) else []


def keep(session: Session, request: TrainRequested) -> None:
    """Name what an accepted request names, so that it stays: its upload may have died before its own row."""
    keep_files(session, request.policy.split("/", 1)[0], named_by(request))


def keep_files(session: Session, tenant: str, refs: Iterable[FileRef]) -> None:
    for key, ref in {ref.key: ref for ref in refs}.items():
        if session.get(FileRow, key) is None:
            session.add(FileRow(key=key, sha256=ref.sha256, size=ref.size, owner=f"data of {tenant}"))


def list_data(session: Session, tenant: str, limit: int, cursor: str | None) -> Page[DataView]:
    """In order of sha256, which the key of the table gives without sorting."""
    query = select(DataRow).where(DataRow.tenant == tenant)
    return page(session, query, DataRow.sha256, limit, cursor, _view, descending=False)


def _view(row: DataRow) -> DataView:
    return DataView(key=row.key, sha256=row.sha256, size=row.size, created_at=iso(row.created_at))


def find(session: Session, tenant: str, sha256: str) -> FileRef:
    """Raises Refused (404)."""
    row = session.get(DataRow, (tenant, sha256))
    if row is None:
        raise Refused(f"tenant {tenant} has no data with sha256 {sha256[:64]}", code="not_found", status=404)
    return FileRef(key=row.key, sha256=row.sha256, size=row.size)
