"""The catalog's sessions, models and operations in memory, and a learner that answers at once.

The rules are those of `shared/catalog/operations.py`: rows are unique by model and number, the same digest is the same
row, another one a 409, and operations are worked on in the order of their numbers, without gaps.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import Any

import numpy as np
from mint_schemas.training import Lora

from shared.catalog import operations as ops
from shared.errors import Refused
from shared.operations import payload as p
from shared.operations.content import read
from shared.store.port import ObjectStore

AT = 1_700_000_000.0


class FakeOperations:
    """`held`: nothing is worked on. `down` is raised by every call. `answers` replaces what the learner says, by kind;
    `refusals` are raised for what is submitted, by kind.
    `submits` and `samples` list what was accepted, `order` the numbers as they were worked on. `waiting` counts who
    waits for a result, and `waits` is set once somebody did."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.held = False
        self.down: Exception | None = None
        self.full: Exception | None = None
        self.answers: dict[str, Any] = {}
        self.refusals: dict[str, Refused] = {}
        self.session_views: dict[str, ops.SessionView] = {}
        self.model_views: dict[str, ops.ModelView] = {}
        self.samplers: dict[str, ops.SamplerView] = {}
        self.paths_by_name: dict[str, ops.PathView] = {}
        self.views: dict[str, ops.OperationView] = {}
        self.tenants: dict[str, str] = {}
        self.submits: list[ops.Submit] = []
        self.samples: list[ops.SubmitSample] = []
        self.new_models: list[ops.NewModel] = []
        self.cancelled: list[str] = []
        self.waiting = 0
        self.waits = asyncio.Event()
        self.order: list[int] = []
        self.joined: dict[str, int] = {}
        self.asked: list[ops.AwaitSamples] = []
        self._ended: dict[str, list[ops.OperationView]] = {}
        self._rows: dict[tuple[str, Any], tuple[str, ops.Submit | ops.SubmitSample | ops.NewModel]] = {}
        self._next: dict[str, int] = {}
        self._changed = asyncio.Event()

    async def new_session(self, request: ops.NewSession) -> ops.SessionView:
        self._called()
        view = ops.SessionView(
            session_id=f"session-{len(self.session_views)}",
            tenant=request.tenant,
            state="open",
            created_at=AT,
            seen_at=AT,
            sdk_version=request.sdk_version,
            tags=request.tags,
            user_metadata=request.user_metadata,
        )
        self.session_views[view.session_id] = view
        return view

    async def heartbeat(self, session_id: str, caller: ops.Caller) -> ops.SessionHead:
        self._called()
        view = self._own(self.session_views, session_id, caller.tenant)
        if view.state != "open":
            raise Refused(f"session {session_id} is {view.state}", "session_ended", status=410)
        return view

    async def finish_session(self, session_id: str, request: ops.FinishSession) -> ops.SessionView:
        self._called()
        view = self._own(self.session_views, session_id, request.tenant)
        self.session_views[session_id] = view.model_copy(update={"state": "finished"})
        return self.session_views[session_id]

    async def session(self, session_id: str, tenant: str | None = None) -> ops.SessionView:
        return self._own(self.session_views, session_id, tenant)

    async def new_model(self, request: ops.NewModel) -> ops.OperationView:
        self._called()
        session = self._own(self.session_views, request.session_id, request.tenant)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        known = self._rows.get((model_id, "begin"))
        if known is not None:
            if known[1] != request:
                raise Refused(f"{model_id} was made with another content", "other_payload", status=409)
            return self.views[known[0]]
        self.new_models.append(request)
        self.model_views[model_id] = ops.ModelView(
            model_id=model_id,
            session_id=request.session_id,
            tenant=session.tenant,
            run_id="run",
            policy=f"{session.tenant}/tinker-{hashlib.sha256(model_id.encode()).hexdigest()[:12]}",
            base=request.base,
            lora=request.lora,
            train_unembed=request.train_unembed,
            state="active",
            step=0,
            last_seq_id=0,
            created_at=AT,
            last_request_at=AT,
            user_metadata=request.user_metadata,
        )
        view = self._new("create_model", session.tenant, model_id, 0)
        self._rows[model_id, "begin"] = (view.request_id, request)
        self._next[model_id] = 1
        return self._set(view, state="done", result=_content(p.SavedResult(path=request.path or "")))

    async def model(self, model_id: str, tenant: str | None = None) -> ops.ModelView:
        self._called()
        return self._own(self.model_views, model_id, tenant)

    async def submit(self, request: ops.Submit) -> ops.OperationView:
        self._called()
        model = self._own(self.model_views, request.model_id, request.tenant)
        place = (request.model_id, request.key or request.seq_id)
        known = self._rows.get(place)
        if known is not None:
            if known[1].digest != request.digest:
                raise Refused(f"operation {request.seq_id} has another content", "other_payload", status=409)
            return self.views[known[0]]
        if request.failure is None and request.kind in self.refusals:
            raise self.refusals[request.kind]
        self.submits.append(request)
        view = self._new(request.kind, model.tenant, request.model_id, request.seq_id)
        self._rows[place] = (view.request_id, request)
        await self.work()
        return self.views[view.request_id]

    async def work(self) -> None:
        """Whatever can be done now is done."""
        if self.held:
            return
        for (name, number), (request_id, request) in sorted(self._rows.items(), key=lambda row: str(row[0])):
            if isinstance(request, ops.SubmitSample) and self.views[request_id].state == "queued":
                await self._done(request_id, request)
                self._ended.setdefault(name, []).append(self.views[request_id])
                self._tell()
            if number == "unload_model":
                self._set(self.views[request_id], state="done", result=None)
            if number != "begin" or name not in self._next:
                continue
            while (found := self._rows.get((name, self._next[name]))) is not None:
                self.order.append(self._next[name])
                self._next[name] += 1
                await self._done(*found)

    async def operation(self, request_id: str, tenant: str | None = None, wait_s: float = 0.0) -> ops.OperationView:
        self._called()
        self._check(request_id, tenant)
        self.waiting += 1
        self.waits.set()
        try:
            async with asyncio.timeout(wait_s):
                while self.views[request_id].state not in ("done", "failed"):
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self.waiting -= 1
        return self.views[request_id]

    async def cancel(self, request_id: str, caller: ops.Caller) -> ops.OperationView:
        self._called()
        self._check(request_id, caller.tenant)
        self.cancelled.append(request_id)
        return self.views[request_id]

    async def new_sampler(self, request: ops.NewSampler) -> ops.SamplerView:
        self._called()
        session = self._own(self.session_views, request.session_id, request.tenant)
        base = request.base
        if request.path is not None:
            base = (await self.resolve_path(request.path, request.tenant)).base
        assert base is not None
        view = ops.SamplerView(
            sampler_id=f"{request.session_id}:sample:{request.sampling_session_seq_id}",
            base=base,
            path=request.path,
            revision="acme/tinker-1@1" if request.path else None,
            adapter_sha256="a" * 64 if request.path else None,
        )
        self.samplers[view.sampler_id] = view
        self.tenants[view.sampler_id] = session.tenant
        return view

    async def sampler(self, sampler_id: str, tenant: str | None = None) -> ops.SamplerView:
        self._called()
        self._check(sampler_id, tenant)
        return self.samplers[sampler_id]

    async def join_sampler(self, sampler_id: str, caller: ops.Caller) -> ops.SamplerJoined:
        self._called()
        self._check(sampler_id, caller.tenant)
        self.joined[sampler_id] = self.joined.get(sampler_id, 0) + 1
        return ops.SamplerJoined(client=self.joined[sampler_id])

    async def ended_samples(self, sampler_id: str, request: ops.AwaitSamples) -> ops.SamplesEnded:
        self._called()
        self._check(sampler_id, request.tenant)
        self.asked.append(request)
        ended = self._ended.setdefault(sampler_id, [])
        self.waiting += 1
        self.waits.set()
        try:
            async with asyncio.timeout(request.wait_s):
                while not (found := [v for v in ended[request.after :] if request.first <= v.seq_id <= request.last]):
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self.waiting -= 1
        items = tuple(
            ops.EndedSample(request_id=v.request_id, failed=v.state == "failed", size=_size(v)) for v in found
        )
        return ops.SamplesEnded(items=items, cursor=len(ended))

    async def submit_sample(self, request: ops.SubmitSample) -> ops.OperationView:
        self._called()
        if self.full is not None:
            raise self.full
        tenant = request.tenant or "local"
        if request.sampling_session_id is not None:
            self._check(request.sampling_session_id, request.tenant)
            tenant = self.tenants[request.sampling_session_id]
        place = (request.sampling_session_id or "none", ("sample", request.seq_id))
        known = self._rows.get(place)
        if known is not None:
            if known[1].digest != request.digest:
                raise Refused(f"sample {request.seq_id} has another content", "other_payload", status=409)
            return self.views[known[0]]
        self.samples.append(request)
        view = self._new("sample", tenant, None, request.seq_id)
        self._rows[place] = (view.request_id, request)
        await self.work()
        return self.views[view.request_id]

    async def resolve_path(self, path: str, tenant: str | None = None) -> ops.PathView:
        self._called()
        return self._own(self.paths_by_name, path, tenant)

    def add_path(self, path: str, tenant: str, base: str, lora: Lora) -> None:
        model_id, kind, name = path.removeprefix("tinker://").split("/")
        self.paths_by_name[path] = ops.PathView(
            path=path,
            model_id=model_id,
            tenant=tenant,
            kind=kind,
            name=name,
            base=base,
            lora=lora,
            train_unembed=True,
            revision=None,
            checkpoint=None,
            has_optimizer=True,
            size_bytes=1,
            created_at=AT,
            expires_at=None,
            published=False,
        )

    async def payload(self, request: ops.Submit | ops.SubmitSample) -> Any:
        return p.decode(await read(self.store, request.payload))

    def _called(self) -> None:
        if self.down is not None:
            raise self.down

    def _own(self, found: dict[str, Any], name: str, tenant: str | None) -> Any:
        view = found.get(name)
        if view is None or (tenant is not None and view.tenant != tenant):
            raise Refused(f"there is no {name}", "not_found", status=404)
        return view

    def _check(self, name: str, tenant: str | None) -> None:
        if name not in self.tenants or (tenant is not None and self.tenants[name] != tenant):
            raise Refused(f"there is no {name}", "not_found", status=404)

    def _new(self, kind: Any, tenant: str, model_id: str | None, seq_id: int) -> ops.OperationView:
        request_id = f"request-{len(self.views)}"
        self.tenants[request_id] = tenant
        view = ops.OperationView(request_id=request_id, kind=kind, state="queued", model_id=model_id, seq_id=seq_id)
        self.views[request_id] = view
        return view

    def _set(self, view: ops.OperationView, **update: Any) -> ops.OperationView:
        self.views[view.request_id] = view.model_copy(update=update)
        self._tell()
        return self.views[view.request_id]

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _done(self, request_id: str, request: Any) -> None:
        view = self.views[request_id]
        failure = getattr(request, "failure", None)
        if failure is not None:
            self._set(view, state="failed", failure=failure)
            return
        value = await self.payload(request)
        answer = self.answers.get(view.kind) or _learnt(view, value)
        if isinstance(answer, ops.Failure):
            self._set(view, state="failed", failure=answer)
        elif isinstance(answer, ops.Content):
            self._set(view, state="done", result=answer)
        else:
            self._set(view, state="done", result=_content(answer))


def _size(view: ops.OperationView) -> int | None:
    return None if view.result is None else len(view.result.inline or b"")


def _content(value: Any) -> ops.Content:
    return ops.Content(inline=base64.b64encode(p.encode(value)))


def _learnt(view: ops.OperationView, value: Any) -> Any:
    if isinstance(value, p.TrainPayload):
        logprobs = tuple(np.full(row.inputs["target_tokens"].shape, -0.5, np.float32) for row in value.rows)
        return p.TrainResult(logprobs, {"loss:sum": 0.5 * sum(array.size for array in logprobs)})
    if isinstance(value, p.AdamPayload):
        return p.StepResult({"grad_norm:mean": 1.0})
    if isinstance(value, p.SavePayload) and value.name:
        return p.SavedResult(path=f"tinker://{view.model_id}/{value.kind}/{value.name}")
    if isinstance(value, p.SavePayload):
        return p.SavedResult(sampling_session_id=f"{view.model_id}:sampler:{value.sampling_session_seq_id}")
    if isinstance(value, p.LoadPayload):
        return p.SavedResult(path=value.path)
    tokens = np.array([5, 6], np.int64)
    sequence = p.Sequence(tokens, np.array([-0.25, -0.5], np.float32), "stop")
    return p.SampleResult(
        sequences=(sequence,) * value.num_samples,
        prompt_logprobs=np.array([np.nan, *[-1.0] * (len(value.prompt) - 1)], np.float32)
        if value.prompt_logprobs
        else None,
        topk=((), *(((7, -0.125), (8, -2.0)),) * (len(value.prompt) - 1)) if value.topk_prompt_logprobs else None,
        revision="acme/tinker-1@1",
        adapter_sha256="a" * 64,
    )
