"""The gateway over small real parts: a byte-level codec, a catalog and a sampler that a test scripts."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
from fastapi import FastAPI
from mint_schemas.common import FileRef
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.gateway.config import GatewaySettings
from services.gateway.edge import Gateway
from services.gateway.identity import Keys
from services.gateway.resolution import Resolver
from services.gateway.routes import routers
from services.gateway.tokens import Tokens
from shared.adapters.manifest import Manifest
from shared.bases import Base
from shared.catalog import api
from shared.engine.port import FinishReason, SampleChunk, SampleRequest
from shared.errors import Refused
from shared.http import Traced
from shared.residency import Replica
from shared.sampling.port import Sampled, SampleStream, Served
from shared.store.memory import MemoryStore
from shared.text.codec import TextCodec
from shared.text.template import ChatTemplate
from tests.unit.gateway.key_book import AT, FakeBook
from tests.unit.gateway.tinker.fake_operations import FakeOperations

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
BASE_SHA256 = "b" * 64
ADAPTER_SHA256 = {"acme/adder@1": "1" * 64, "acme/adder@2": "2" * 64, "acme/adder@3": "3" * 64}
LOCAL = {"authorization": "Bearer tml-dev"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_codec() -> TextCodec:
    """One token a byte, and the two ChatML tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    end = tokenizer.token_to_id("<|im_end|>")
    return TextCodec(tokenizer, ChatTemplate(CHATML, {}), (end,))


CODEC = byte_codec()
TOKENS = Tokens("a secret of the stack")
END = CODEC.eos_ids[0]


def smollm(max_context: int = 512) -> Base:
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    digests = {"sha256": BASE_SHA256, "tokenizer_sha256": "c" * 64, "chat_template_sha256": "d" * 64}
    return Base(
        name=BASE,
        token="smollm2-135m",
        directory=Path("/nowhere"),
        max_rank=32,
        target_modules=targets,
        max_context=max_context,
        bytes=1000,
        **digests,
    )


class ScriptedSampler:
    """`refuse` says what a request is refused with. `reply` gives its text; it is sent `chunk_tokens` at a
    time, then the stop token. With `held` set, a stream waits for it after its first chunk. `closed` lists the
    streams that ended."""

    def __init__(self) -> None:
        self.reply: Callable[[SampleRequest], str] = lambda request: f"from {request.revision or 'base'}"
        self.chunk_tokens = 3
        self.held: asyncio.Event | None = None
        self.finish: FinishReason | None = None
        self.refuse: Callable[[SampleRequest], Exception | None] = lambda request: None
        self.failure: Exception | None = None
        self.failure_midway: Exception | None = None
        self.served: Served | None = None
        self.requests: list[SampleRequest] = []
        self.open: list[str] = []
        self.closed: list[str] = []
        self.sent: dict[str, int] = {}

    async def sample(self, base: str, request: SampleRequest) -> Sampled:
        raise NotImplementedError("the gateway streams")

    @asynccontextmanager
    async def stream(self, base: str, request: SampleRequest) -> AsyncIterator[SampleStream]:
        self.requests.append(request)
        failure = self.failure or self.refuse(request)
        if failure is not None:
            raise failure
        digest = ADAPTER_SHA256[request.revision] if request.revision else None
        served = self.served or Served(base, BASE_SHA256, request.revision, digest, "replica-0", "boot", "vllm")
        self.open.append(request.request_id)
        try:
            yield SampleStream(served, self._chunks(request))
        finally:
            self.open.remove(request.request_id)
            self.closed.append(request.request_id)

    async def _chunks(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        ids = CODEC.encode(self.reply(request))
        finish: FinishReason = "stop" if len(ids) < request.settings.max_tokens else "length"
        ids = [*ids, END] if finish == "stop" else ids[: request.settings.max_tokens]
        for start in range(0, len(ids), self.chunk_tokens):
            part = ids[start : start + self.chunk_tokens]
            last = start + self.chunk_tokens >= len(ids)
            self.sent[request.request_id] = start + len(part)
            yield _chunk(request, part, first=start == 0, finish=(self.finish or finish) if last else None)
            if self.held is not None:
                await self.held.wait()
            if self.failure_midway is not None:
                raise self.failure_midway
            await asyncio.sleep(0)


def _chunk(request: SampleRequest, ids: list[int], first: bool, finish: FinishReason | None) -> SampleChunk:
    """Logprob of token t: -t/100; its alternatives are t+1 at -0.5 and t+2 at minus infinity."""
    settings = request.settings
    tops: list[dict[int, float]] = [{i: -i / 100, i + 1: -0.5, i + 2: float("-inf")} for i in ids]
    prompt = None
    prompt_tops = None
    if first and settings.prompt_logprobs is not None:
        prompt = (None, *(-i / 100 for i in request.prompt[1:]))
        prompt_tops = (None, *({i: -i / 100, i + 1: -0.5} for i in request.prompt[1:]))
    return SampleChunk(
        index=0,
        token_ids=tuple(ids),
        logprobs=None if settings.logprobs is None else tuple(-i / 100 for i in ids),
        top_logprobs=tuple(tops) if settings.logprobs else None,
        finish_reason=finish,
        prompt_logprobs=prompt,
        prompt_top_logprobs=prompt_tops,
    )


class FakeCatalog:
    """acme/adder with revisions 1 to 3, `live` on 2; beta/secret is another tenant's. A queued `down`
    error is raised by every call; `calls` lists what was asked."""

    def __init__(self) -> None:
        self.down: Exception | None = None
        self.live = 2
        self.calls: list[tuple[str, Any]] = []
        self.run_views: dict[str, api.RunView] = {}
        self.entries: list[api.JournalEntry] = []
        self.errors: list[str] = []
        self.names = ["acme/adder", "acme/subber", "beta/secret"]
        self.scores: list[api.EvaluationView] = []
        self.manifest_files: dict[str, FileRef] = {}
        self.files: list[tuple[str, FileRef]] = []

    def _called(self, name: str, what: Any = None) -> None:
        self.calls.append((name, what))
        if self.down is not None:
            raise self.down

    async def resolve(self, reference: str) -> api.ResolvedRevision:
        self._called("resolve", reference)
        name, _, number = reference.partition("@")
        name, _, alias = name.partition(":")
        if name not in self.names[:1]:
            near = difflib.get_close_matches(name, self.names, 3, 0.6)
            raise Refused(f"there is no policy {name}", "unknown_reference", near, 404)
        if alias not in ("", "live") or (number and int(number) > 3):
            raise Refused(f"{name} has no {reference}", "unknown_alias", ["acme/adder"], 404)
        revision = f"acme/adder@{number or self.live}"
        return api.ResolvedRevision(
            reference=reference,
            base=BASE,
            revision=revision,
            adapter_sha256=ADAPTER_SHA256[revision],
            policy=name,
            alias=None if number else "live",
            alias_version=None if number else 7,
        )

    async def revision(self, reference: str) -> api.RevisionView:
        self._called("revision", reference)
        if reference not in ADAPTER_SHA256:
            raise Refused(f"there is no revision {reference}", "not_found", status=404)
        return revision_view(int(reference.partition("@")[2]), self.manifest_files)

    async def validate(self, request: api.ValidateRequest) -> api.ValidateAnswer:
        self._called("validate", request)
        return api.ValidateAnswer(ok=not self.errors, errors=self.errors, resolved={"parent": "acme/adder@2"})

    async def runs(
        self,
        tenant: str | None = None,
        policy: str | None = None,
        state: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> api.Page[api.RunView]:
        self._called("runs", (tenant, policy, state, limit, cursor))
        return api.Page[api.RunView](items=list(self.run_views.values()), next_cursor=None)

    async def run(self, run_id: str) -> api.RunView:
        self._called("run", run_id)
        if run_id not in self.run_views:
            raise Refused(f"no run {run_id}", "unknown", [], 404)
        return self.run_views[run_id]

    async def journal(self, run_id: str, after: int = 0) -> list[api.JournalEntry]:
        self._called("journal", (run_id, after))
        return [entry for entry in self.entries if entry.seq > after]

    async def cancel(self, run_id: str, request: api.CancelRequest) -> api.RunView:
        self._called("cancel", (run_id, request))
        return self.run_views[run_id].model_copy(update={"state": "cancelled", "outcome": request.reason})

    async def policies(
        self,
        tenant: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        alias: str | None = None,
        after: str | None = None,
    ) -> api.Page[api.PolicyView]:
        self._called("policies", (tenant, limit, cursor))
        names = [n for n in self.names if (tenant is None or n.startswith(f"{tenant}/")) and n > (cursor or "")]
        names = [n for n in names if n > (after or "") and (alias is None or alias in policy_view(n).aliases)]
        page = [policy_view(name) for name in names[:limit]]
        return api.Page[api.PolicyView](items=page, next_cursor=names[limit - 1] if len(names) > limit else None)

    async def policy(self, name: str) -> api.PolicyView:
        self._called("policy", name)
        if name not in self.names:
            raise Refused(f"no policy {name}; near: beta/secret", "unknown", ["acme/adder", "beta/secret"], 404)
        return policy_view(name)

    async def revisions(self, policy: str, limit: int = 50, cursor: str | None = None) -> api.Page[api.RevisionView]:
        self._called("revisions", (policy, limit, cursor))
        return api.Page[api.RevisionView](items=[revision_view(2, {}), revision_view(1, {})], next_cursor="1")

    async def moves(self, policy: str) -> list[api.AliasMove]:
        self._called("moves", policy)
        return []

    async def move_alias(self, policy: str, alias: str, request: api.MoveAlias) -> api.AliasView:
        self._called("move_alias", (policy, alias, request))
        return api.AliasView(policy=policy, alias=alias, revision=request.revision, version=8, previous=f"{policy}@2")

    async def rollback(self, policy: str, request: api.Rollback) -> api.AliasView:
        self._called("rollback", (policy, request))
        return api.AliasView(
            policy=policy, alias=request.alias, revision=request.to or f"{policy}@1", version=8, previous=None
        )

    async def pin(self, policy: str, request: api.PinPolicy) -> api.PolicyView:
        self._called("pin", (policy, request))
        return await self.policy(policy)

    async def evaluations(self, run_id: str | None = None, revision: str | None = None) -> list[api.EvaluationView]:
        self._called("evaluations", (run_id, revision))
        return self.scores

    async def evaluate(self, request: api.StartEvaluation) -> api.RunView:
        self._called("evaluate", request)
        return run_view("r-score", {"policy": request.reference.partition("@")[0]}, state="evaluating")

    async def register_data(self, tenant: str, file: FileRef) -> FileRef:
        self._called("register_data", (tenant, file))
        self.files.append((tenant, file))
        return file

    async def list_data(self, tenant: str, limit: int = 50, cursor: str | None = None) -> api.Page[api.DataView]:
        self._called("list_data", (tenant, limit, cursor))
        found = {
            file.sha256: api.DataView(**file.model_dump(), created_at=AT)
            for owner, file in self.files
            if owner == tenant
        }
        return api.Page[api.DataView](items=[found[sha256] for sha256 in sorted(found)][:limit], next_cursor=None)


def policy_view(name: str) -> api.PolicyView:
    return api.PolicyView(
        policy=name,
        tenant=name.partition("/")[0],
        base=BASE,
        created_at="2026-01-02T03:04:05Z",
        revisions=3,
        aliases={} if name == "acme/subber" else {"live": f"{name}@2"},
        active_run=None,
    )


def revision_view(number: int, files: dict[str, FileRef]) -> api.RevisionView:
    sha256 = ADAPTER_SHA256[f"acme/adder@{number}"]
    manifest = Manifest(
        revision="",
        policy="acme/adder",
        base=BASE,
        base_sha256=BASE_SHA256,
        tokenizer_sha256="c" * 64,
        chat_template_sha256="d" * 64,
        rank=8,
        alpha=32,
        use_rslora=False,
        target_modules=("q_proj",),
        tensors=(),
        files=files,
        adapter_sha256=sha256,
        parent=None,
        run_id="r",
        step=number,
        zero_delta=False,
        probe=None,
    )
    return api.RevisionView(
        revision=f"acme/adder@{number}",
        number=number,
        policy="acme/adder",
        base=BASE,
        run_id="r",
        step=number,
        parent=None,
        adapter_sha256=sha256,
        adapter_bytes=10,
        zero_delta=False,
        created_at="2026-01-02T03:04:05Z",
        aliases=(),
        manifest=manifest,
    )


def run_view(run_id: str, request: dict[str, Any], state: Any = "running") -> api.RunView:
    return api.RunView(
        run_id=run_id,
        policy=request.get("policy", "acme/adder"),
        base=BASE,
        state=state,
        method="sft",
        step=0,
        steps=8,
        outcome="",
        created_at="2026-01-02T03:04:05Z",
        started_at=None,
        ended_at=None,
        revision=None,
        promoted=False,
        request_source="mint/gateway",
        request_id="x",
        traceparent=None,
        request=request,
    )


class FakeBus:
    """`on_publish` lets a test play the catalog that reads the event."""

    def __init__(self) -> None:
        self.published: list[dict[str, Any]] = []
        self.failure: Exception | None = None
        self.on_publish: Callable[[dict[str, Any]], None] = lambda event: None

    async def publish(
        self,
        type: str,
        id: str,
        source: str,
        token: str,
        body: Any,
        subject: str | None = None,
        traceparent: str | None = None,
    ) -> object:
        if self.failure is not None:
            raise self.failure
        event = {"type": type, "id": id, "source": source, "token": token, "body": body}
        event |= {"subject": subject, "traceparent": traceparent}
        self.published.append(event)
        self.on_publish(event)
        return None


class FakeReplicas:
    def __init__(self) -> None:
        self.alive: list[Replica] = []

    def replicas(self, base: str | None = None) -> list[Replica]:
        return self.alive


class FakeTiers:
    """`reports` is what replicas report; `asked` the bases that were asked for."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.asked: list[str | None] = []

    async def residency(self, base: str | None = None) -> list[dict[str, Any]]:
        self.asked.append(base)
        return self.reports


class Kit:
    """All parts of one gateway, its app, and clients for it."""

    def __init__(self, **settings: Any) -> None:
        values = {"gateway_keys": {"key-acme": "acme", "key-root": "*"}, "gateway_progress_poll_s": 0.01}
        values |= {"gateway_run_visible_s": 0.0, "gateway_resolve_timeout_s": 0.5}
        self.settings = GatewaySettings(**(values | settings))
        self.catalog, self.sampler, self.bus = FakeCatalog(), ScriptedSampler(), FakeBus()
        self.replicas, self.tiers, self.store, self.book = FakeReplicas(), FakeTiers(), MemoryStore(), FakeBook()
        self.operations = FakeOperations(self.store)
        self.bases = {BASE: smollm()}
        self.gateway = Gateway(
            settings=self.settings,
            keys=Keys(self.settings.gateway_keys, self.settings.gateway_local_key, self.book, tokens=TOKENS),
            bases=self.bases,
            codecs={BASE: CODEC},
            catalog=self.catalog,
            operations=self.operations,
            resolver=Resolver(self.catalog, self.bases, self.settings.gateway_resolve_timeout_s),
            sampler=self.sampler,
            replicas=self.replicas,
            tiers=self.tiers,
            store=self.store,
            bus=self.bus,
        )
        self.app = FastAPI()
        self.app.add_middleware(Traced)
        for router in routers(self.gateway):
            self.app.include_router(router)

    def http(self, key: str = "tml-dev", host: str = "127.0.0.1", **options: Any) -> httpx2.AsyncClient:
        transport = httpx2.ASGITransport(self.app, client=(host, 50000))
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx2.AsyncClient(transport=transport, base_url="http://gateway", headers=headers, **options)

    def openai(self, key: str = "tml-dev") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            api_key=key, base_url="http://gateway/v1", max_retries=0, http_client=self.http(key="")
        )


class Client:
    """One request driven by hand over ASGI, so that a test can hang up in the middle."""

    def __init__(self, app: FastAPI, path: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self._app, self._body = app, body
        sent = {**LOCAL, "content-type": "application/json", **(headers or {})}
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            "client": ("127.0.0.1", 50000),
            "server": ("gateway", 80),
        }
        self.gone = asyncio.Event()
        self.received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def run(self) -> None:
        begun = False

        async def receive() -> dict[str, Any]:
            nonlocal begun
            if not begun:
                begun = True
                return {"type": "http.request", "body": self._body, "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await self.received.put(message)

        await self._app(self._scope, receive, send)  # type: ignore[arg-type]
