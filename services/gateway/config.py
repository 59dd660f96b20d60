"""The gateway's own settings: environment variables `MINT_GATEWAY_<FIELD>` beside the common ones."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shared.settings import CommonSettings

__all__ = ["GatewaySettings"]

Seconds = Annotated[float, Field(gt=0)]


class GatewaySettings(CommonSettings):
    """`gateway_keys` is JSON, key → tenant or `*`; `gateway_local_key` empty switches the local key off."""

    gateway_keys: dict[str, str] = Field(default_factory=dict)
    gateway_local_key: str = "tml-dev"
    gateway_resolve_timeout_s: Seconds = 5.0
    gateway_max_upload_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    gateway_max_json_bytes: Annotated[int, Field(ge=1, description="of a body other than uploaded data")] = 1 << 25
    gateway_max_data: Annotated[int, Field(ge=1, description="of one forward or forward_backward")] = 4096
    gateway_max_numbers: Annotated[int, Field(ge=1, description="tokens and inputs of one operation")] = 1 << 24
    gateway_hold_s: Annotated[float, Field(gt=0, le=40, description="how long a future is waited for")] = 20.0
    gateway_local_tenant: Annotated[str, Field(description="of sessions by a key of all tenants")] = "local"
    gateway_max_choices: Annotated[int, Field(ge=1, description="prompts × n of one request")] = 1024
    gateway_parallel_choices: Annotated[int, Field(ge=1, description="sampled at a time, per request")] = 32
    gateway_default_max_tokens: Annotated[int, Field(ge=1, description="chat, when the request gives none")] = 1024
    gateway_progress_poll_s: Seconds = 0.5
    gateway_keep_alive_s: Seconds = 10.0
    gateway_run_visible_s: Annotated[float, Field(ge=0, description="wait for a submitted run to be readable")] = 3.0
