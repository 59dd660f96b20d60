"""Sessions, models and operations from the outside: one method per route of `shared/catalog/operations.py`.

Errors as in `http.py`: Outage where the catalog does not answer, Refused with its code and status where it says no.
"""

from __future__ import annotations

from typing import Any

from . import operations as ops
from .api import RenewAnswer
from .http import CatalogHttp, quoted

__all__ = ["OperationsClient"]


class OperationsClient(CatalogHttp):
    """`tenant` None asks for every tenant, as workers and the platform's own tools do."""

    async def new_session(self, request: ops.NewSession) -> ops.SessionView:
        return await self._post("/sessions", request, ops.SessionView)

    async def heartbeat(self, session_id: str, caller: ops.Caller) -> ops.SessionHead:
        """Refused with status 410 (`session_ended`) for one that is finished or expired."""
        return await self._post(f"/sessions/{quoted(session_id)}/heartbeat", caller, ops.SessionHead)

    async def finish_session(self, session_id: str, request: ops.FinishSession) -> ops.SessionView:
        """Again: the same view."""
        return await self._post(f"/sessions/{quoted(session_id)}/finish", request, ops.SessionView)

    async def sessions(self, tenant: str | None = None, limit: int = 20, offset: int = 0) -> ops.SessionPage:
        return await self._get("/sessions", ops.SessionPage, tenant=tenant, limit=limit, offset=offset)

    async def session(self, session_id: str, tenant: str | None = None) -> ops.SessionView:
        return await self._get(f"/sessions/{quoted(session_id)}", ops.SessionView, tenant=tenant)

    async def new_model(self, request: ops.NewModel) -> ops.OperationView:
        """Done when it is accepted. Refused: 400 for what cannot be trained, 404 for a path that is not there, 409 for
        the same number in the session with other content, 410 for a session that ended."""
        return await self._post("/models", request, ops.OperationView)

    async def model(self, model_id: str, tenant: str | None = None) -> ops.ModelView:
        return await self._get(f"/models/{quoted(model_id)}", ops.ModelView, tenant=tenant)

    async def models(self, tenant: str | None = None, limit: int = 20, offset: int = 0) -> ops.ModelPage:
        """Newest first."""
        return await self._get("/models", ops.ModelPage, tenant=tenant, limit=limit, offset=offset)

    async def submit(self, request: ops.Submit) -> ops.OperationView:
        """Stored when this returns; what it asks for and cannot have is stored as failed. Refused with 409
        (`other_payload`) where the number has another digest, 400 (`seq_id_passed`, `unloaded`), 410 and 429."""
        return await self._post("/operations", request, ops.OperationView)

    async def operation(self, request_id: str, tenant: str | None = None, wait_s: float = 0.0) -> ops.OperationView:
        """Returns as soon as it is done or failed, after `wait_s` at the latest (at most 60)."""
        path = f"/operations/{quoted(request_id)}"
        return await self._get(path, ops.OperationView, self._timeout_s + wait_s, tenant=tenant, wait_s=wait_s)

    async def cancel(self, request_id: str, caller: ops.Caller) -> ops.OperationView:
        """What was not taken yet fails as cancelled; what runs or is over stays as it is."""
        return await self._post(f"/operations/{quoted(request_id)}/cancel", caller, ops.OperationView)

    async def take(self, request: ops.TakeOperations) -> ops.OperationsTaken:
        return await self._post("/operations/take", request, ops.OperationsTaken)

    async def renew(self, request: ops.OperationsLease) -> RenewAnswer:
        """Of a policy's lease, or a sample's."""
        return await self._post("/operations/renew", request, RenewAnswer)

    async def release(self, request: ops.OperationsLease) -> None:
        await self._post("/operations/release", request, dict[str, Any])

    async def commit(self, request: ops.CommitOperation) -> ops.OperationView:
        """Answers with what won. Refused with code `stale_epoch`, `run_ended`, `out_of_order`, `files_missing` or
        `wrong_step`, status 409, when a condition did not hold."""
        return await self._post("/operations/commit", request, ops.OperationView)

    async def new_sampler(self, request: ops.NewSampler) -> ops.SamplerView:
        return await self._post("/samplers", request, ops.SamplerView)

    async def sampler(self, sampler_id: str, tenant: str | None = None) -> ops.SamplerView:
        return await self._get(f"/samplers/{quoted(sampler_id)}", ops.SamplerView, tenant=tenant)

    async def join_sampler(self, sampler_id: str, caller: ops.Caller) -> ops.SamplerJoined:
        """Each call is another client."""
        return await self._post(f"/samplers/{quoted(sampler_id)}/join", caller, ops.SamplerJoined)

    async def ended_samples(self, sampler_id: str, request: ops.AwaitSamples) -> ops.SamplesEnded:
        """Returns as soon as there is one, after `wait_s` at the latest. Reading it again changes nothing."""
        path, timeout_s = f"/samplers/{quoted(sampler_id)}/ended", self._timeout_s + request.wait_s
        return await self._post(path, request, ops.SamplesEnded, timeout_s)

    async def submit_sample(self, request: ops.SubmitSample) -> ops.OperationView:
        """Refused with status 429 (`too_many_samples`) where the tenant has too many open."""
        return await self._post("/samples", request, ops.OperationView)

    async def take_sample(self, request: ops.TakeSample) -> ops.SampleTaken:
        return await self._post("/samples/take", request, ops.SampleTaken)

    async def paths(
        self, tenant: str | None = None, model_id: str | None = None, limit: int = 100, offset: int = 0
    ) -> ops.PathPage:
        """Newest first; of one model, oldest first."""
        return await self._get("/paths", ops.PathPage, tenant=tenant, model_id=model_id, limit=limit, offset=offset)

    async def resolve_path(self, path: str, tenant: str | None = None) -> ops.PathView:
        """The tenant's own or a published one; everything else is 404."""
        return await self._get("/paths/resolve", ops.PathView, tenant=tenant, path=path)

    async def change_path(self, request: ops.ChangePath) -> ops.PathView:
        return await self._post("/paths/change", request, ops.PathView)

    async def copy_path(self, request: ops.CopyPath) -> ops.PathView:
        return await self._post("/paths/copy", request, ops.PathView)

    async def import_path(self, request: ops.ImportPath) -> ops.OperationView:
        return await self._post("/paths/import", request, ops.OperationView)

    async def delete_path(self, path: str, tenant: str | None = None) -> None:
        params = {"path": path} | ({"tenant": tenant} if tenant is not None else {})
        await self._send("DELETE", "/paths", dict[str, Any], params=params)
