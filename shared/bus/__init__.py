"""The message bus: NATS JetStream through FastStream, from one table."""

from .advisories import Advisory
from .bus import Bus
from .kv import Bucket, Entry, StaleRevision
from .received import Received
from .table import CATALOG_DEAD, CATALOG_EVENTS, CATALOG_TRAIN, Table, command_durable, table_for

__all__ = [
    "CATALOG_DEAD",
    "CATALOG_EVENTS",
    "CATALOG_TRAIN",
    "Advisory",
    "Bucket",
    "Bus",
    "Entry",
    "Received",
    "StaleRevision",
    "Table",
    "command_durable",
    "table_for",
]
