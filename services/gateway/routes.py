"""Every router of the gateway, over one set of parts."""

from __future__ import annotations

from fastapi import APIRouter

from services.gateway.edge import Gateway, edge_routes
from services.gateway.mint_v1.routes import mint_router
from services.gateway.openai.routes import openai_router, root_router
from services.gateway.tinker.rest.routes import adapters_router, rest_router
from services.gateway.tinker.routes import tinker_route, tinker_router

__all__ = ["routers"]


def routers(gateway: Gateway) -> list[APIRouter]:
    """Those that have an answer for every path of their prefix come last of it."""
    openai, mint = edge_routes(gateway)
    tinker = tinker_route(gateway)
    return [
        openai_router(openai),
        adapters_router(mint),
        mint_router(mint),
        rest_router(tinker),
        tinker_router(tinker),
        root_router(openai),
    ]
