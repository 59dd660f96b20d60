"""The bus table in docs/architecture.md, between two markers, so that the page cannot differ from it.

`python -m shared.bus.render` writes it; `--check` writes nothing and ends with 1 when it is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from .table import Table, table_for

__all__ = ["main", "rendered"]

PAGE = Path("docs/architecture.md")
BEGIN, END = "<!-- bus table: begin (python -m shared.bus.render) -->", "<!-- bus table: end -->"
TOKEN = "<base>"

_DAY = 86_400


def rendered(table: Table) -> str:
    """Markdown of all streams with their subjects, all durables, all buckets."""
    streams = [
        (
            stream.name,
            stream.retention,
            f"discard {stream.discard}" + (f", at most {stream.max_msgs} messages" if stream.max_msgs > 0 else ""),
            f"{stream.max_age_s / _DAY:.0f} days" if stream.max_age_s else "until done",
            f"{stream.duplicate_window_s:.0f} s",
            "<br>".join(f"`{subject}`" for subject in stream.subjects),
        )
        for stream in table.streams
    ]
    durables = [
        (
            f"`{durable.name}`",
            durable.stream,
            f"`{durable.filters[0]}`" if len(durable.filters) == 1 else "all of the stream",
            f"{durable.ack_wait_s:.0f} s",
            str(durable.max_deliver),
            str(durable.max_ack_pending),
        )
        for durable in table.durables
    ]
    buckets = [(f"`{bucket.name}`", f"{bucket.ttl_s:.0f} s" if bucket.ttl_s else "none") for bucket in table.buckets]
    return "\n\n".join(
        (
            _grid(("stream", "retention", "when full", "kept", "dedupe", "subjects"), streams),
            _grid(("durable", "stream", "subject", "ack wait", "max deliver", "max ack pending"), durables),
            _grid(("bucket", "TTL"), buckets),
        )
    )


def _grid(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page_with_table(page: str) -> str:
    """Raises ValueError when the markers are missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no place for the bus table; write the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{rendered(table_for([TOKEN]))}\n\n{END}{after}"


def main(arguments: list[str]) -> int:
    page = PAGE.read_text()
    wanted = page_with_table(page)
    if "--check" in arguments:
        if page != wanted:
            sys.stderr.write(f"the bus table in {PAGE} is stale; run `python -m shared.bus.render`\n")
        return 0 if page == wanted else 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
