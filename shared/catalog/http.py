"""How the catalog's internal HTTP API is asked: one connection pool, one answer type a call, errors in the catalog's
own words.

A catalog that does not answer is an Outage; an answer that refuses is Refused with the catalog's own
code, words and near matches.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from shared.errors import Fatal, Outage, Refused
from shared.telemetry import current_traceparent

from . import api

__all__ = ["CatalogHttp", "quoted"]

T = TypeVar("T")
_log = logging.getLogger(__name__)

KEPT_S = 20.0
"""How long a connection is kept that nobody uses."""
_PREFIX = "/internal/v1"


class CatalogHttp:
    """Safe to use from many tasks; `close` it once. Every method raises Outage or Refused. `connections` None: as many
    as there are requests at a time, for those who wait long."""

    def __init__(
        self,
        url: str,
        timeout_s: float = 10.0,
        transport: httpx.AsyncBaseTransport | None = None,
        connections: int | None = 64,
    ) -> None:
        self._url, self._timeout_s = url, timeout_s
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=16, keepalive_expiry=KEPT_S)
        # A proxy of the environment is for the world outside, never for a service beside this one.
        self._http = httpx.AsyncClient(
            base_url=url, timeout=timeout_s, limits=limits, transport=transport, trust_env=False
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def _get(
        self, path: str, answer: type[T], timeout_s: float | None = None, /, **query: str | int | float | None
    ) -> T:
        params = {name: value for name, value in query.items() if value is not None}
        return await self._send("GET", path, answer, params=params, timeout_s=timeout_s)

    async def _post(self, path: str, body: BaseModel, answer: type[T], timeout_s: float | None = None) -> T:
        return await self._send("POST", path, answer, json=body.model_dump(mode="json"), timeout_s=timeout_s)

    async def _send(
        self,
        method: str,
        path: str,
        answer: type[T],
        params: Mapping[str, str | int | float] | None = None,
        json: Any = None,
        timeout_s: float | None = None,
    ) -> T:
        traceparent = current_traceparent()
        try:
            response = await self._http.request(
                method,
                _PREFIX + path,
                params=params,
                json=json,
                headers={"traceparent": traceparent} if traceparent else None,
                timeout=timeout_s if timeout_s is not None else httpx.USE_CLIENT_DEFAULT,
            )
        except httpx.HTTPError as error:
            _log.warning("the catalog at %s: %r", self._url, error)  # its address is nothing for those who ask us
            raise Outage(f"the catalog does not answer: {type(error).__name__} {error}") from error
        if response.is_error:
            raise _refusal(response)
        try:
            return TypeAdapter(answer).validate_json(response.content)
        except ValidationError as error:
            raise Fatal(f"the catalog answered {method} {path} with what this build does not know: {error}") from error


def _refusal(response: httpx.Response) -> Refused | Outage:
    try:
        body = api.ErrorBody.model_validate(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        body = api.ErrorBody(code="unknown", message=response.text[:500] or response.reason_phrase)
    if response.status_code >= 500:
        return Outage(f"the catalog answered {response.status_code}: {body.message}")
    return Refused(body.message, body.code, body.near, response.status_code)


def quoted(text: str) -> str:
    """As one segment of a path."""
    return quote(text, safe="")
