"""What one tenant and one policy may ask of a replica: requests at once, and requests per second.

In flow the names of a request, out flows leave to come in (`admit`), or `RateLimited` with the time after which
asking again makes sense. The system's own requests (tenant "") have no limit: turns bound them.
Invariant: a refused request takes nothing, neither a place nor a token of any bucket.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_settings import NoDecode

from services.serving.errors import RateLimited

KEPT_IDLE = 1024
SMOOTHING = 0.2
NAME = re.compile(r"[^\s/@]+(/[^\s/@]+)?")


class Bound(BaseModel):
    """`concurrency` in requests that a replica has, waiting ones included; `rate` in requests per second, `burst`
    how many may come at once after a pause (0: one second's worth). 0 = no bound; None = the general setting."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    concurrency: Annotated[int, Field(ge=0)] | None = None
    rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    burst: Annotated[int, Field(ge=0)] | None = None

    def over(self, general: Bound) -> Bound:
        return general.model_copy(update=self.model_dump(exclude_none=True))

    @property
    def depth(self) -> float:
        """Tokens that the bucket holds, at least one."""
        return float(max(self.burst or math.ceil(self.rate or 0.0), 1))


def check_names(bounds: dict[str, Bound]) -> dict[str, Bound]:
    """The same bounds. Raises ValueError for a key that is neither a tenant nor `tenant/policy`."""
    for name in bounds:
        if not NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is neither a tenant nor tenant/policy; revisions have the limits of their policy"
            )
    return bounds


def _from_json(text: object) -> object:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON ({error})") from None


NamedBounds = Annotated[dict[str, Bound], NoDecode, BeforeValidator(_from_json), AfterValidator(check_names)]
"""Bounds by `tenant` or `tenant/policy`, as a setting: JSON, refused with words that name the key."""


@dataclass(frozen=True)
class LimitSettings:
    """`named` overrides the general bounds, by `tenant` or `tenant/policy`."""

    tenant: Bound = field(default_factory=lambda: Bound(concurrency=512))
    policy: Bound = field(default_factory=lambda: Bound(concurrency=256))
    named: Mapping[str, Bound] = field(default_factory=dict)


class RequestLimits:
    def __init__(self, settings: LimitSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._meters: dict[str, _Meter] = {}
        self._sweep_at = KEPT_IDLE

    @contextmanager
    def admit(self, tenant: str, revision: str | None) -> Iterator[None]:
        """Counts the request for as long as the context is open. Raises RateLimited."""
        if not tenant:
            yield
            return
        now = self._clock()
        self._sweep(now)
        meters = [self._meter(tenant, self._settings.tenant, now)]
        if revision is not None:
            meters.append(self._meter(revision.rpartition("@")[0], self._settings.policy, now))
        for meter in meters:
            meter.check(now)
        for meter in meters:
            meter.enter(now)
        try:
            yield
        finally:
            ended = self._clock()
            for meter in meters:
                meter.leave(ended - now)

    def _sweep(self, now: float) -> None:
        """Before any meter of the request is looked up: one without requests may go."""
        if len(self._meters) >= self._sweep_at:
            self._meters = {key: kept for key, kept in self._meters.items() if not kept.idle(now)}
            self._sweep_at = max(KEPT_IDLE, 2 * len(self._meters))

    def _meter(self, name: str, general: Bound, now: float) -> _Meter:
        meter = self._meters.get(name)
        if meter is None:
            named = self._settings.named.get(name)
            meter = self._meters[name] = _Meter(name, named.over(general) if named else general, now)
        return meter


class _Meter:
    """One name's count and token bucket. `usual_s` is how long its requests took lately."""

    def __init__(self, name: str, bound: Bound, now: float) -> None:
        self._name = name
        self._concurrency, self._rate, self._depth = bound.concurrency or 0, bound.rate or 0.0, bound.depth
        self._tokens, self._filled = self._depth, now
        self._running = 0
        self._usual_s: float | None = None

    def check(self, now: float) -> None:
        """Raises RateLimited; changes nothing but the time up to which the bucket is filled."""
        if self._concurrency and self._running >= self._concurrency:
            raise RateLimited(
                f"{self._name} has {self._running} requests here, its limit; wait for one to end",
                "concurrency",
                (self._usual_s or 1.0) / self._running,
            )
        if self._rate:
            self._fill(now)
            if self._tokens < 1.0:
                raise RateLimited(
                    f"{self._name} may send {self._rate:g} requests per second; slow down",
                    "rate",
                    (1.0 - self._tokens) / self._rate,
                )

    def enter(self, now: float) -> None:
        self._running += 1
        if self._rate:
            self._fill(now)
            self._tokens -= 1.0

    def leave(self, took_s: float) -> None:
        self._running -= 1
        self._usual_s = took_s if self._usual_s is None else self._usual_s + SMOOTHING * (took_s - self._usual_s)

    def idle(self, now: float) -> bool:
        self._fill(now)
        return not self._running and self._tokens >= self._depth

    def _fill(self, now: float) -> None:
        self._tokens = min(self._depth, self._tokens + (now - self._filled) * self._rate)
        self._filled = now
