"""What a `model` field means now: a base model by its exact name, or a policy reference by the catalog.

In: the text asked for and who asks. Out: a `Target`. Every reference goes to the catalog for every
request; its last answer is used only while it does not answer, and the target says so. Invariant: what
is unknown, or another tenant's, is refused with near matches and never becomes the base's answer.
"""

from __future__ import annotations

import asyncio
import difflib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from mint_schemas.names import Reference, parse_reference

from services.gateway.identity import Identity
from services.gateway.ports import Catalog
from shared.bases import Base
from shared.catalog.api import ResolvedRevision
from shared.errors import MintError, Refused, Retryable

__all__ = ["Resolver", "Target"]

NEAR_POOL = 500


@dataclass(frozen=True)
class Target:
    """`asked` is what the caller wrote; `revision` None is the base model itself."""

    asked: str
    base: Base
    revision: str | None = None
    adapter_sha256: str | None = None
    stale: bool = False


class Resolver:
    """`remember` bounds the last answers that are kept."""

    def __init__(self, catalog: Catalog, bases: Mapping[str, Base], timeout_s: float, remember: int = 10_000) -> None:
        self._catalog, self._bases, self._timeout, self._remember = catalog, bases, timeout_s, remember
        self._last: OrderedDict[str, ResolvedRevision] = OrderedDict()

    async def target(self, model: str, identity: Identity) -> Target:
        """Raises Refused (404 with near matches) and Retryable (no answer, and none remembered)."""
        if model in self._bases:
            return Target(model, self._bases[model])
        reference = _parse(model)
        if reference is None or not identity.owns(reference.tenant):
            raise await self._unknown(model, identity)
        try:
            resolved, stale = await self._resolve(str(reference), model)
        except Refused as error:
            if error.status != 404:
                raise
            raise await self._unknown(model, identity, error) from error
        base = self._bases.get(resolved.base)
        if base is None:
            raise Retryable(f"{model} runs on {resolved.base}, which this gateway is not configured for")
        if resolved.revision is None:
            raise Refused(f"{model} points at no revision yet", code="model_not_found", status=404)
        return Target(model, base, resolved.revision, resolved.adapter_sha256, stale)

    async def _resolve(self, reference: str, model: str) -> tuple[ResolvedRevision, bool]:
        try:
            async with asyncio.timeout(self._timeout):
                resolved = await self._catalog.resolve(reference)
        except (Retryable, TimeoutError) as error:
            last = self._last.get(reference)
            if last is None:
                raise Retryable(f"the catalog does not answer, so {model} cannot be resolved; try again") from error
            return last, True
        except Refused:
            self._last.pop(reference, None)
            raise
        self._last[reference] = resolved
        self._last.move_to_end(reference)
        while len(self._last) > self._remember:
            self._last.popitem(last=False)
        return resolved, False

    async def _unknown(self, model: str, identity: Identity, error: Refused | None = None) -> Refused:
        """The catalog's own words where it spoke; near matches are the caller's, or by spelling."""
        shown = model if len(model) <= 80 else f"{model[:77]}…"
        words = str(error) if error is not None else f"there is no base model and no policy {shown!r}"
        near = [name for name in (error.near if error else []) if name in self._bases or identity.owns_policy(name)]
        near = near or await asyncio.to_thread(_close, model, [*self._bases, *await self._policies(identity)])
        hint = f"; did you mean {', '.join(near)}?" if near else "; GET /v1/models lists what there is"
        return Refused(words + hint, code="model_not_found", near=near, status=404)

    async def _policies(self, identity: Identity) -> list[str]:
        try:
            async with asyncio.timeout(self._timeout):
                listing = await self._catalog.policies(tenant=identity.tenant, limit=NEAR_POOL)
            return [view.policy for view in listing.items]
        except (MintError, TimeoutError):
            return []


def _parse(model: str) -> Reference | None:
    try:
        return parse_reference(model)
    except ValueError:
        return None


def _close(model: str, names: list[str]) -> list[str]:
    """Near by spelling, whatever the letter case, and by the policy's own name under another tenant."""
    by_lower = {name.lower(): name for name in names}
    wanted = model.lower().partition("@")[0].partition(":")[0]
    found = difflib.get_close_matches(wanted, by_lower, n=3, cutoff=0.6)
    tail = wanted.rpartition("/")[2]
    same_tail = [low for low in by_lower if tail and low.rpartition("/")[2] == tail]
    return [by_lower[low] for low in dict.fromkeys([*found, *same_tail])][:3]
