"""Failures as Tinker clients read them, whatever the route.

In: a problem, with its status. Out: JSON whose `detail` and `error` are the sentence for people and whose `category`
says whose fault it is. Invariant: what a retry cannot mend is no 5xx, and a conflict asks not to be retried.
"""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from services.gateway.errors import Problem
from shared.errors import Refused

__all__ = ["INVALID_TOKEN", "invalid", "tinker_answer", "unsupported"]

INVALID_TOKEN = "invalid_token"
"""The code of a refused token: clients exchange their key for a new one and ask again."""


def invalid(message: str) -> Refused:
    """What was sent is not what is allowed."""
    return Refused(message, code="invalid_request", status=422)


def unsupported(what: str, instead: str) -> Refused:
    """A part of the protocol that this server does not offer; `instead` says what to do."""
    return Refused(f"{what} is not supported by this server; {instead}", code="unsupported", status=400)


def tinker_answer(problem: Problem) -> JSONResponse:
    category = "server" if problem.status >= 500 else "user"
    body: dict[str, Any] = {"detail": problem.message, "error": problem.message}
    body |= {"category": category, "code": problem.code}
    if problem.near:
        body["near"] = problem.near
    if problem.errors:
        body["errors"] = problem.errors
    return JSONResponse(body, problem.status, _headers(problem))


def _headers(problem: Problem) -> dict[str, str]:
    headers = problem.headers
    if problem.code == INVALID_TOKEN:
        headers["www-authenticate"] = 'Bearer error="invalid_token"'
    if problem.status == 409:
        headers["x-should-retry"] = "false"
    return headers
