"""A data directory's format: migrated forward, never backward, and other people's files stay alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.errors import CliError
from cli.stack.datadir import Busy, locked, open_data_dir, read_format, write_atomic


def test_a_fresh_directory_gets_the_current_format(tmp_path: Path) -> None:
    assert open_data_dir(tmp_path / "data") == []
    assert read_format(tmp_path / "data") == 1


def test_an_older_directory_is_migrated_step_by_step(tmp_path: Path) -> None:
    open_data_dir(tmp_path, current=1)
    done: list[int] = []
    migrations = [lambda data: done.append(1), lambda data: done.append(2)]
    assert open_data_dir(tmp_path, current=3, migrations=migrations) == [(1, 2), (2, 3)]
    assert done == [1, 2]
    assert read_format(tmp_path) == 3
    assert open_data_dir(tmp_path, current=3, migrations=migrations) == []


def test_a_migration_that_fails_leaves_the_format_before_it(tmp_path: Path) -> None:
    open_data_dir(tmp_path, current=1)

    def fails(data: Path) -> None:
        raise CliError("the disk is full")

    with pytest.raises(CliError, match="disk is full"):
        open_data_dir(tmp_path, current=3, migrations=[lambda data: None, fails])
    assert read_format(tmp_path) == 2


def test_a_newer_directory_is_refused(tmp_path: Path) -> None:
    open_data_dir(tmp_path, current=2)
    with pytest.raises(CliError, match=r"has format 2, this build knows up to 1; run the newer build"):
        open_data_dir(tmp_path, current=1)


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(CliError, match="not a MinT data directory"):
        open_data_dir(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_damaged_version_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "version.json").write_text("{")
    with pytest.raises(CliError, match=r"version\.json cannot be read"):
        open_data_dir(tmp_path)


def test_one_change_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(Busy), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_write_replaces_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "stack.json"
    write_atomic(path, "one")
    write_atomic(path, "two")
    assert path.read_text() == "two"
    assert list(tmp_path.iterdir()) == [path]
