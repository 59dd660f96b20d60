"""What clients ask before they do anything: flags, a token for their key, which base models there are.

Invariant: `client/config` answers whoever has a key; a flag is on only where what it promises is here.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from services.gateway.edge import Caller, Here
from services.gateway.identity import presented_key
from services.gateway.openai.context import context_tokens
from services.gateway.tinker.body import whole
from services.gateway.tinker.messages import ClientConfig

__all__ = ["auth_token", "client_config", "dynamic_config", "healthz", "server_capabilities", "telemetry"]

REFRESH_S = 300
SAMPLES_AT_A_TIME = 256
"""Of one client that asks for each by itself: each that waits holds a connection here and one to the catalog. Clients
that ask for many at once go by the answer 429 alone."""
CANCEL_BATCH = 64
OWN_PREFIX = "tml-"
"""Clients send keys that begin so as they are; every other key they exchange for a token."""


async def client_config(body: ClientConfig, request: Request, gateway: Here, caller: Caller) -> dict[str, Any]:
    """`use_pyqwest_transport` false: that transport does not follow the redirect of an archive."""
    return {
        "pjwt_auth_enabled": not presented_key(request).startswith(OWN_PREFIX),
        "credential_default_source": "api_key",
        "parallel_fwdbwd_chunks": True,
        "proto_write_fwdbwd": True,
        "proto_compress_fwdbwd": True,
        "use_pyqwest_transport": False,
        "sample_use_retrieve_futures": True,
        "sample_max_concurrent_requests": SAMPLES_AT_A_TIME,
        "custom_loss_server_side": False,
        "sample_join_sampling_session": True,
    }


async def dynamic_config(body: ClientConfig, gateway: Here, caller: Caller) -> dict[str, Any]:
    return {
        "refresh_interval_sec": REFRESH_S,
        "sample_cancel_enabled": True,
        "sample_cancel_max_batch_size": CANCEL_BATCH,
    }


async def auth_token(request: Request, gateway: Here, caller: Caller) -> dict[str, str]:
    """A token may be exchanged for another one, which ends when it does."""
    return {"jwt": gateway.keys.token(presented_key(request), caller)}


async def healthz(gateway: Here, caller: Caller) -> dict[str, str]:
    return {"status": "ok"}


async def server_capabilities(gateway: Here, caller: Caller) -> dict[str, Any]:
    """`sampleable`: whether a serving replica has the base now."""
    models = [
        {
            "model_name": name,
            "max_context_length": context_tokens(gateway, base),
            "sampleable": bool(gateway.replicas.replicas(name)),
        }
        for name, base in sorted(gateway.bases.items())
    ]
    return {"supported_models": models}


async def telemetry(request: Request, gateway: Here, caller: Caller) -> dict[str, str]:
    """Taken and not kept: it is about clients."""
    await whole(request, gateway.settings.gateway_max_json_bytes)
    return {"status": "accepted"}
