"""Every router of the gateway, over one set of parts."""

from __future__ import annotations

from fastapi import APIRouter

from services.gateway.edge import Gateway, edge_routes
from services.gateway.mint_v1.routes import mint_router
from services.gateway.openai.routes import openai_router, root_router

__all__ = ["routers"]


def routers(gateway: Gateway) -> list[APIRouter]:
    openai, mint = edge_routes(gateway)
    return [openai_router(openai), mint_router(mint), root_router(openai)]
