"""Migrations and numbers: an empty directory becomes current, a newer one is refused, nothing is skipped."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from services.catalog.database import Database, sqlite_url
from services.catalog.migrate import SCRIPTS, migrate
from services.catalog.operation_tables import FileUseRow
from services.catalog.register import register
from services.catalog.tables import AliasRow, PolicyRow, RevisionRow, RunRow, Table
from shared.errors import Fatal
from tests.catalog_kit import Lab, eventually, sft


def test_an_empty_directory_becomes_what_the_tables_say(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path))
    migrate(database.engine, str(tmp_path))
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    database.close()


def test_migrating_again_changes_nothing_and_keeps_the_rows(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    run_id = lab.request(sft())
    migrate(lab.database.engine, str(tmp_path))
    assert lab.run(run_id) is not None
    lab.close()


def _upgrade(database: Database, schema: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    with database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, schema)


def test_an_older_directory_is_brought_up_to_date_with_its_rows(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path))
    _upgrade(database, "0001")
    columns = "run_id, token, state, steps, outcome, request, request_source, request_id, traceparent, created_at"
    values = "'r', 't', 'completed', 1, 'promoted', '{}', 's', 'i', 'x', 0.0"
    with database.engine.begin() as connection:
        connection.exec_driver_sql(f"INSERT INTO runs ({columns}, promoted) VALUES ({values}, 1)")
    migrate(database.engine, str(tmp_path))
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
    kept = database.read_now(lambda session: session.scalars(select(RunRow)).one())
    assert (kept.run_id, kept.outcome, kept.promoted, kept.picked) == ("r", "promoted", True, None)
    database.close()


def test_the_revisions_of_an_older_directory_use_their_files(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path))
    _upgrade(database, "0003")
    ref = '{"key": "blobs/sha256/x", "sha256": "x", "size": 1}'
    run = "'r', 't', 'completed', 1, 'done', '{}', 's', 'i', 'x', 0.0, 1"
    row = f"'a/b@1', 'a/b', 1, 'x', 'r', 1, 'c', 'd', 1, 0, '{{\"files\": {{\"f\": {ref}}}}}', 0.0"
    with database.engine.begin() as connection:
        for statement in (
            "INSERT INTO policies (policy, tenant, base, created_at, last_number) VALUES ('a/b', 'a', 'x', 0.0, 1)",
            "INSERT INTO runs (run_id, token, state, steps, outcome, request, request_source, request_id, traceparent,"
            f" created_at, promoted) VALUES ({run})",
            "INSERT INTO revisions (revision, policy, number, base, run_id, step, export_command, adapter_sha256,"
            f" adapter_bytes, zero_delta, manifest, created_at) VALUES ({row})",
        ):
            connection.exec_driver_sql(statement)
    migrate(database.engine, str(tmp_path))
    (use,) = database.read_now(lambda session: session.scalars(select(FileUseRow)).all())
    assert (use.key, use.holder) == ("blobs/sha256/x", "revision:a/b@1")
    (revision,) = database.read_now(lambda session: session.scalars(select(RevisionRow)).all())
    assert (revision.ephemeral, revision.expires_at) == (False, None)


def test_aliases_of_an_older_directory_get_their_base_and_their_last_move(tmp_path: Path) -> None:
    database = Database(sqlite_url(tmp_path))
    _upgrade(database, "0004")
    with database.engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO policies (policy, tenant, base, created_at, last_number) VALUES ('a/b', 'a', 'tiny', 0.0, 2)"
        )
        connection.exec_driver_sql(
            "INSERT INTO runs (run_id, token, state, steps, outcome, request, request_source, request_id, traceparent,"
            " created_at, promoted) VALUES ('r', 't', 'completed', 1, '', '{}', 's', 'i', 'x', 0.0, 1)"
        )
        for number in (1, 2):
            connection.exec_driver_sql(
                "INSERT INTO revisions (revision, policy, number, base, run_id, step, export_command, adapter_sha256,"
                f" adapter_bytes, zero_delta, manifest, created_at) VALUES ('a/b@{number}', 'a/b', {number}, 'tiny',"
                f" 'r', {number}, 'e{number}', 'x', 1, 0, '{{}}', 0.0)"
            )
        for seq, alias, version, revision in ((5, "live", 1, 1), (6, "next", 1, 2), (7, "live", 2, 2)):
            connection.exec_driver_sql(
                "INSERT INTO alias_moves (seq, policy, alias, version, revision, reason, actor, at) VALUES"
                f" ({seq}, 'a/b', '{alias}', {version}, 'a/b@{revision}', '', '', 0.0)"
            )
        for alias, version in (("live", 2), ("next", 1)):
            connection.exec_driver_sql(
                "INSERT INTO aliases (policy, alias, revision, previous, version)"
                f" VALUES ('a/b', '{alias}', 'a/b@2', NULL, {version})"
            )
    migrate(database.engine, str(tmp_path))
    rows = database.read_now(lambda session: list(session.scalars(select(AliasRow).order_by(AliasRow.alias))))
    assert [(row.alias, row.base, row.moved) for row in rows] == [("live", "tiny", 7), ("next", "tiny", 6)]
    database.close()


def test_a_newer_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    Lab(tmp_path).close()
    with sqlite3.connect(tmp_path / "catalog.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    database = Database(sqlite_url(tmp_path))
    with pytest.raises(Fatal, match=r"schema 9999, which this build does not know .* newer build wrote it"):
        migrate(database.engine, str(tmp_path))
    with database.engine.connect() as connection2:
        assert connection2.exec_driver_sql("SELECT version_num FROM alembic_version").scalar() == "9999"
    database.close()


def test_numbers_are_gap_free_whoever_registers(tmp_path: Path) -> None:
    """Many threads register the same exports of many runs at once: 1, 2, 3 … each once per policy."""
    lab = Lab(tmp_path)
    exports = []
    for number in range(6):
        body = sft("acme/adder" if number % 2 else "acme/other", steps=1, promote_to=None)
        run_id = lab.request(body)
        lab.advance(run_id)
        exports.append(run_id)
        lab.work(run_id)
        command_id = lab.open(run_id)
        assert command_id is not None
        lab.commit(command_id, lab.take(command_id).epoch)
        lab.database.write_now(_step_aside, run_id)
    start = threading.Barrier(8)

    def many(worker: int) -> list[str]:
        start.wait()
        order = exports[worker % 6 :] + exports[: worker % 6]
        return [lab.database.write_now(_register, run_id) for run_id in order]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(many, range(8)))
    rows = lab.rows(RevisionRow)
    for policy in ("acme/adder", "acme/other"):
        assert sorted(row.number for row in rows if row.policy == policy) == [1, 2, 3]
    assert all(row.last_number == 3 for row in lab.rows(PolicyRow))
    lab.close()


def _register(session: Session, run_id: str) -> str:
    run = session.query(RunRow).filter_by(run_id=run_id).one()
    return register(session, run, 1, 0.0).revision


def _step_aside(session: Session, run_id: str) -> None:
    """Let the next run of the policy be active while this one's export is not registered yet."""
    session.query(RunRow).filter_by(run_id=run_id).one().active_policy = None


def test_a_failing_transaction_leaves_nothing(tmp_path: Path) -> None:
    lab = Lab(tmp_path)

    def half(session: Session) -> None:
        session.add(PolicyRow(policy="a/b", tenant="a", base="x", created_at=0.0, last_number=0))
        session.flush()
        raise ValueError("midway")

    with pytest.raises(ValueError, match="midway"):
        lab.database.write_now(half)
    assert lab.rows(PolicyRow) == []
    lab.close()


def test_a_read_that_breaks_with_its_result_unread_locks_nobody_out(tmp_path: Path) -> None:
    """The traceback keeps the result, and with it an old snapshot, on a connection of the pool."""
    lab = Lab(tmp_path)
    for number in range(3):
        lab.request(sft(f"acme/a{number}"))

    def breaks(session: Session) -> None:
        unread = session.execute(select(RunRow.state, RunRow.run_id))
        lab.request(sft("acme/meanwhile"))
        raise RuntimeError(f"before {unread} was read")

    with pytest.raises(RuntimeError) as kept:
        lab.database.read_now(breaks)
    for number in range(4):
        lab.request(sft(f"acme/b{number}"))
    assert "before" in str(kept.value)
    lab.close()


def _policy() -> PolicyRow:
    return PolicyRow(policy="a/b", tenant="a", base="x", created_at=0.0, last_number=0)


def test_who_loses_a_race_for_a_row_finds_it(tmp_path: Path) -> None:
    """On PostgreSQL another process may insert between the look and the insert, and its client must see no 500."""
    lab = Lab(tmp_path)
    told: list[object] = []
    lab.database.committed = lambda info: told.append(dict(info))
    looks: list[int] = []

    def enter(session: Session) -> str:
        looks.append(len(looks))
        session.info["attempt"] = len(looks)
        if len(looks) == 2:  # the other's transaction is committed by now
            session.add(_policy())
            session.flush()
        if session.get(PolicyRow, "a/b") is None:
            session.connection().execute(insert(PolicyRow).values(policy="a/b", tenant="a", base="x", created_at=0.0))
            session.add(_policy())
            session.flush()
        return "there"

    assert lab.database.write_now(enter) == "there"
    assert told == [{"attempt": 2}]
    lab.close()


def test_what_can_never_be_written_is_an_error_in_the_end(tmp_path: Path) -> None:
    lab = Lab(tmp_path)

    def orphan(session: Session) -> None:
        session.add(AliasRow(policy="no/body", alias="live", revision="no/body@1", version=1))
        session.flush()

    with pytest.raises(IntegrityError):
        lab.database.write_now(orphan)
    assert lab.rows(AliasRow) == []
    lab.close()


async def test_the_loop_runs_while_a_transaction_does(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    entered, leave = threading.Event(), threading.Event()

    def slow(session: Session) -> str:
        entered.set()
        assert leave.wait(10)
        return threading.current_thread().name

    work = asyncio.create_task(lab.database.write(slow))
    await eventually(entered.is_set)
    leave.set()
    assert (await work).startswith("catalog-write")
    lab.close()
