"""The options that many commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.gateway import Gateway, gateway_url
from cli.stack.datadir import default_data_dir

Data = Annotated[Path | None, typer.Option("--data", help="Data directory (default: MINT_DATA, else ./.mint).")]
Url = Annotated[str | None, typer.Option("--url", help="Gateway (default: MINT_URL, else that of the data directory).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit = Annotated[int, typer.Option("--limit", min=1, help="At most so many.")]


def data_dir(data: Path | None) -> Path:
    return (data or default_data_dir()).expanduser()


def connect(url: str | None, data: Path | None = None) -> Gateway:
    return Gateway(gateway_url(url, data))
