"""The routes of `/v1`, in one table."""

from __future__ import annotations

from fastapi import APIRouter

from services.gateway.edge import EdgeRoute, no_such_route
from services.gateway.openai.chat import chat_completions
from services.gateway.openai.completions import completions
from services.gateway.openai.models import Model, ModelList, list_models, retrieve_model

__all__ = ["openai_router"]

EVERY_METHOD = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def openai_router(route: type[EdgeRoute]) -> APIRouter:
    router = APIRouter(prefix="/v1", route_class=route, tags=["openai"])
    router.add_api_route("/models", list_models, methods=["GET"], response_model=ModelList)
    router.add_api_route("/models/{id:path}", retrieve_model, methods=["GET"], responses={200: {"model": Model}})
    router.add_api_route("/chat/completions", chat_completions, methods=["POST"])
    router.add_api_route("/completions", completions, methods=["POST"])
    router.add_api_route("/{rest:path}", no_such_route, methods=EVERY_METHOD, include_in_schema=False)
    return router
