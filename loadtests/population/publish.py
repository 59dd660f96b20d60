"""Putting many revisions into a stack at once: adapters into its store, rows into its catalog.

`adapters` draws random adapters, lets the exporter convert and prove each, and stores its files under
their content addresses. `revisions` adds the next revision of each named policy, as a step of a completed
run; several revisions may be one adapter. Rows go through the catalog's own tables into its SQLite file,
beside the running catalog: its writers and ours take turns at the database's lock.

Invariant: the visibility rule holds (files are in the store before a row names them), and revision
numbers are gap-free per policy. Nothing is announced on the bus and no alias is set: a new revision is
addressable, and resident nowhere.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from mint_schemas.commands import CheckpointRef, ExportRequested
from mint_schemas.training import Lora
from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from cli.stack.bases import bases_path
from cli.stack.stores import S3_ACCESS_KEY, S3_BUCKET, S3_SECRET_KEY
from loadtests.learning.stack import TENANT, Stack
from services.catalog.commands import command_id
from services.catalog.database import Database, sqlite_url
from services.catalog.tables import FileRow, PolicyRow, RevisionRow, RunRow
from services.exporter.convert import Exported, convert
from shared.adapters.host import Host, host_of
from shared.adapters.manifest import Manifest
from shared.bases import Base, load_bases
from shared.rl.checkpoint import ADAPTER_FILE, STATE_FILE, TrainingState
from shared.store.keys import blob
from shared.store.s3 import S3Store

ROWS = 2000
"""Revisions in one transaction: the catalog's own writers wait for no longer than that takes."""
UPLOADS = 8
OWNER = "loadtests"
_NAMED = ("revision", "policy", "run_id", "step")
"""What a manifest says that is the revision's and not the adapter's."""


@dataclass(frozen=True)
class Shape:
    """A plain LoRA. `std` is that of B's entries, so that other adapters give other answers."""

    rank: int = 1
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    std: float = 0.05


def names(count: int, prefix: str = "p") -> list[str]:
    """Policies of the tenant `bench`, in the order of their names."""
    return [f"{TENANT}/{prefix}{number:06d}" for number in range(count)]


def publish(
    running: Stack, policies: Sequence[str], distinct: int | None = None, shape: Shape | None = None, seed: int = 0
) -> list[str]:
    """The next revision of each named policy, over `distinct` adapters in turn (default: one each).

    Returns references of the form tenant/policy@N, in the order of `policies`."""
    made = adapters(running, distinct or len(policies), shape, seed)
    return revisions(running, policies, [made[place % len(made)] for place in range(len(policies))])


def adapters(running: Stack, count: int, shape: Shape | None = None, seed: int = 0) -> list[Manifest]:
    """`count` different adapters on the stack's first base model, stored; no row names them yet."""
    base = next(iter(load_bases(bases_path(running.folder)).values()))
    return asyncio.run(_store(running, base, shape or Shape(), count, seed))


def revisions(running: Stack, policies: Sequence[str], manifests: Sequence[Manifest]) -> list[str]:
    """The next revision of `policies[i]` is `manifests[i]`; a policy named k times gets k revisions."""
    database = Database(sqlite_url(running.folder))
    try:
        pairs = list(zip(policies, manifests, strict=True))
        added: list[str] = []
        for start in range(0, len(pairs), ROWS):
            added += database.write_now(_register, pairs[start : start + ROWS], time.time())
        return added
    finally:
        database.close()


async def _store(running: Stack, base: Base, shape: Shape, count: int, seed: int) -> list[Manifest]:
    store = S3Store(running.url_of("s3"), S3_ACCESS_KEY, S3_SECRET_KEY, S3_BUCKET)
    turns, stored, host = asyncio.Semaphore(UPLOADS), set[str](), host_of(base)

    async def one(number: int) -> Manifest:
        async with turns:
            exported = await asyncio.to_thread(_export, base, host, shape, seed + number)
            for name, data in exported.files.items():
                sha256 = exported.manifest.files[name].sha256
                if sha256 not in stored:
                    stored.add(sha256)
                    await store.put(blob(sha256), data)
        return exported.manifest

    try:
        return list(await asyncio.gather(*(one(number) for number in range(count))))
    finally:
        store.close()


def _export(base: Base, host: Host, shape: Shape, seed: int) -> Exported:
    """What the exporter makes of a training checkpoint with random tensors."""
    lora = Lora(rank=shape.rank, alpha=shape.alpha, target_modules=shape.targets)
    work: dict[str, Any] = {"policy": f"{TENANT}/drawn", "run_id": OWNER, "base": base.name, "step": 1}
    state = TrainingState(**work, **lora.model_dump(), base_sha256=base.sha256, seed=seed, optimizer_step=1)
    files = {
        ADAPTER_FILE: safetensors.numpy.save(_tensors(host, shape, seed)),
        STATE_FILE: state.model_dump_json().encode(),
    }
    command = ExportRequested(
        **work,
        command_id=command_id(OWNER, "export", seed),
        checkpoint=CheckpointRef(files={}, step=1),
        lora=lora,
        parent=None,
    )
    with tempfile.TemporaryDirectory(prefix="mint-publish-") as scratch:
        return convert(command, files, host, Path(scratch))


def _tensors(host: Host, shape: Shape, seed: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """By training name: lora_A [rank, in] and lora_B [out, rank] of every module of the targets."""
    draw = np.random.default_rng(seed)
    tensors = {}
    for module, (out, inner) in sorted(host.modules.items()):
        if module.rsplit(".", 1)[-1] in shape.targets:
            first = draw.standard_normal((shape.rank, inner), np.float32) / np.float32(inner**0.5)
            second = draw.standard_normal((out, shape.rank), np.float32) * np.float32(shape.std)
            tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = first, second
    return tensors


def _register(session: Session, pairs: list[tuple[str, Manifest]], now: float) -> list[str]:
    counts = Counter(policy for policy, _ in pairs)
    _add_policies(session, dict(pairs), now)
    held = {row.policy: row for row in session.scalars(select(PolicyRow).where(PolicyRow.policy.in_(counts)))}
    _add_files(session, [manifest for _, manifest in pairs])
    runs = {policy: str(uuid.uuid4()) for policy in counts}
    bodies = {manifest.adapter_sha256: manifest.model_dump(mode="json") for _, manifest in pairs}
    steps: Counter[str] = Counter()
    rows = []
    for policy, manifest in pairs:
        steps[policy] += 1
        held[policy].last_number += 1
        row = _revision_row(manifest, policy, held[policy].last_number, runs[policy], steps[policy], now)
        row["manifest"] = bodies[manifest.adapter_sha256] | {key: row[key] for key in _NAMED}
        rows.append(row)
    bases = {policy: row.base for policy, row in held.items()}
    session.execute(insert(RunRow), [_run_row(p, bases[p], runs[p], counts[p], now) for p in counts])
    session.execute(insert(RevisionRow), rows)
    return [row["revision"] for row in rows]


def _add_policies(session: Session, wanted: dict[str, Manifest], now: float) -> None:
    known = set(session.scalars(select(PolicyRow.policy).where(PolicyRow.policy.in_(wanted))))
    rows = [
        {
            "policy": policy,
            "tenant": policy.split("/")[0],
            "base": manifest.base,
            "created_at": now,
            "last_number": 0,
        }
        for policy, manifest in wanted.items()
        if policy not in known
    ]
    if rows:
        session.execute(insert(PolicyRow), rows)


def _add_files(session: Session, manifests: list[Manifest]) -> None:
    files = {ref.key: ref for manifest in manifests for ref in manifest.files.values()}
    known = set(session.scalars(select(FileRow.key).where(FileRow.key.in_(files))))
    rows = [{**ref.model_dump(), "owner": OWNER} for key, ref in files.items() if key not in known]
    if rows:
        session.execute(insert(FileRow), rows)


def _run_row(policy: str, base: str, run_id: str, steps: int, now: float) -> dict[str, Any]:
    """A run that is over, so that the catalog has nothing to do for it."""
    return {
        "run_id": run_id,
        "policy": policy,
        "tenant": policy.split("/")[0],
        "base": base,
        "token": OWNER,
        "state": "completed",
        "method": "sft",
        "steps": steps,
        "outcome": "published for a load test",
        "request": {"policy": policy, "base": base},
        "request_source": OWNER,
        "request_id": run_id,
        "traceparent": "",
        "created_at": now,
        "started_at": now,
        "ended_at": now,
        "promoted": False,
    }


def _revision_row(manifest: Manifest, policy: str, number: int, run_id: str, step: int, now: float) -> dict[str, Any]:
    return {
        "revision": f"{policy}@{number}",
        "policy": policy,
        "number": number,
        "base": manifest.base,
        "run_id": run_id,
        "step": step,
        "export_command": command_id(run_id, "export", step),
        "parent": None,
        "adapter_sha256": manifest.adapter_sha256,
        "adapter_bytes": manifest.adapter_bytes,
        "zero_delta": manifest.zero_delta,
        "created_at": now,
    }
