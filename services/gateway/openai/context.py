"""How many tokens a base model takes: prompt and completion together."""

from __future__ import annotations

from services.gateway.edge import Gateway
from shared.bases import Base

__all__ = ["context_tokens"]


def context_tokens(gateway: Gateway, base: Base) -> int:
    """What every replica of the base takes, in tokens; engines may be set to less than the model's own."""
    said = [replica.max_context for replica in gateway.replicas.replicas(base.name)]
    return min([base.max_context, *(tokens for tokens in said if tokens is not None)])
