"""What the engines behind a base model declare: nothing is asked of one that none of them has.

In: the live replicas. Out: nothing, or BadField. With no replica alive nothing is known, and the request goes on
to be told so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.gateway.errors import BadField
from shared.residency import Replica

__all__ = ["require_structured_output", "require_tools"]


def require_structured_output(replicas: Sequence[Replica], param: str) -> None:
    """Raises BadField where no live replica follows a grammar."""
    _require(replicas, lambda replica: replica.structured_output, param, "structured output (json_schema, regex)")


def require_tools(replicas: Sequence[Replica], param: str) -> None:
    """Raises BadField where no live replica declares tools."""
    _require(replicas, lambda replica: replica.tools, param, "tool calls")


def _require(replicas: Sequence[Replica], has: Callable[[Replica], bool], param: str, what: str) -> None:
    if replicas and not any(map(has, replicas)):
        engines = ", ".join(sorted({replica.engine for replica in replicas}))
        raise BadField(param, f"engine {engines} has no {what}; leave {param} out", "unsupported_parameter")
