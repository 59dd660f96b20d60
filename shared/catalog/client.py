"""The catalog's internal HTTP API from the outside: one method per route of `shared/catalog/api.py`.

A catalog that does not answer is an Outage; an answer that refuses is Refused with the catalog's own
code, words and near matches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from mint_schemas import FileRef, parse_reference
from pydantic import BaseModel, TypeAdapter, ValidationError

from shared.errors import Fatal, Outage, Refused
from shared.telemetry import current_traceparent

from . import api

__all__ = ["CatalogClient"]

T = TypeVar("T")

_PREFIX = "/internal/v1"


class CatalogClient:
    """Safe to use from many tasks; `close` it once. Every method raises Outage or Refused."""

    def __init__(self, url: str, timeout_s: float = 10.0, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url = url
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=16, keepalive_expiry=20)
        # A proxy of the environment is for the world outside, never for a service beside this one.
        self._http = httpx.AsyncClient(
            base_url=url, timeout=timeout_s, limits=limits, transport=transport, trust_env=False
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def take(self, request: api.TakeRequest) -> api.TakeAnswer:
        return await self._post("/commands/take", request, api.TakeAnswer)

    async def renew(self, request: api.LeaseRequest) -> api.RenewAnswer:
        return await self._post("/commands/renew", request, api.RenewAnswer)

    async def release(self, request: api.LeaseRequest) -> None:
        await self._post("/commands/release", request, dict[str, Any])

    async def commit(self, request: api.CommitRequest) -> api.CommitAnswer:
        """Refused with code `stale_epoch`, `run_ended` or `wrong_step` when a condition did not hold."""
        return await self._post("/commands/commit", request, api.CommitAnswer)

    async def resolve(self, reference: str) -> api.ResolvedRevision:
        return await self._get("/resolve", api.ResolvedRevision, reference=reference)

    async def revision(self, reference: str) -> api.RevisionView:
        """By `tenant/policy@12`. Raises ValueError for a reference without a number."""
        parsed = parse_reference(reference)
        if parsed.number is None:
            raise ValueError(f"{reference!r} names no revision; write tenant/policy@12")
        return await self._get(f"/revisions/{parsed.tenant}/{parsed.policy}/{parsed.number}", api.RevisionView)

    async def validate(self, request: api.ValidateRequest) -> api.ValidateAnswer:
        return await self._post("/runs/validate", request, api.ValidateAnswer)

    async def runs(
        self,
        tenant: str | None = None,
        policy: str | None = None,
        state: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> api.Page[api.RunView]:
        return await self._get(
            "/runs", api.Page[api.RunView], tenant=tenant, policy=policy, state=state, limit=limit, cursor=cursor
        )

    async def run(self, run_id: str) -> api.RunView:
        return await self._get(f"/runs/{_part(run_id)}", api.RunView)

    async def journal(self, run_id: str, after: int = 0) -> list[api.JournalEntry]:
        return await self._get(f"/runs/{_part(run_id)}/journal", list[api.JournalEntry], after=after)

    async def cancel(self, run_id: str, request: api.CancelRequest) -> api.RunView:
        return await self._post(f"/runs/{_part(run_id)}/cancel", request, api.RunView)

    async def policies(
        self,
        tenant: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        alias: str | None = None,
        after: str | None = None,
    ) -> api.Page[api.PolicyView]:
        """By name; `alias`: only those that have it; `after`: only names that sort behind it."""
        return await self._get(
            "/policies",
            api.Page[api.PolicyView],
            tenant=tenant,
            limit=limit,
            cursor=cursor,
            alias=alias,
            after=after,
        )

    async def policy(self, name: str) -> api.PolicyView:
        return await self._get(_policy(name), api.PolicyView)

    async def revisions(self, policy: str, limit: int = 50, cursor: str | None = None) -> api.Page[api.RevisionView]:
        return await self._get(f"{_policy(policy)}/revisions", api.Page[api.RevisionView], limit=limit, cursor=cursor)

    async def moves(self, policy: str) -> list[api.AliasMove]:
        return await self._get(f"{_policy(policy)}/moves", list[api.AliasMove])

    async def move_alias(self, policy: str, alias: str, request: api.MoveAlias) -> api.AliasView:
        """Waits for readiness on the catalog's side, up to `request.timeout_s`."""
        path = f"{_policy(policy)}/aliases/{_part(alias)}"
        return await self._post(path, request, api.AliasView, timeout_s=request.timeout_s + 10)

    async def rollback(self, policy: str, request: api.Rollback) -> api.AliasView:
        path = f"{_policy(policy)}/rollback"
        return await self._post(path, request, api.AliasView, timeout_s=request.timeout_s + 10)

    async def pin(self, policy: str, request: api.PinPolicy) -> api.PolicyView:
        return await self._post(f"{_policy(policy)}/pin", request, api.PolicyView)

    async def evaluations(self, run_id: str | None = None, revision: str | None = None) -> list[api.EvaluationView]:
        return await self._get("/evaluations", list[api.EvaluationView], run_id=run_id, revision=revision)

    async def register_data(self, tenant: str, file: FileRef) -> FileRef:
        return await self._send("POST", "/data", FileRef, json={"tenant": tenant, **file.model_dump(mode="json")})

    async def data(self, tenant: str, sha256: str) -> FileRef:
        return await self._get(f"/data/{_part(tenant)}/{_part(sha256)}", FileRef)

    async def _get(self, path: str, answer: type[T], **query: str | int | None) -> T:
        return await self._send("GET", path, answer, params={k: v for k, v in query.items() if v is not None})

    async def _post(self, path: str, body: BaseModel, answer: type[T], timeout_s: float | None = None) -> T:
        return await self._send("POST", path, answer, json=body.model_dump(mode="json"), timeout_s=timeout_s)

    async def _send(
        self,
        method: str,
        path: str,
        answer: type[T],
        params: Mapping[str, str | int] | None = None,
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
            raise Outage(f"the catalog at {self._url} does not answer: {type(error).__name__} {error}") from error
        if response.is_error:
            raise _refusal(self._url, response)
        try:
            return TypeAdapter(answer).validate_json(response.content)
        except ValidationError as error:
            raise Fatal(f"the catalog answered {method} {path} with what this build does not know: {error}") from error


def _refusal(url: str, response: httpx.Response) -> Refused | Outage:
    try:
        body = api.ErrorBody.model_validate(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        body = api.ErrorBody(code="unknown", message=response.text[:500] or response.reason_phrase)
    if response.status_code >= 500:
        return Outage(f"the catalog at {url} answered {response.status_code}: {body.message}")
    return Refused(body.message, body.code, body.near, response.status_code)


def _part(text: str) -> str:
    return quote(text, safe="")


def _policy(name: str) -> str:
    parsed = parse_reference(name)
    return f"/policies/{parsed.tenant}/{parsed.policy}"
