"""What every service is told from outside: environment variables `MINT_<FIELD>`, read once at boot.

Frozen: a setting that changes while the process runs would be a second truth. Service settings
subclass this with their own fields.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["CommonSettings"]


def _worker_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


class CommonSettings(BaseSettings):
    """`fault` is `<service>:<point>` (see shared/worker/faults.py) and is for tests alone."""

    model_config = SettingsConfigDict(env_prefix="MINT_", frozen=True, extra="ignore")

    nats_url: str = "nats://127.0.0.1:4222"
    s3_url: str = "http://127.0.0.1:8333"
    s3_access_key: str = "mint"
    s3_secret_key: str = "mint-local-secret"
    s3_bucket: str = "mint"
    catalog_url: str = "http://127.0.0.1:8701"
    bases_file: Path = Path("bases.json")
    data_dir: Path = Path(".mint")
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="HTTP port of this service; 0 = any free one")] = 0
    worker_id: str = Field(default_factory=_worker_id)
    log_level: str = "INFO"
    heartbeat_s: Annotated[float, Field(gt=0, description="seconds between lease renewals")] = 5.0
    ack_wait_s: Annotated[float, Field(gt=0, description="the bus table's ack wait; the same for all processes")] = 30.0
    reward_hosts: Annotated[str, Field(description="hosts that reward webhooks may call: host or host:port, …")] = ""
    fault: str = ""
    fault_dir: Path | None = None
