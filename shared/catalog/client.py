"""The catalog's internal HTTP API from the outside: one method per route of `shared/catalog/api.py`.

Errors as in `http.py`: Outage where the catalog does not answer, Refused where it says no.
"""

from __future__ import annotations

from typing import Any

from mint_schemas import FileRef, parse_reference

from . import api
from .http import CatalogHttp, quoted

__all__ = ["CatalogClient"]


class CatalogClient(CatalogHttp):
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
        return await self._get(f"/runs/{quoted(run_id)}", api.RunView)

    async def journal(self, run_id: str, after: int = 0) -> list[api.JournalEntry]:
        return await self._get(f"/runs/{quoted(run_id)}/journal", list[api.JournalEntry], after=after)

    async def cancel(self, run_id: str, request: api.CancelRequest) -> api.RunView:
        return await self._post(f"/runs/{quoted(run_id)}/cancel", request, api.RunView)

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
        path = f"{_policy(policy)}/aliases/{quoted(alias)}"
        return await self._post(path, request, api.AliasView, timeout_s=request.timeout_s + 10)

    async def rollback(self, policy: str, request: api.Rollback) -> api.AliasView:
        path = f"{_policy(policy)}/rollback"
        return await self._post(path, request, api.AliasView, timeout_s=request.timeout_s + 10)

    async def pin(self, policy: str, request: api.PinPolicy) -> api.PolicyView:
        return await self._post(f"{_policy(policy)}/pin", request, api.PolicyView)

    async def evaluations(self, run_id: str | None = None, revision: str | None = None) -> list[api.EvaluationView]:
        return await self._get("/evaluations", list[api.EvaluationView], run_id=run_id, revision=revision)

    async def evaluate(self, request: api.StartEvaluation) -> api.RunView:
        return await self._post("/evaluations", request, api.RunView)

    async def register_data(self, tenant: str, file: FileRef) -> FileRef:
        return await self._send("POST", "/data", FileRef, json={"tenant": tenant, **file.model_dump(mode="json")})

    async def list_data(self, tenant: str, limit: int = 50, cursor: str | None = None) -> api.Page[api.DataView]:
        """In order of sha256."""
        return await self._get(f"/data/{quoted(tenant)}", api.Page[api.DataView], limit=limit, cursor=cursor)

    async def data(self, tenant: str, sha256: str) -> FileRef:
        return await self._get(f"/data/{quoted(tenant)}/{quoted(sha256)}", FileRef)


def _policy(name: str) -> str:
    parsed = parse_reference(name)
    return f"/policies/{parsed.tenant}/{parsed.policy}"
