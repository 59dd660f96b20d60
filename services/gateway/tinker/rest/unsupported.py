"""Routes that the public clients have and this server does not: each says so by name, and what to do instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.tinker import errors

__all__ = ["UNSUPPORTED", "unsupported"]

_EXTERNAL = "/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls"
_KEYS = "set the key in the environment; `mint key revoke` ends one"
_TENANTS = "a key's tenant has all of its sessions, runs and checkpoints"

UNSUPPORTED = (
    ("POST", "/create_custom_loss", "running a custom loss on the server", "clients compute custom losses themselves"),
    ("GET", "/auth/apikey/me", "logging in with a stored key", _KEYS),
    ("DELETE", "/auth/apikey/me", "logging out", _KEYS),
    ("GET", "/sessions/{session_id}/trace_export", "exporting a session's trace", "read the traces of its requests"),
    ("POST", "/sessions/search", "searching sessions", "GET /api/v1/sessions lists them"),
    ("PUT", "/sessions/{session_id}/project", "moving a session to a project", _TENANTS),
    ("GET", "/audit", "the audit log of an organisation", "GET /mint/v1/policies/{tenant}/{policy}/moves has aliases'"),
    ("GET", "/billing/usage/events", "billing", "nothing is billed here"),
    ("GET", "/billing/usage/checkpoints/current", "billing", "GET /api/v1/checkpoints has the sizes"),
    ("GET", _EXTERNAL, "downloading external weights", "GET …/archive has each checkpoint as a PEFT directory"),
)
"""Method, path, what is not there, what to do instead."""


def unsupported(what: str, instead: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise errors.unsupported(what, instead)

    return refuse
