"""`mint data put` and `mint report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.errors import BAD_INPUT, CliError
from cli.options import Data, Json, Url, connect
from cli.report.collect import collect
from cli.report.text import print_report
from cli.terminal import out, show, write_json


def put(
    file: Path,
    tenant: Annotated[str | None, typer.Option(help="The owner, for a key that acts for every tenant.")] = None,
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Upload a JSONL file; prints the reference to put into a request."""
    if not file.is_file():
        raise CliError(f"{file} is not a file", BAD_INPUT)
    with connect(url, data) as gateway:
        found = gateway.upload(file, tenant)
    show(found, json, lambda it: out.print_json(data=it))


def report(
    run_ids: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs, in the order to report them.")],
    to: Annotated[Path | None, typer.Option("--to", help="Folder for report.json and rewards.png.")] = None,
    url: Url = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Rewards, scores, adapter size, time per stage and lineage of one run or several."""
    with connect(url, data) as gateway:
        found = collect(gateway, run_ids)
    show(found, json, print_report)
    if to is not None:
        to.mkdir(parents=True, exist_ok=True)
        write_json(to / "report.json", found)
        # matplotlib takes a second to import, and only this command draws.
        from cli.report.plot import plot_rewards

        if plot_rewards(found, to / "rewards.png") and not json:
            out.print(f"wrote {to / 'report.json'} and {to / 'rewards.png'}", markup=False)
