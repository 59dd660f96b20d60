"""The inference engine port: what every engine answers, and in which words.

An engine keeps one base model resident and applies LoRA adapters to it per request. Token ids go in
and token ids come out; text, templates and stop strings belong to the callers. One contract suite
(`tests/contract/test_engine.py`) runs over every implementation and tests what it declares.

Invariant: `sample` never serves anything but the revision (or the base) that the request names; what
is not loaded is refused with `NotResident`, never answered by the base model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from shared.adapters.manifest import Manifest

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Grammar:
    """What a completion must be, whole: a JSON value that fits a schema (`text` is the schema as JSON), or a
    text that matches a regular expression."""

    kind: Literal["json_schema", "regex"]
    text: str


@dataclass(frozen=True)
class SamplingSettings:
    """How to draw tokens. `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 switch the filter off.

    `logprobs` is the number of alternatives per sampled token: None = no logprobs at all, 0 = the
    sampled token's only, k = the k most likely as well. Sampled logprobs are those of the distribution
    that was sampled from (after temperature and filters); prompt logprobs are at temperature 1.
    A sequence ends at `max_tokens` or at one of `stop_token_ids`, and at nothing else: the end-of-turn
    tokens of a chat belong into `stop_token_ids`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True)
class SampleRequest:
    """One prompt, n sequences. `revision` is `tenant/policy@N`, or None for the base model.
    `tenant` is who asks (empty: the system itself), for fair shares and limits; `wait_s` bounds the wait
    for the first token, queues and loads included (None: the replica's own bound).

    Sequence i draws with a seed derived from (`seed`, i) alone, so that sequences never share a stream
    and the same request gives the same sequences in any batch. A lower `priority` runs earlier.
    """

    request_id: str
    prompt: tuple[int, ...]
    settings: SamplingSettings
    revision: str | None = None
    n: int = 1
    seed: int | None = None
    priority: int = 0
    tenant: str = ""
    wait_s: float | None = None


@dataclass(frozen=True)
class SampleChunk:
    """The next tokens of sequence `index`; the last chunk of a sequence has a `finish_reason`.

    A stop token is included once, last. `logprobs` runs parallel to `token_ids`; `top_logprobs[i]` maps
    token id to logprob. `prompt_logprobs` (length = prompt, first entry None) comes once, with the
    first chunk of sequence 0; `prompt_top_logprobs` likewise.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[dict[int, float], ...] | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None
    prompt_top_logprobs: tuple[dict[int, float] | None, ...] | None = None


@dataclass(frozen=True)
class LoadReport:
    """What loading one revision proved: `modules_applied` of `modules_expected` (as packed by the
    engine), the sha256 of the adapter files that were read, whether the tensors read back from the
    engine's slot equal the file's as packed, scaled and cast, and the probe prompt's logprobs."""

    revision: str
    modules_applied: int
    modules_expected: int
    adapter_sha256: str
    tensors_equal: bool
    probe_logprobs: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class ResidentAdapter:
    revision: str
    adapter_sha256: str
    pinned: bool
    in_slot: bool
    in_flight: int
    bytes: int


@dataclass(frozen=True)
class Capabilities:
    """What the engine can do; callers refuse the rest with a message that names it."""

    name: str
    base_name: str
    base_sha256: str
    dtype: Literal["float32", "bfloat16"]
    max_context: int
    max_rank: int
    slots: int
    max_resident: int
    target_modules: frozenset[str]
    min_p: bool = True
    penalties: bool = True
    logit_bias: bool = True
    max_logprobs: int = 20
    structured_output: bool = False
    tools: bool = False
    preemption: bool = False


class EngineError(Exception):
    """Root of what an engine raises."""


class NotResident(EngineError):
    """The revision is not loaded; load it, then sample."""


class AdapterRefused(EngineError):
    """The adapter cannot be served by this engine; the message names what and why. Never retryable."""


class SlotsExhausted(EngineError):
    """Every place is pinned or in use; retry after an unload."""


class EngineDead(EngineError):
    """The engine's process is gone; the supervisor restarts it and restores its working set."""


@runtime_checkable
class InferenceEngine(Protocol):
    async def load(self, manifest: Manifest, directory: Path) -> LoadReport:
        """Load a revision from a directory in serving layout (`adapter_model.safetensors`,
        `adapter_config.json`) and prove it. Loading a resident revision returns its first report.

        Raises AdapterRefused (nothing is left resident), SlotsExhausted, EngineDead."""
        ...

    async def unload(self, revision: str) -> None:
        """Drop a revision. Unknown: no-op. Raises EngineError while requests are in flight on it."""
        ...

    async def pin(self, revision: str, pinned: bool) -> None:
        """A pinned revision is never evicted by a load. Raises NotResident."""
        ...

    def sample(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """Chunks as they come; closing the iterator aborts generation. Raises NotResident, EngineDead,
        and ValueError for a request outside `capabilities()` (naming the field and the bound)."""
        ...

    async def resident(self) -> list[ResidentAdapter]:
        """The truth as the engine itself lists it, idle adapters included."""
        ...

    def capabilities(self) -> Capabilities: ...

    async def close(self) -> None: ...
