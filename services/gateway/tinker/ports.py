"""What the Tinker surface asks of the catalog: everything that the REST routes do, and sessions, samplers, cancels.

The real one is `shared.catalog.operations_client.OperationsClient`; tests put a small one in its place.
"""

from __future__ import annotations

from typing import Protocol

from services.gateway.tinker.rest.ports import RestOperations
from shared.catalog import operations as ops

__all__ = ["Operations"]


class Operations(RestOperations, Protocol):
    """`tenant` None asks for every tenant. Raises Refused, with 404 for what is another tenant's, and Retryable."""

    async def heartbeat(self, session_id: str, caller: ops.Caller) -> ops.SessionHead: ...
    async def cancel(self, request_id: str, caller: ops.Caller) -> ops.OperationView: ...
    async def new_sampler(self, request: ops.NewSampler) -> ops.SamplerView: ...
    async def sampler(self, sampler_id: str, tenant: str | None = None) -> ops.SamplerView: ...
    async def join_sampler(self, sampler_id: str, caller: ops.Caller) -> ops.SamplerJoined: ...
    async def ended_samples(self, sampler_id: str, request: ops.AwaitSamples) -> ops.SamplesEnded: ...
    async def submit_sample(self, request: ops.SubmitSample) -> ops.OperationView: ...
