"""The configured base models: their names, where their files are, and what those files hash to.

In: a `bases.json` (`{"bases": [{"name", "token", "directory", "max_rank"?, "target_modules"?}]}`) and the
directories that it names. Out: one `Base` per public name. Invariant: a digest always belongs to the
bytes on disk; it is remembered in `mint-base.json` beside them and recomputed when a file changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import Fatal
from shared.text.template import read_chat_template

__all__ = ["DENSE_TARGETS", "Base", "load_base", "load_bases"]

DENSE_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DIGEST_FILE = "mint-base.json"
_TOKEN = re.compile(r"[a-z0-9-]{1,63}")


@dataclass(frozen=True)
class Base:
    """`sha256` is that of the canonical JSON list of [file name, sha256] of `config.json` and every
    `*.safetensors`, sorted by name; `bytes` counts the safetensors; `max_context` is in tokens."""

    name: str
    token: str
    directory: Path
    max_rank: int
    target_modules: tuple[str, ...]
    sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    max_context: int
    bytes: int


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(min_length=1, max_length=200)
    token: str
    directory: Path
    max_rank: int = Field(32, ge=1, le=512)
    target_modules: tuple[str, ...] = Field(DENSE_TARGETS, min_length=1)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    bases: tuple[_Entry, ...] = Field(min_length=1)


def load_bases(path: Path) -> dict[str, Base]:
    """By public name. A relative directory is relative to the file. Raises Fatal saying what is wrong."""
    try:
        parsed = _File.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise Fatal(f"cannot read the base models from {path}: {error}") from error
    for what in ("name", "token"):
        values = [getattr(entry, what) for entry in parsed.bases]
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise Fatal(f"{path}: the base {what} {', '.join(twice)} is given twice; each must be unique")
    return {entry.name: _load(entry, path.parent) for entry in parsed.bases}


def load_base(name: str, token: str, directory: Path, max_rank: int = 32) -> Base:
    """One base model outside any file. Raises Fatal like `load_bases`."""
    return _load(_Entry(name=name, token=token, directory=directory, max_rank=max_rank), Path())


def _load(entry: _Entry, parent: Path) -> Base:
    if not _TOKEN.fullmatch(entry.token):
        raise Fatal(f"base {entry.name}: the token {entry.token!r} may hold a-z, 0-9 and '-' only")
    directory = (parent / entry.directory.expanduser()).absolute()
    weights = sorted(directory.glob("*.safetensors"))
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    if missing or not weights:
        what = ", ".join(missing) or "*.safetensors"
        raise Fatal(f"base {entry.name}: {directory} has no {what}; convert or download the base model first")
    digests = _digests(directory, [directory / "config.json", directory / "tokenizer.json", *weights])
    tokenizer_sha256 = digests.pop("tokenizer.json")
    return Base(
        name=entry.name,
        token=entry.token,
        directory=directory,
        max_rank=entry.max_rank,
        target_modules=entry.target_modules,
        sha256=_sha256_of_list(digests.items()),
        tokenizer_sha256=tokenizer_sha256,
        chat_template_sha256=hashlib.sha256(read_chat_template(directory).encode()).hexdigest(),
        max_context=_max_context(entry.name, directory),
        bytes=sum(path.stat().st_size for path in weights),
    )


def _max_context(name: str, directory: Path) -> int:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    value = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    if not isinstance(value, int):
        raise Fatal(f"base {name}: config.json names no max_position_embeddings")
    return value


def _sha256_of_list(pairs: Iterable[tuple[str, str]]) -> str:
    text = json.dumps([list(pair) for pair in sorted(pairs)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _digests(directory: Path, paths: list[Path]) -> dict[str, str]:
    """sha256 by file name; hashed again only where size or modification time differ from the last time."""
    remembered = _remembered(directory / DIGEST_FILE)
    found: dict[str, tuple[int, int, str]] = {}
    for path in paths:
        stat = path.stat()
        size, mtime, sha256 = remembered.get(path.name, (-1, -1, ""))
        if (size, mtime) != (stat.st_size, stat.st_mtime_ns):
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        found[path.name] = (stat.st_size, stat.st_mtime_ns, sha256)
    if found != remembered:
        _remember(directory / DIGEST_FILE, found)
    return {name: sha256 for name, (_, _, sha256) in found.items()}


def _remembered(path: Path) -> dict[str, tuple[int, int, str]]:
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {name: (int(size), int(mtime), str(sha256)) for name, (size, mtime, sha256) in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _remember(path: Path, files: dict[str, tuple[int, int, str]]) -> None:
    beside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        beside.write_text(json.dumps({"format": 1, "files": files}, indent=1), encoding="utf-8")
        os.replace(beside, path)
    except OSError:
        # A read-only directory is a fine place for a base model; its digests cost seconds, not correctness.
        beside.unlink(missing_ok=True)
