"""What serving tests stand on: a base of a few kilobytes, a catalog and a store that count, an engine
that can be held, killed and read, and the bus's key-value buckets and publishes in memory."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from mint_schemas.common import FileRef
from pydantic import BaseModel

from services.serving.replica import Options, ServingReplica, Surroundings
from services.serving.residency import Limits
from services.serving.status import Identity
from shared.adapters import layout
from shared.adapters.manifest import Manifest
from shared.bases import Base, load_base
from shared.bus.kv import Entry
from shared.catalog.api import RevisionView
from shared.engine.fake import fake_engine
from shared.engine.port import (
    Capabilities,
    EngineDead,
    EngineError,
    LoadReport,
    ResidentAdapter,
    SampleChunk,
    SampleRequest,
    SamplingSettings,
)
from shared.engine.settings import EngineSettings
from shared.errors import Refused, Retryable
from shared.residency import RESIDENCY_BUCKET, Desired, DesiredRevision
from shared.store.memory import MemoryStore
from shared.store.port import BytesDiffer
from tests.adapters import write_adapter

VOCABULARY = 96
BASE_NAME, BASE_TOKEN = "mini/llama", "mini"


def make_base(directory: Path, seed: int = 0, name: str = BASE_NAME, token: str = BASE_TOKEN) -> Base:
    """One layer of width 8 with the seven projections; the fake engine reads its shapes and digests."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shapes = {
        **{f"self_attn.{part}": (8, 8) for part in ("q_proj", "k_proj", "v_proj", "o_proj")},
        "mlp.gate_proj": (16, 8),
        "mlp.up_proj": (16, 8),
        "mlp.down_proj": (8, 16),
    }
    tensors = {
        f"model.layers.0.{module}.weight": rng.standard_normal(shape).astype(np.float32)
        for module, shape in shapes.items()
    }
    (directory / "model.safetensors").write_bytes(layout.tensor_file_bytes(tensors))
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "max_position_embeddings": 512}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return load_base(name, token, directory)


class Catalog:
    """`revision` of the catalog client over a dict; counts what is asked."""

    def __init__(self) -> None:
        self.views: dict[str, RevisionView] = {}
        self.asked: Counter[str] = Counter()
        self.down = False

    def add(self, manifest: Manifest) -> None:
        policy, number = manifest.revision.split("@")
        self.views[manifest.revision] = RevisionView(
            revision=manifest.revision,
            number=int(number),
            policy=policy,
            base=manifest.base,
            run_id="run",
            step=1,
            parent=None,
            adapter_sha256=manifest.adapter_sha256,
            adapter_bytes=manifest.adapter_bytes,
            zero_delta=manifest.zero_delta,
            created_at="2026-01-01T00:00:00Z",
            aliases=(),
            manifest=manifest.model_copy(update={"revision": ""}),
        )

    async def revision(self, reference: str) -> RevisionView:
        self.asked[reference] += 1
        if self.down:
            raise Retryable("the catalog does not answer")
        if reference not in self.views:
            raise Refused(f"no revision {reference}", code="unknown_revision", status=404)
        return self.views[reference]


class CountingStore(MemoryStore):
    """`gate` holds downloads back; `cuts` is how many downloads break off half-way; `down` answers none."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()
        self.cuts = 0

    async def fetch(self, ref: FileRef, path: Path) -> None:
        self.fetched[ref.key] += 1
        await self.gate.wait()
        if self.cuts:
            self.cuts -= 1
            await asyncio.to_thread(path.write_bytes, (await self.get(ref))[: ref.size // 2])
            raise BytesDiffer(f"{ref.key} was cut off half-way")
        await super().fetch(ref, path)

    def truncate(self, key: str) -> None:
        content, modified = self._objects[key]
        self._objects[key] = (content[: len(content) // 2], modified)


class Engine:
    """The fake engine, watched: `loads` counts, `load_gate` and `token_gate` hold it back, `die` ends it,
    `distort` changes what a load reports, `kills` are revisions whose load ends it, `doubts` is how often
    it contradicts itself."""

    def __init__(self, base: Base, settings: EngineSettings, controls: Controls) -> None:
        self._inner = fake_engine(base, settings)
        self._controls = controls
        self.alive = True

    async def load(self, manifest: Manifest, directory: Path) -> LoadReport:
        self._check()
        self._controls.loads[manifest.revision] += 1
        await self._controls.load_gate.wait()
        if manifest.revision in self._controls.kills:
            self.alive = False
        self._check()
        report = await self._inner.load(manifest, directory)
        return self._controls.distort(report)

    async def unload(self, revision: str) -> None:
        self._check()
        self._controls.unloads[revision] += 1
        await self._inner.unload(revision)

    async def pin(self, revision: str, pinned: bool) -> None:
        self._check()
        await self._inner.pin(revision, pinned)

    async def sample(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        self._check()
        ended = False
        try:
            async with aclosing(self._inner.sample(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
                    await self._controls.token_gate.wait()
                    self._check()
            ended = True
        finally:
            self._controls.aborted += not ended

    async def resident(self) -> list[ResidentAdapter]:
        self._check()
        if self._controls.doubts:
            self._controls.doubts -= 1
            raise EngineError("the engine contradicts itself")
        return await self._inner.resident()

    def capabilities(self) -> Capabilities:
        return self._inner.capabilities()

    async def close(self) -> None:
        self.alive = False
        await self._inner.close()

    def die(self) -> None:
        self.alive = False

    def _check(self) -> None:
        if not self.alive:
            raise EngineDead("the engine's process is gone")


@dataclass
class Controls:
    loads: Counter[str] = field(default_factory=Counter)
    unloads: Counter[str] = field(default_factory=Counter)
    load_gate: asyncio.Event = field(default_factory=asyncio.Event)
    token_gate: asyncio.Event = field(default_factory=asyncio.Event)
    kills: set[str] = field(default_factory=set)
    aborted: int = 0
    distort: Callable[[LoadReport], LoadReport] = lambda report: report
    start_failures: int = 0
    doubts: int = 0
    engines: list[Engine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.load_gate.set()
        self.token_gate.set()


class MemoryBucket:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.revision = 0
        self._changed = asyncio.Event()

    async def get(self, key: str) -> Entry | None:
        return Entry(key, self.values[key], self.revision) if key in self.values else None

    async def put(self, key: str, value: bytes) -> int:
        self.values[key] = value
        return self._touch()

    async def delete(self, key: str) -> None:
        self.values.pop(key, None)
        self._touch()

    async def entries(self, pattern: str = ">") -> dict[str, Entry]:
        return {key: Entry(key, value, self.revision) for key, value in self.values.items()}

    async def watch(self, pattern: str = ">", resync_s: float = 3.0) -> AsyncIterator[Entry]:
        seen: dict[str, bytes] = {}
        while True:
            changed, now = self._changed, dict(self.values)
            for key in seen.keys() | now.keys():
                if pattern in (">", key) and seen.get(key) != now.get(key):
                    yield Entry(key, now.get(key), self.revision)
            seen = now
            await changed.wait()

    def _touch(self) -> int:
        self.revision += 1
        self._changed.set()
        self._changed = asyncio.Event()
        return self.revision


class MemoryBus:
    """Buckets and publishes of the bus; `down` makes a publish fail."""

    def __init__(self) -> None:
        self.buckets: dict[str, MemoryBucket] = {}
        self.published: list[tuple[str, str, dict[str, Any]]] = []
        self.down = False

    async def ping(self, timeout_s: float = 1.0) -> bool:
        return not self.down

    def kv(self, bucket: str) -> MemoryBucket:
        return self.buckets.setdefault(bucket, MemoryBucket())

    async def publish(self, type: str, id: str, body: BaseModel | Mapping[str, Any], **_: Any) -> None:
        if self.down:
            raise Retryable("the bus does not answer")
        content = body.model_dump() if isinstance(body, BaseModel) else dict(body)
        self.published.append((type, id, content))


@dataclass
class Stage:
    """One replica and everything around it."""

    directory: Path
    base: Base
    bus: Any = field(default_factory=MemoryBus)
    store: CountingStore = field(default_factory=CountingStore)
    catalog: Catalog = field(default_factory=Catalog)
    controls: Controls = field(default_factory=Controls)
    name: str = "mini-0"
    url: str = "http://127.0.0.1:1"

    async def add(self, revision: str, seed: int | None = None, **changes: Any) -> Manifest:
        """Put a random adapter into store and catalog."""
        source = self.directory / "made" / revision.replace("/", "-")
        seed = sum(revision.encode()) if seed is None else seed
        manifest = write_adapter(source, self.base, revision, rank=2, seed=seed, std=2.0)
        for name, ref in manifest.files.items():
            await self.store.put(ref.key, source / name)
        manifest = manifest.model_copy(update=changes)
        self.catalog.add(manifest)
        return manifest

    async def desire(self, *revisions: str, pinned: tuple[str, ...] = (), lately: tuple[str, ...] = ()) -> None:
        """Most urgent first; `lately`: those that need not be kept."""
        entries = tuple(
            DesiredRevision(
                revision=revision,
                adapter_sha256=self.catalog.views[revision].adapter_sha256,
                priority=place,
                pinned=revision in pinned,
                keep=revision not in lately,
            )
            for place, revision in enumerate(revisions)
        )
        desired = Desired(base=self.base.name, entries=entries)
        await self.bus.kv(RESIDENCY_BUCKET).put(self.base.token, desired.model_dump_json().encode())

    def replica(self, dtype: str = "float32", disk_bytes: int = 2**30, **limits: Any) -> ServingReplica:
        limits = {"capacity": 4, "load_wait_s": 20.0, "room_wait_s": 5.0, **limits}
        directory = self.directory / "serving" / self.name
        settings = EngineSettings(
            state_dir=directory / "engine",
            dtype=dtype,  # type: ignore[arg-type]
            slots=min(4, limits["capacity"]),
            max_resident=limits["capacity"],
        )

        async def create() -> Any:
            if self.controls.start_failures:
                self.controls.start_failures -= 1
                raise RuntimeError("no memory for the engine")
            self.controls.engines.append(Engine(self.base, settings, self.controls))
            return self.controls.engines[-1]

        return ServingReplica(
            Identity(self.name, self.url, self.base),
            Surroundings(self.bus, self.store, self.catalog),
            create,
            Options(directory, Limits(**limits), disk_bytes, poll_s=0.02, backoff_s=0.02),
        )


@asynccontextmanager
async def running(replica: ServingReplica, healthy: bool = True) -> AsyncIterator[ServingReplica]:
    await replica.start()
    try:
        if healthy:
            await until(lambda: replica.healthy() is None, lambda: str(replica.healthy()))
        yield replica
    finally:
        await replica.stop()


async def until(
    holds: Callable[[], object], what: Callable[[], str] = lambda: "the condition", timeout_s: float = 10.0
) -> None:
    for _ in range(int(timeout_s / 0.01)):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within {timeout_s} s: {what()}")


def ask(revision: str | None = None, max_tokens: int = 4, **changes: Any) -> SampleRequest:
    settings = SamplingSettings(max_tokens=max_tokens, temperature=0.0, logprobs=0)
    return replace(SampleRequest("request", (5, 6, 7), settings, revision=revision), **changes)


async def tokens(replica: ServingReplica, request: SampleRequest) -> tuple[int, ...]:
    """The tokens of sequence 0, sampled through the replica without HTTP."""
    sampling = await replica.sampler.open(request)
    try:
        found: list[int] = []
        async for chunk in sampling.chunks:
            found += chunk.token_ids if chunk.index == 0 else ()
        return tuple(found)
    finally:
        await sampling.close()
