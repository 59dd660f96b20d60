"""The catalog's parts, wired once and handed to the routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.catalog.clock import Clock
from services.catalog.database import Database
from services.catalog.drive import Driver
from services.catalog.leases import LeaseRules
from services.catalog.moves import Mover
from services.catalog.operation_rules import OperationRules
from services.catalog.pins import MOST_OF_A_TENANT
from services.catalog.validate import Validator
from services.catalog.waiting import Waiters
from shared.bases import Base
from shared.store.port import ObjectStore


@dataclass(frozen=True)
class Parts:
    database: Database
    driver: Driver
    validator: Validator
    mover: Mover
    store: ObjectStore
    bases: Mapping[str, Base]
    lease_rules: LeaseRules
    clock: Clock
    waiters: Waiters
    tenant_pins: int = MOST_OF_A_TENANT

    @property
    def rules(self) -> OperationRules:
        return self.driver.rules
