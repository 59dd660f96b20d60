"""Opening the generation of a request in its caller's name, and giving up when the client does.

A client may bound its wait for the first token, queues and loads included, with the header `mint-wait-s`.
"""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request

from services.gateway.edge import Gateway
from services.gateway.errors import BadField
from services.gateway.identity import Identity
from services.gateway.openai.generate import Ask, Generation
from services.gateway.resolution import Target
from services.gateway.streaming import until_disconnect

__all__ = ["WAIT_HEADER", "opened"]

WAIT_HEADER = "mint-wait-s"
MAX_WAIT_S = 3600.0


async def opened(request: Request, gateway: Gateway, ask: Ask) -> Generation:
    """A generation whose proof holds; the caller closes it. Raises what `Generation.open` raises, and
    BadField for a wait that is none."""
    ask = replace(ask, tenant=_tenant(request.state.identity, ask.target), wait_s=_wait_s(request))
    codec = gateway.codecs[ask.target.base.name]
    generation = Generation(gateway.sampler, codec, ask, gateway.settings.gateway_parallel_choices)
    try:
        await until_disconnect(request, generation.open())
    except BaseException:
        await generation.close()
        raise
    return generation


def _tenant(caller: Identity, target: Target) -> str:
    """Whom the work counts for: the caller's tenant; with a key for all tenants, the policy's."""
    if caller.tenant is not None:
        return caller.tenant
    return target.revision.partition("/")[0] if target.revision is not None else ""


def _wait_s(request: Request) -> float | None:
    text = request.headers.get(WAIT_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_WAIT_S:
        raise BadField(WAIT_HEADER, f"{WAIT_HEADER} is {text[:80]!r}; seconds above 0, at most {MAX_WAIT_S:.0f}")
    return seconds
