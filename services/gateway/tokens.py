"""The short-lived token that some Tinker clients want in place of a key: a JWT that names the key by its sha256.

In: a key's digest and who it is. Out: a token, and from a token the digest again. Invariants: a token may do what its
key may, and ends with it, or after an hour; nobody learns the key from it, or makes one without the stack's secret;
every gateway of a stack reads it, since there is nothing to remember.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Any

from shared.errors import Refused

__all__ = ["Named", "Tokens", "looks_like_token"]

TTL_S = 3600
PREFIX = "eyJ"
"""Of every JWT: `{"` in base64."""


@dataclass(frozen=True)
class Named:
    """The key that a token stands for, by its sha256, and the token's end in seconds since the epoch."""

    sha256: str
    end: float


def looks_like_token(text: str) -> bool:
    return text.startswith(PREFIX) and text.count(".") == 2


class Tokens:
    """`secret`: what the gateways of one stack share, and nobody else knows."""

    def __init__(self, secret: str) -> None:
        self._key = hmac.digest(secret.encode(), b"mint tokens", "sha256")

    def issue(self, sha256: str, now: float, subject: str = "", tenant: str = "", end: float | None = None) -> str:
        """`now` in seconds since the epoch. `subject` and `tenant` are what clients show as who they are. `end`: of
        the token that this one is exchanged for, which it does not outlive."""
        until = int(now) + TTL_S if end is None else min(int(end), int(now) + TTL_S)
        head = _part({"alg": "HS256", "typ": "JWT"})
        claims = _part({"iat": int(now), "exp": until, "key_sha256": sha256, "sub": subject, "org_id": tenant})
        return f"{head}.{claims}.{self._signature(f'{head}.{claims}')}"

    def read(self, token: str, now: float) -> Named:
        """Raises Refused (401) for a token that is none of ours or is over."""
        signed, _, signature = token.rpartition(".")
        if not hmac.compare_digest(self._signature(signed).encode(), signature.encode()):
            raise _refused("this token was not made here; exchange your key at /api/v1/auth/token")
        try:
            claims = json.loads(_bytes(signed.partition(".")[2]))
            named = Named(str(claims["key_sha256"]), float(claims["exp"]))
        except (ValueError, KeyError, TypeError) as error:
            raise _refused("this token is of another version; exchange your key at /api/v1/auth/token") from error
        if not now < named.end:
            raise _refused("this token is over; exchange your key at /api/v1/auth/token again")
        return named

    def _signature(self, signed: str) -> str:
        return _text(hmac.new(self._key, signed.encode(), hashlib.sha256).digest())


def _part(claims: dict[str, Any]) -> str:
    return _text(json.dumps(claims, separators=(",", ":")).encode())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _refused(message: str) -> Refused:
    return Refused(message, code="invalid_token", status=401)
