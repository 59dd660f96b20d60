"""`bases.json`: what a stack serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.errors import BAD_INPUT, CliError
from cli.stack import bases


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 64}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def test_a_given_file_is_taken_over_with_whole_paths(data: Path, model: Path, tmp_path: Path) -> None:
    given = tmp_path / "mine.json"
    given.write_text(json.dumps({"bases": [{"name": "mine", "token": "mine", "directory": "model"}]}))
    found = bases.prepare(data, given, lambda text: None)
    assert found["mine"].directory == model
    assert bases.prepare(data, None, lambda text: None) == found


def test_a_base_is_added_once(data: Path, model: Path) -> None:
    bases.bases_path(data).write_text(json.dumps({"bases": [bases.entry("first", "first", model)]}))
    assert bases.add(data, model, "Org/Second", "second", 16).max_rank == 16
    assert [entry["name"] for entry in bases.configured(data)] == ["first", "Org/Second"]
    for name, token in (("Org/Second", "third"), ("third", "second")):
        with pytest.raises(CliError, match="configured already"):
            bases.add(data, model, name, token)


def test_a_directory_that_is_no_base_changes_nothing(data: Path, model: Path, tmp_path: Path) -> None:
    bases.bases_path(data).write_text(json.dumps({"bases": [bases.entry("first", "first", model)]}))
    before = bases.bases_path(data).read_text()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CliError, match=r"config\.json") as caught:
        bases.add(data, tmp_path / "empty", "second", "second")
    assert caught.value.code == BAD_INPUT
    assert bases.bases_path(data).read_text() == before
    assert sorted(path.name for path in data.iterdir()) == ["bases.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"bases": []}', '{"bases": [{"name": "x"}]}'])
def test_what_is_no_bases_file_is_refused(data: Path, tmp_path: Path, text: str) -> None:
    given = tmp_path / "mine.json"
    given.write_text(text)
    with pytest.raises(CliError, match=r"mine\.json") as caught:
        bases.prepare(data, given, lambda text: None)
    assert caught.value.code == BAD_INPUT
