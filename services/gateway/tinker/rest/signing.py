"""Signed links: whoever has one may fetch one checkpoint's archive, for some minutes, without a key.

The signing key comes from a secret that every gateway of a stack has and nobody else. Invariant: a link names one path,
for whom it was made and its end, and all are under the signature.
"""

from __future__ import annotations

import hashlib
import hmac

from shared.errors import Refused

__all__ = ["LIFETIME_S", "Signer"]

LIFETIME_S = 900


class Signer:
    def __init__(self, secret: str) -> None:
        self._key = hmac.digest(secret.encode(), b"mint archive links", "sha256")

    def sign(self, path: str, tenant: str, expires: int) -> str:
        """Hex. `tenant`: whose key asked, or ''. `expires` in seconds since the epoch."""
        return hmac.new(self._key, f"{expires}\n{tenant}\n{path}".encode(), hashlib.sha256).hexdigest()

    def check(self, path: str, tenant: str, expires: int, signature: str, now: float) -> None:
        """Raises Refused (403) for a link that was changed or is over."""
        if not hmac.compare_digest(self.sign(path, tenant, expires).encode(), signature.encode()):
            raise Refused("this link is not one of this server's; ask for the archive again", "bad_link", status=403)
        if now >= expires:
            raise Refused("this link is over; ask for the archive again", "link_expired", status=403)
