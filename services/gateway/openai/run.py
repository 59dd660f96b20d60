"""Opening the generation of a request, and giving up when its client does."""

from __future__ import annotations

from starlette.requests import Request

from services.gateway.edge import Gateway
from services.gateway.openai.generate import Ask, Generation
from services.gateway.streaming import until_disconnect

__all__ = ["opened"]


async def opened(request: Request, gateway: Gateway, ask: Ask) -> Generation:
    """A generation whose proof holds; the caller closes it. Raises what `Generation.open` raises."""
    codec = gateway.codecs[ask.target.base.name]
    generation = Generation(gateway.sampler, codec, ask, gateway.settings.gateway_parallel_choices)
    try:
        await until_disconnect(request, generation.open())
    except BaseException:
        await generation.close()
        raise
    return generation
