"""Running `mint` itself, as a person would."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from cli.errors import CliError
from cli.stack.part import executable


def mint(*arguments: str, quiet: bool = False) -> str:
    """Its standard output; its progress on standard error passes through unless `quiet`.

    Raises CliError with its own words when it fails."""
    done = subprocess.run(
        (executable("mint", "mint-server"), *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr or "").strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise CliError(f"mint {' '.join(arguments[:2])} failed: {said}", done.returncode)
    return done.stdout


def mint_json(*arguments: str) -> Any:
    return json.loads(mint(*arguments, "--json", quiet=True))
