"""The configured base models and their digests."""

import hashlib
import json
from pathlib import Path

import pytest

from shared.bases import DENSE_TARGETS, load_base, load_bases
from shared.errors import Fatal
from tests.tiny import TINY_NAME, make_tiny_base, write_bases_file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_base(tmp_path_factory.mktemp("tiny"))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_base_is_loaded_by_its_public_name(tiny: Path, tmp_path: Path) -> None:
    base = load_bases(write_bases_file(tmp_path / "bases.json", tiny, max_rank=16))[TINY_NAME]
    assert (base.token, base.max_rank, base.max_context) == ("tiny-llama", 16, 1024)
    assert base.target_modules == DENSE_TARGETS
    assert base.bytes == (tiny / "model.safetensors").stat().st_size


def test_digests_are_those_of_the_files(tiny: Path) -> None:
    base = load_base(TINY_NAME, "tiny", tiny)
    files = [[name, sha256((tiny / name).read_bytes())] for name in ("config.json", "model.safetensors")]
    assert base.sha256 == sha256(json.dumps(files, separators=(",", ":")).encode())
    assert base.tokenizer_sha256 == sha256((tiny / "tokenizer.json").read_bytes())
    assert base.chat_template_sha256 == sha256((tiny / "chat_template.jinja").read_bytes())


def test_the_tiny_base_is_the_same_each_time(tiny: Path, tmp_path: Path) -> None:
    assert load_base(TINY_NAME, "tiny", make_tiny_base(tmp_path)).sha256 == load_base(TINY_NAME, "tiny", tiny).sha256


def test_remembered_digests_are_used_until_a_file_changes(tmp_path: Path) -> None:
    directory = make_tiny_base(tmp_path / "base")
    first = load_base(TINY_NAME, "tiny", directory)
    remembered = (directory / "mint-base.json").read_text()
    assert load_base(TINY_NAME, "tiny", directory) == first
    assert (directory / "mint-base.json").read_text() == remembered
    weights = directory / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert load_base(TINY_NAME, "tiny", directory).sha256 != first.sha256


def test_a_broken_memory_is_computed_again(tiny: Path) -> None:
    first = load_base(TINY_NAME, "tiny", tiny)
    for text in ("", "[]", '{"files": {"config.json": 3}}'):
        (tiny / "mint-base.json").write_text(text)
        assert load_base(TINY_NAME, "tiny", tiny) == first


def test_a_relative_directory_is_relative_to_the_file(tiny: Path) -> None:
    file = write_bases_file(tiny.parent / "bases.json", Path(tiny.name))
    assert load_bases(file)[TINY_NAME].directory == tiny


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "at least 1 item"),
        ([{"name": "a/b", "token": "x", "directory": "nowhere"}], "has no config.json"),
        ([{"name": "a/b", "token": "X_Y", "directory": "nowhere"}], "token 'X_Y' may hold"),
        ([{"name": "a/b", "token": "x", "directory": "d"}, {"name": "a/b", "token": "y", "directory": "d"}], "twice"),
        ([{"name": "a/b", "token": "x", "directory": "d"}, {"name": "c/d", "token": "x", "directory": "d"}], "token x"),
        ([{"name": "a/b", "token": "x", "directory": "d", "rank": 3}], "rank"),
    ],
)
def test_a_wrong_file_is_refused_in_words(tmp_path: Path, entries: list[dict[str, object]], message: str) -> None:
    path = tmp_path / "bases.json"
    path.write_text(json.dumps({"bases": entries}))
    with pytest.raises(Fatal, match=message):
        load_bases(path)


def test_a_missing_file_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(Fatal, match=r"cannot read the base models from .*bases\.json"):
        load_bases(tmp_path / "bases.json")
