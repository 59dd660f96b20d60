"""Which base models a stack serves: `bases.json` of the data directory, by default SmolLM2 alone.

The default is converted once, outside the data directory, from the file that a package ships. A base
model of one's own is a directory in Hugging Face layout, added by name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from cli.errors import BAD_INPUT, CliError
from cli.stack.datadir import write_atomic
from cli.stack.launch import run_step
from shared.bases import Base, load_bases
from shared.errors import MintError

SMOLLM2_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_TOKEN = "smollm2-135m"
MAX_RANK = 32
REQUIRED = {"name", "token", "directory"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def bases_path(data: Path) -> Path:
    return data / "bases.json"


def cache_dir() -> Path:
    return Path(os.environ.get("MINT_CACHE") or Path.home() / ".cache" / "mint").resolve()


def entry(name: str, token: str, directory: Path, max_rank: int = MAX_RANK) -> dict[str, object]:
    return {
        "name": name,
        "token": token,
        "directory": str(directory.resolve()),
        "max_rank": max_rank,
        "target_modules": list(PROJECTIONS),
    }


def prepare(data: Path, given: Path | None, say: Callable[[str], None]) -> dict[str, Base]:
    """Make `bases.json` (from `given`, else what is there, else the default) and check every base in it.

    Directories in `given` may be relative to it. Raises CliError naming the base that cannot be read."""
    path = bases_path(data)
    if given is not None:
        write_atomic(path, json.dumps({"bases": _read_given(given)}, indent=2) + "\n")
    elif not path.exists():
        write_atomic(path, json.dumps({"bases": [entry(SMOLLM2_NAME, SMOLLM2_TOKEN, _smollm2_dir())]}, indent=2) + "\n")
    if any(Path(each["directory"]) == _smollm2_dir() for each in _entries(path)):
        _convert_smollm2(data, say)
    return check(path)


def add(data: Path, directory: Path, name: str, token: str, max_rank: int = MAX_RANK) -> Base:
    """Add one's own base model. Refuses a name or token that is there, and a directory that is no base."""
    path = bases_path(data)
    entries = _entries(path) if path.exists() else [entry(SMOLLM2_NAME, SMOLLM2_TOKEN, _smollm2_dir())]
    for each in entries:
        if name == each["name"] or token == each["token"]:
            raise CliError(f"{each['name']} ({each['token']}) is configured already; choose another", BAD_INPUT)
    beside = path.with_name("bases.new.json")
    write_atomic(beside, json.dumps({"bases": [*entries, entry(name, token, directory, max_rank)]}, indent=2) + "\n")
    try:
        added = check(beside)[name]
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return added


def check(path: Path) -> dict[str, Base]:
    try:
        return load_bases(path)
    except (MintError, ValueError, OSError) as error:
        raise CliError(str(error), BAD_INPUT) from error


def configured(data: Path) -> list[dict[str, str]]:
    """The entries of the data directory's `bases.json`, in its order."""
    return _entries(bases_path(data))


def _smollm2_dir() -> Path:
    return cache_dir() / "bases" / SMOLLM2_TOKEN


def _convert_smollm2(data: Path, say: Callable[[str], None]) -> None:
    target = _smollm2_dir()
    if (target / "model.safetensors").exists():
        return
    say(f"converting SmolLM2-135M-Instruct into {target} (once, about half a minute)")
    target.parent.mkdir(parents=True, exist_ok=True)
    run_step((sys.executable, "-P", "-m", "services.learner.convert_smollm2", str(target)), {}, data, "convert")


def _entries(path: Path) -> list[dict[str, str]]:
    try:
        found = json.loads(path.read_text())["bases"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CliError(f'{path} is not a bases file; it holds {{"bases": [...]}} ({error})', BAD_INPUT) from error
    if (
        not isinstance(found, list)
        or not found
        or not all(isinstance(each, dict) and set(each) >= REQUIRED for each in found)
    ):
        raise CliError(f'{path}: every entry of "bases" is an object with name, token and directory', BAD_INPUT)
    return found


def _read_given(given: Path) -> list[dict[str, str]]:
    return [{**each, "directory": str((given.parent / each["directory"]).resolve())} for each in _entries(given)]
