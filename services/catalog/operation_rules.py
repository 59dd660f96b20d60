"""The bounds that operations go by, as plain numbers, and the base models that they are on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.catalog.config import CatalogSettings
from shared.bases import Base

__all__ = ["OperationRules", "rules_of"]


@dataclass(frozen=True)
class OperationRules:
    """Times in seconds. `resend_s`: silence after which waiting work is announced again, doubling each time.
    `grace_s`: how long what a session leaves behind may still be used."""

    bases: Mapping[str, Base]
    session_ttl_s: float = 600.0
    operation_gap_s: float = 120.0
    result_ttl_s: float = 86400.0
    ephemeral_ttl_s: float = 86400.0
    grace_s: float = 600.0
    sample_backlog: int = 4096
    operation_backlog: int = 10_000
    lease_ttl_s: float = 30.0
    deadline_s: float = 120.0
    resend_s: float = 30.0
    max_takes: int = 5


def rules_of(settings: CatalogSettings, bases: Mapping[str, Base]) -> OperationRules:
    return OperationRules(
        bases=bases,
        session_ttl_s=settings.session_ttl_s,
        operation_gap_s=settings.operation_gap_s,
        result_ttl_s=settings.result_ttl_s,
        ephemeral_ttl_s=settings.ephemeral_ttl_s,
        grace_s=settings.session_grace_s,
        sample_backlog=settings.sample_backlog,
        operation_backlog=settings.operation_backlog,
        lease_ttl_s=settings.lease_ttl_s,
        deadline_s=settings.command_deadline_s,
        max_takes=settings.max_takes,
    )
