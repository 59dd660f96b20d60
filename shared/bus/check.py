"""Does the bus that runs equal the table? Services ask at boot and refuse to start on a difference,
since an existing durable silently keeps the settings that it was created with."""

from __future__ import annotations

from typing import Any

from nats.js.errors import NotFoundError

from shared.errors import Fatal

from .configs import bucket_config, consumer_config, stream_config
from .table import Table

__all__ = ["differences", "require_equal"]

_STREAM_FIELDS = (
    "subjects",
    "retention",
    "discard",
    "max_age",
    "max_msgs",
    "max_msgs_per_subject",
    "duplicate_window",
    "storage",
)
_CONSUMER_FIELDS = (
    "filter_subject",
    "filter_subjects",
    "deliver_policy",
    "ack_policy",
    "ack_wait",
    "max_deliver",
    "max_ack_pending",
    "backoff",
)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return sorted(value)
    return getattr(value, "value", value) or None


def _compare(what: str, wanted: Any, found: Any, fields: tuple[str, ...]) -> list[str]:
    return [
        f"{what}: {field} is {_plain(getattr(found, field))!r}, the table says {_plain(getattr(wanted, field))!r}"
        for field in fields
        if _plain(getattr(found, field)) != _plain(getattr(wanted, field))
    ]


async def differences(js: Any, table: Table) -> list[str]:
    """In words, one per field that differs or thing that is missing; what the table does not know is
    left alone. `js` is a JetStream context."""
    found: list[str] = []
    for config in [*map(stream_config, table.streams), *map(bucket_config, table.buckets)]:
        try:
            info = await js.stream_info(config.name)
        except NotFoundError:
            found.append(f"stream {config.name} does not exist")
            continue
        found += _compare(f"stream {config.name}", config, info.config, _STREAM_FIELDS)
    for durable in table.durables:
        what = f"durable {durable.name} on {durable.stream}"
        try:
            info = await js.consumer_info(durable.stream, durable.name)
        except NotFoundError:
            found.append(f"{what} does not exist")
            continue
        found += _compare(what, consumer_config(durable), info.config, _CONSUMER_FIELDS)
    return found


async def require_equal(js: Any, table: Table) -> None:
    """Raises Fatal listing every difference."""
    found = await differences(js, table)
    if found:
        raise Fatal("the bus differs from its table; run `python -m shared.bus.provision`: " + "; ".join(found))
