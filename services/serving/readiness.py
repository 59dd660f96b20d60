"""The proof that a loaded revision is what the engine serves: registered → prewarming → ready.

In: the manifest, the engine's load report and its capabilities. Out: a `Proof`, or `NotProved` saying
which link of the chain is broken. Invariant: nothing is `ready` without a proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.adapters.manifest import Manifest
from shared.engine.port import Capabilities, LoadReport
from shared.engine.proof import PROBE_TOLERANCE


class NotProved(Exception):
    """What the engine holds is not proved to be the revision; it must not serve."""


@dataclass(frozen=True)
class Proof:
    """What a `ready` revision stands on; `adapter_sha256` is what the engine itself read."""

    revision: str
    adapter_sha256: str
    modules_applied: int
    modules_expected: int
    probe_max_abs_diff: float | None
    seconds: float


def prove(manifest: Manifest, report: LoadReport, capabilities: Capabilities) -> Proof:
    """Raises NotProved. A `zero_delta` revision is proved by the same rules."""
    name = manifest.revision
    if report.revision != name:
        raise NotProved(f"the engine loaded {report.revision} when asked for {name}")
    if report.modules_applied != report.modules_expected or report.modules_expected == 0:
        raise NotProved(f"{name}: {report.modules_applied} of {report.modules_expected} modules applied")
    if report.adapter_sha256 != manifest.adapter_sha256:
        raise NotProved(f"{name}: the engine read adapter {report.adapter_sha256}, not {manifest.adapter_sha256}")
    if not report.tensors_equal:
        raise NotProved(f"{name}: the tensors in the engine's slot differ from the exported file's")
    difference = probe_difference(manifest, report)
    if difference is not None and _judged(manifest, capabilities) and difference > PROBE_TOLERANCE:
        raise NotProved(
            f"{name}: the probe's logprobs differ from the trainer's by {difference:.2g}; "
            f"in fp32 at most {PROBE_TOLERANCE} is allowed"
        )
    return Proof(
        revision=name,
        adapter_sha256=report.adapter_sha256,
        modules_applied=report.modules_applied,
        modules_expected=report.modules_expected,
        probe_max_abs_diff=difference,
        seconds=report.seconds,
    )


def probe_difference(manifest: Manifest, report: LoadReport) -> float | None:
    """max |Δlogprob| over the probe prompt's tokens (all but the first); None without a probe.

    Raises NotProved when the engine's probe does not have the trainer's length or is not finite."""
    if manifest.probe is None:
        return None
    trained, served = manifest.probe.logprobs, report.probe_logprobs
    if len(trained) != len(served) or not trained:
        raise NotProved(f"{manifest.revision}: the engine's probe has {len(served)} logprobs, not {len(trained)}")
    differences = [abs(ours - theirs) for ours, theirs in zip(served, trained, strict=True)]
    if not all(math.isfinite(difference) for difference in differences):
        raise NotProved(f"{manifest.revision}: the probe's logprobs are not finite")
    return max(differences)


def _judged(manifest: Manifest, capabilities: Capabilities) -> bool:
    return manifest.probe is not None and manifest.probe.dtype == "float32" and capabilities.dtype == "float32"
