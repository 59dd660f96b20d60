"""The catalog's own settings (environment prefix MINT_CATALOG_), frozen."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.catalog.pins import MOST_OF_A_TENANT


class CatalogSettings(BaseSettings):
    """`database_url` empty = SQLite in the data directory. Times in seconds."""

    model_config = SettingsConfigDict(env_prefix="MINT_CATALOG_", frozen=True, extra="ignore")

    database_url: str = ""
    lease_ttl_s: float = Field(30.0, gt=0)
    command_deadline_s: float = Field(120.0, gt=0, description="silence after which an open command is sent again")
    max_takes: int = Field(5, ge=1)
    drive_every_s: float = Field(30.0, gt=0)
    ready_timeout_s: float = Field(900.0, gt=0, description="how long a run waits for a revision to be ready")
    min_ready: int = Field(1, ge=1, description="replicas that must have a revision ready before an alias moves to it")
    tenant_pins: int = Field(MOST_OF_A_TENANT, ge=0, description="policies of one base that a tenant may pin")
    sweep_every_s: float = Field(3600.0, gt=0)
    sweep_after_s: float = Field(86400.0, gt=0)
    session_ttl_s: float = Field(600.0, gt=0, description="silence after which a session is over")
    session_grace_s: float = Field(600.0, ge=0, description="how long its ephemeral revisions may still be used")
    operation_gap_s: float = Field(120.0, gt=0, description="how long operations wait for a number before them")
    result_ttl_s: float = Field(86400.0, gt=0, description="how long the result of an operation can be read")
    ephemeral_ttl_s: float = Field(86400.0, gt=0, description="how long an ephemeral revision lives without use")
    sample_backlog: int = Field(4096, ge=1, description="samples that a tenant may have open")
    operation_backlog: int = Field(10_000, ge=1, description="how far ahead of its work a model's numbers may be")
