"""The short-lived token that some Tinker clients want in place of a key: a JWT that carries the key itself.

In: a key. Out: a token, and from a token its key again. Invariants: a token may do what its key may, ends with it, and
every gateway reads it, since there is nothing to remember; it is as secret as the key. Its end is there because
clients plan their refresh by it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

from shared.errors import Refused

__all__ = ["key_in", "looks_like_token", "token_for"]

TTL_S = 3600
PREFIX = "eyJ"
"""Of every JWT: `{"` in base64."""


def token_for(key: str, now: float) -> str:
    """`now` in seconds since the epoch."""
    head = _part({"alg": "HS256", "typ": "JWT"})
    claims = _part({"iat": int(now), "exp": int(now) + TTL_S, "key": key})
    return f"{head}.{claims}.{_signature(f'{head}.{claims}', key)}"


def looks_like_token(text: str) -> bool:
    return text.startswith(PREFIX) and text.count(".") == 2


def key_in(token: str, now: float) -> str:
    """Raises Refused (401) for a token that is none of ours or is over."""
    signed, _, signature = token.rpartition(".")
    try:
        claims = json.loads(_bytes(signed.partition(".")[2]))
        key, end = claims["key"], float(claims["exp"])
        if not isinstance(key, str) or not hmac.compare_digest(_signature(signed, key).encode(), signature.encode()):
            raise ValueError("signed with another key")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _refused("this token was not made here; exchange your key at /api/v1/auth/token") from error
    if not now < end:
        raise _refused("this token is over; exchange your key at /api/v1/auth/token again")
    return key


def _part(claims: dict[str, Any]) -> str:
    return _text(json.dumps(claims, separators=(",", ":")).encode())


def _signature(signed: str, key: str) -> str:
    return _text(hmac.new(key.encode(), signed.encode(), hashlib.sha256).digest())


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _refused(message: str) -> Refused:
    return Refused(message, code="invalid_token", status=401)
