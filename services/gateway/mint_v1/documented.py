"""What the document says of every operation of `/mint/v1`: how to send a key, how a failure looks, what it is called.

Statuses say who must change what: 422 a request against the document, 400 one that agrees with it and still makes no
sense, 404 a thing that is unknown or another tenant's, in the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from fastapi import APIRouter, Security
from fastapi.params import Depends
from fastapi.security import APIKeyHeader, HTTPBearer
from pydantic import BaseModel

from services.gateway import documented
from services.gateway.edge import EdgeRoute

__all__ = ["TOO_LARGE", "Responses", "add", "documented_router", "said"]

Responses = dict[int | str, dict[str, Any]]
TAGS: list[str | Enum] = ["mint"]


class Error(BaseModel):
    """`errors` lists every fault of a request that has several; `near` what was perhaps meant. The queue
    fields come with 503 and 429 where they are known."""

    code: str
    message: str
    near: list[str] = []
    errors: list[str] = []
    queue_position: int | None = None
    expected_wait_s: float | None = None


class ErrorAnswer(BaseModel):
    error: Error


def said(**texts: str) -> Responses:
    """`_404="what it means"`, for statuses whose body is an ErrorAnswer."""
    return documented.said(ErrorAnswer, **texts)


FAILURES = said(
    _400="not what is allowed, in words",
    _401="no key, or an unknown, revoked or expired one",
    _404="unknown, or another tenant's",
    _409="a condition did not hold",
    _422="not what this document says; every fault in words",
    _503="a part does not answer; try again after Retry-After seconds",
)
TOO_LARGE = said(_413="the body is longer than is allowed")
SECURITY: Sequence[Depends] = (
    Security(HTTPBearer(auto_error=False, description="`Authorization: Bearer KEY`")),
    Security(APIKeyHeader(name="X-API-Key", auto_error=False)),
)
"""For the document: who asks is known before anything here runs."""


def documented_router(route: type[EdgeRoute]) -> APIRouter:
    return APIRouter(prefix="/mint/v1", route_class=route, tags=TAGS, responses=FAILURES, dependencies=SECURITY)


def add(router: APIRouter, method: str, path: str, handler: Callable[..., Any], summary: str, **other: Any) -> None:
    """The operation is named like its handler."""
    router.add_api_route(path, handler, methods=[method], summary=summary, operation_id=handler.__name__, **other)
