"""The routes of `/v1`, in one table, and those that vLLM's clients look for at the root."""

from __future__ import annotations

from enum import Enum
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from services.gateway.documented import EVERY_METHOD, said
from services.gateway.edge import EdgeRoute, no_such_route
from services.gateway.openai.chat import chat_completions
from services.gateway.openai.completions import completions
from services.gateway.openai.models import Model, list_models, retrieve_model
from services.gateway.openai.residency import list_residency
from services.gateway.openai.tokenize import detokenize, tokenize

__all__ = ["openai_router", "root_router"]

TAGS: list[str | Enum] = ["openai"]


class Error(BaseModel):
    """`near`: what was perhaps meant. The queue fields come with 503 and 429 where they are known."""

    message: str
    type: str
    param: str | None = Field(description="the field of the request that is wrong")
    code: str | None
    near: list[str] = []
    queue_position: int | None = None
    expected_wait_s: float | None = None


class ErrorAnswer(BaseModel):
    error: Error


FAILURES = said(
    ErrorAnswer,
    _400="not what is allowed, in words; `param` names the field",
    _401="no key, or an unknown one",
    _404="an unknown model, or another tenant's",
    _429="a limit on requests was reached; try again after Retry-After seconds",
    _503="no replica can serve it now; try again after Retry-After seconds",
)


def _generates(summary: str) -> dict[str, Any]:
    headers = {
        "mint-base": {"description": "the base model that ran", "schema": {"type": "string"}},
        "mint-revision": {"description": "the revision that ran; absent for a base", "schema": {"type": "string"}},
        "mint-adapter-sha256": {"description": "the digest of its adapter", "schema": {"type": "string"}},
        "mint-resolution": {"description": "`stale` while the catalog is away", "schema": {"type": "string"}},
    }
    content: dict[str, Any] = {"application/json": {}, "text/event-stream": {}}
    answer = {"description": "OpenAI's answer, or its chunks with `stream: true`", "headers": headers}
    return {"summary": summary, "methods": ["POST"], "responses": {200: answer | {"content": content}}}


def openai_router(route: type[EdgeRoute]) -> APIRouter:
    router = APIRouter(prefix="/v1", route_class=route, tags=TAGS, responses=FAILURES)
    get = ["GET"]
    router.add_api_route("/models", list_models, methods=get, summary="Base models and live policies, by pages")
    router.add_api_route(
        "/models/{id:anything}",
        retrieve_model,
        methods=get,
        summary="What a base model's name or a reference means now",
        responses={200: {"model": Model}},
    )
    router.add_api_route("/chat/completions", chat_completions, **_generates("Answer a chat"))
    router.add_api_route("/completions", completions, **_generates("Continue or score texts"))
    router.add_api_route(
        "/residency",
        list_residency,
        methods=get,
        summary="What each replica holds, tier by tier",
        response_model_exclude_unset=True,
    )
    _tokenizing(router)
    router.add_api_route("/{rest:anything}", no_such_route, methods=EVERY_METHOD, include_in_schema=False)
    return router


def root_router(route: type[EdgeRoute]) -> APIRouter:
    router = APIRouter(route_class=route, tags=TAGS, responses=FAILURES)
    _tokenizing(router)
    return router


def _tokenizing(router: APIRouter) -> None:
    router.add_api_route("/tokenize", tokenize, methods=["POST"], summary="A text or a chat as token ids")
    router.add_api_route("/detokenize", detokenize, methods=["POST"], summary="Token ids as text")
