"""The gateway's own settings: environment variables `MINT_GATEWAY_<FIELD>` beside the common ones."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated

from pydantic import Field

from shared.errors import Fatal
from shared.settings import CommonSettings

__all__ = ["GatewaySettings"]

Seconds = Annotated[float, Field(gt=0)]


class GatewaySettings(CommonSettings):
    """`gateway_keys` is JSON, key → tenant or `*`; `gateway_local_key` empty switches the local key off."""

    gateway_keys: dict[str, str] = Field(default_factory=dict)
    gateway_local_key: str = "tml-dev"
    gateway_secret: Annotated[
        str,
        Field(description="signs links and tokens; the same for all gateways; empty: the S3 secret"),
    ] = ""
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
    gateway_run_visible_s: Annotated[float, Field(ge=0, description="wait for a submitted run to be readable")] = 20.0

    @property
    def signing_secret(self) -> str:
        """Raises Fatal for one that everybody knows, where others than this machine can reach the gateway."""
        if self.gateway_secret:
            return self.gateway_secret
        known = CommonSettings.model_fields["s3_secret_key"].default
        if self.s3_secret_key == known and not _is_this_machine(self.host):
            raise Fatal(
                f"the gateway listens on {self.host} and signs links and tokens with the default secret, which "
                "everybody knows; set MINT_GATEWAY_SECRET, the same for each gateway"
            )
        return self.s3_secret_key


def _is_this_machine(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
