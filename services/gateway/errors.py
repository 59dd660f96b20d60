"""Every failure as an HTTP answer: the OpenAI error shape for `/v1`, MinT's own for `/mint/v1`.

In: whatever a handler raised. Out: a status, a body and headers. Invariant: the message says what
happened and what is allowed; an unforeseen error tells the caller its request id and nothing else.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shared.errors import Busy, Fatal, Refused, Retryable
from shared.validation import in_words

__all__ = ["BadField", "Invalid", "Problem", "mint_answer", "openai_answer", "problem_of"]

logger = logging.getLogger(__name__)

DEFAULT_RETRY_S = 2.0
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class BadField(Refused):
    """A field of an OpenAI request is not what is allowed; `param` names it."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message, code=code)
        self.param = param


class Invalid(Refused):
    """A request with several faults, each said in words."""

    def __init__(self, errors: list[str], status: int = 422) -> None:
        super().__init__("; ".join(errors), code="invalid_request", status=status)
        self.errors = errors


@dataclass(frozen=True)
class Problem:
    status: int
    code: str
    message: str
    near: list[str] = field(default_factory=list)
    param: str | None = None
    errors: list[str] = field(default_factory=list)
    retry_after_s: float | None = None
    queue_position: int | None = None
    expected_wait_s: float | None = None
    allow: str = ""

    @property
    def queue(self) -> dict[str, float]:
        """The place in the queue and the expected wait in seconds, where they are known."""
        found = {"queue_position": self.queue_position, "expected_wait_s": self.expected_wait_s}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.allow:
            headers["allow"] = self.allow
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


def problem_of(error: Exception, request_id: str) -> Problem:
    if isinstance(error, Refused):
        return Problem(
            error.status,
            error.code,
            str(error),
            error.near,
            getattr(error, "param", None),
            getattr(error, "errors", []),
            allow=getattr(error, "allow", ""),
        )
    if isinstance(error, Busy):
        return Problem(
            error.status,
            error.code,
            str(error),
            retry_after_s=error.delay_s or DEFAULT_RETRY_S,
            queue_position=error.queue_position,
            expected_wait_s=error.expected_wait_s,
        )
    if isinstance(error, Retryable):
        return Problem(503, "unavailable", str(error), retry_after_s=error.delay_s or DEFAULT_RETRY_S)
    if isinstance(error, RequestValidationError):
        errors = _in_words(error.errors())
        first = () if not error.errors() or _no_json(error.errors()) else _field(error.errors()[0]["loc"])
        param = str(first[0]) if first else None
        return Problem(422, "invalid_request", "; ".join(errors), param=param, errors=errors)
    if isinstance(error, HTTPException):
        return Problem(error.status_code, "http_error", str(error.detail))
    if isinstance(error, Fatal):
        logger.error("request %s failed: %s", request_id, error)
        return Problem(500, "failed", str(error))
    logger.exception("request %s failed", request_id, exc_info=error)
    return Problem(500, "internal", f"internal error; the log has it under request id {request_id}")


def _in_words(errors: Sequence[Any]) -> list[str]:
    if _no_json(errors):
        return [f"the body is not JSON: {errors[0].get('ctx', {}).get('error', errors[0]['msg'])}"]
    if errors and isinstance(errors[0].get("input"), bytes):
        return ["the body was not read as JSON: send it with the header content-type: application/json"]
    return in_words(errors, _field)


def _no_json(errors: Sequence[Any]) -> bool:
    return bool(errors) and errors[0]["type"] == "json_invalid"


def _field(loc: Sequence[Any]) -> Sequence[Any]:
    """The place within what the caller wrote, without the part of the request that it is in."""
    return loc[1:] if loc and loc[0] in ("body", "query", "path", "header") else loc


def openai_answer(problem: Problem) -> JSONResponse:
    # The OpenAI API answers 400 where FastAPI's habit is 422.
    status = 400 if problem.status == 422 else problem.status
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    body: dict[str, Any] = {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}
    if problem.near:
        body["near"] = problem.near
    return JSONResponse({"error": body | problem.queue}, status, problem.headers)


def mint_answer(problem: Problem) -> JSONResponse:
    body: dict[str, Any] = {"code": problem.code, "message": problem.message, "near": problem.near}
    if problem.errors:
        body["errors"] = problem.errors
    return JSONResponse({"error": body | problem.queue}, problem.status, problem.headers)
