"""The mint extension `checkpoints/interpolate`: linear combinations of checkpoints.

In: paths and a coefficient each. Out: a future. The combination is computed here, put into the store and registered
before its future is answered: nothing is queued that could be lost, and the same request again finds what it made.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from mint_schemas.training import Lora
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.streaming import turn
from services.gateway.tinker.archive import put_peft
from services.gateway.tinker.errors import invalid
from services.gateway.tinker.rest.adapters import put_adopted
from services.gateway.tinker.rest.paths import checked_name, parse_path
from services.gateway.tinker.rest.views import Future
from shared.adapters import layout
from shared.adapters.host import host_of
from shared.adapters.importing import Adopted, adopt
from shared.adapters.interpolate import Source, combine
from shared.catalog.operations import PathView
from shared.errors import Refused
from shared.operations.payload import SavedResult

__all__ = ["InterpolateRequest", "interpolate_checkpoints", "interpolation_json"]

MAX_SOURCES = 32
MAX_RANKS = 512
"""Of the sources together: what is decomposed for each module is as wide, at its cube of work."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
PathText = Annotated[str, Field(max_length=1000)]


class InterpolateRequest(BaseModel):
    """`output_path`: a name; null: one that follows from the sources."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    source_paths: Annotated[list[PathText], Field(min_length=1, max_length=MAX_SOURCES)]
    coefficients: Annotated[list[Finite], Field(min_length=1, max_length=MAX_SOURCES)]
    output_path: PathText | None = None
    output_checkpoint_type: Literal["sampler"] = "sampler"
    type: Literal["mint_interpolate_checkpoints"] = "mint_interpolate_checkpoints"


async def interpolate_checkpoints(body: InterpolateRequest, request: Request, gateway: Here, caller: Caller) -> Future:
    """ΔW = Σ cᵢ·ΔWᵢ at the sources' rank (`shared/adapters/interpolate.py` has the formula and the reasons).

    The sources have the same base, rank and target modules; alpha and rsLoRA are those of the first. They may be
    training weights or sampler weights, the caller's own or published. Who has gone before it begins, and may be
    asking again already, has nothing combined."""
    if len(body.coefficients) != len(body.source_paths):
        raise invalid(
            f"{len(body.coefficients)} coefficients for {len(body.source_paths)} source_paths; one each is needed"
        )
    wanted = None if body.output_path is None else _wanted_name(body.output_path)
    paths = [str(parse_path(text)) for text in body.source_paths]
    views = await asyncio.gather(*(gateway.operations.resolve_path(path, caller.tenant) for path in paths))
    lora = _common(views)
    if views[0].base not in gateway.bases:
        raise Refused(f"{paths[0]} is on {views[0].base}, which this server is not configured for", "unknown_base")
    owner = caller.tenant or gateway.settings.gateway_local_tenant
    async with turn(gateway.heavy, request):
        made = await _combined(gateway, views, body.coefficients, lora)
        name = wanted or f"interpolated-{hashlib.sha256(layout.canonical_json(made.identity)).hexdigest()[:12]}"
        asked = hashlib.sha256(layout.canonical_json(["interpolate", name, *made.identity])).hexdigest()
        found = await put_adopted(gateway, caller, owner, name, made.adopted, asked)
    note = json.dumps(
        {"source_paths": body.source_paths, "coefficients": body.coefficients, "relative_error": made.relative_error}
    )
    operation = await gateway.operations.import_path(found.model_copy(update={"kind": "interpolate", "note": note}))
    return Future(request_id=operation.request_id)


def interpolation_json(result: SavedResult) -> dict[str, Any]:
    """What `retrieve_future` answers for a combination. `relative_error`: how far the rank keeps it from the sum."""
    return {
        "path": result.path,
        "checkpoint_type": "sampler",
        **json.loads(result.note),
        "has_rank_shards": False,
        "type": "mint_interpolate_checkpoints",
    }


def _common(views: Sequence[PathView]) -> Lora:
    first = views[0]
    for view in views[1:]:
        for what, ours, theirs in (
            ("base model", first.base, view.base),
            ("rank", first.lora.rank, view.lora.rank),
            ("target modules", sorted(first.lora.target_modules), sorted(view.lora.target_modules)),
        ):
            if ours != theirs:
                raise invalid(f"{view.path} has {what} {theirs}, {first.path} has {ours}; they must be equal")
    if len(views) * first.lora.rank > MAX_RANKS:
        raise invalid(
            f"source_paths: {len(views)} sources of rank {first.lora.rank} are too much at a time; their ranks may add "
            f"up to {MAX_RANKS}, so combine some of them first"
        )
    return first.lora


@dataclass(frozen=True)
class _Made:
    """`identity`: the shape, and the sources' bytes with their coefficients; the result follows from them."""

    adopted: Adopted
    relative_error: float
    identity: list[Any]


async def _combined(gateway: Gateway, views: Sequence[PathView], coefficients: Sequence[float], lora: Lora) -> _Made:
    with tempfile.TemporaryDirectory(prefix="mint-interpolate-") as scratch:
        directories = [Path(scratch) / str(index) for index in range(len(views))]
        for view, directory in zip(views, directories, strict=True):
            await asyncio.to_thread(directory.mkdir)
            await put_peft(gateway, view, directory)
        return await asyncio.to_thread(_combine, gateway, views, coefficients, lora, directories)


def _combine(
    gateway: Gateway, views: Sequence[PathView], coefficients: Sequence[float], lora: Lora, places: Sequence[Path]
) -> _Made:
    sources: dict[str, Source] = {}
    for view, coefficient, directory in zip(views, coefficients, places, strict=True):
        path = directory / layout.TENSOR_FILE
        names = (layout.CONFIG_FILE, layout.TENSOR_FILE)
        sha256 = layout.adapter_sha256({name: layout.file_sha256(directory / name) for name in names})
        known = sources.get(sha256)
        if known is None:
            tensors = {name: layout.read_tensor(path, header) for name, header in layout.read_headers(path).items()}
            sources[sha256] = Source(tensors, _scaling(view.lora), coefficient)
        else:
            # The same adapter twice is one with the sum of its coefficients.
            sources[sha256] = replace(known, coefficient=known.coefficient + coefficient)
    try:
        combined = combine(list(sources.values()), lora.rank, _scaling(lora))
    except ValueError as error:
        raise invalid(str(error)) from error
    adopted = adopt(combined.tensors, lora, host_of(gateway.bases[views[0].base]))
    identity: list[Any] = [[sha256, source.coefficient] for sha256, source in sorted(sources.items())]
    return _Made(adopted, combined.relative_error, [lora.model_dump(mode="json"), *identity])


def _scaling(lora: Lora) -> float:
    return float(lora.alpha / (lora.rank**0.5 if lora.use_rslora else lora.rank))


def _wanted_name(text: str) -> str:
    if "://" in text:
        raise invalid("output_path is the name of the new checkpoint, not a path; its training run is made for it")
    return checked_name(text, "name")
