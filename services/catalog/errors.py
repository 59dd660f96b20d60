"""Errors on the internal API: `{"error": {"code", "message", "near"?}}`, whatever was raised inside."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from sqlalchemy.exc import OperationalError

from shared.errors import Fatal, Refused, Retryable

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
"""As JSON writes it: behind an even number of backslashes."""


class CatalogRoute(APIRoute):
    takes_nul: ClassVar[bool] = False

    def get_route_handler(self) -> Handler:
        handle, takes_nul = super().get_route_handler(), self.takes_nul

        async def answer(request: Request) -> Response:
            try:
                if not takes_nul:
                    await _refuse_nul(request)
                return await handle(request)
            except Refused as error:
                return error_response(error.status, error.code, str(error), error.near)
            except RequestValidationError as error:
                return error_response(400, "invalid_request", _words(error))
            except Retryable as error:
                return error_response(503, "try_again", str(error), retry_after_s=error.delay_s or 1.0)
            except OperationalError as error:
                return error_response(503, "try_again", f"the database did not answer: {error.orig}", retry_after_s=1.0)
            except Fatal as error:
                return error_response(409, "conflict", str(error))

        return answer


class WorkRoute(CatalogRoute):
    """Of workers, whose results may quote what a model wrote; those are kept as JSON, which holds anything."""

    takes_nul = True


async def _refuse_nul(request: Request) -> None:
    """PostgreSQL keeps no NUL in a text, SQLite does: it is refused for both."""
    if "\0" in request.scope["path"] or b"%00" in request.scope["query_string"] or NUL.search(await request.body()):
        raise Refused("a text holds a NUL character, which cannot be kept; leave it out", "invalid_request")


def error_response(
    status: int, code: str, message: str, near: list[str] | None = None, retry_after_s: float | None = None
) -> JSONResponse:
    body: dict[str, Any] = {"code": code, "message": message}
    if near:
        body["near"] = near
    headers = {"Retry-After": str(math.ceil(retry_after_s))} if retry_after_s is not None else None
    return JSONResponse({"error": body}, status, headers)


def _words(error: RequestValidationError) -> str:
    return "; ".join(f"{'.'.join(str(part) for part in e['loc'][1:]) or 'body'}: {e['msg']}" for e in error.errors())
