"""A training request from a file: JSON or TOML, checked against the contract before it is sent."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from mint_schemas import TrainRequested
from pydantic import ValidationError

from cli.errors import BAD_INPUT, CliError
from shared.validation import explain


def read_spec(source: str) -> dict[str, Any]:
    """`source` is a path, or `-` for JSON on standard input. Raises CliError naming field and reason."""
    found = _read(source, "a training request")
    try:
        TrainRequested.model_validate_json(json.dumps(found))
    except ValidationError as error:
        raise CliError(f"{source}: " + "; ".join(explain(error)), BAD_INPUT) from error
    return found


def read_object(source: str, what: str) -> dict[str, Any]:
    """As `read_spec`, against no contract."""
    found = _read(source, what)
    try:
        json.dumps(found, allow_nan=False)
    except ValueError as error:
        raise CliError(f"{source} holds what JSON has no word for: {error}", BAD_INPUT) from error
    return found


def _read(source: str, what: str) -> dict[str, Any]:
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        found = tomllib.loads(text) if source.endswith(".toml") else json.loads(text)
    except OSError as error:
        raise CliError(f"cannot read {source}: {error.strerror}", BAD_INPUT) from error
    except (ValueError, RecursionError) as error:
        raise CliError(f"{source} is neither JSON nor, named *.toml, TOML: {error}", BAD_INPUT) from error
    if not isinstance(found, dict):
        raise CliError(f"{source} holds {type(found).__name__}; {what} is an object", BAD_INPUT)
    try:
        json.dumps(found)
    except TypeError as error:  # TOML has dates and times
        raise CliError(f"{source} holds what JSON has no word for: {error}; write it as a text", BAD_INPUT) from error
    return found
