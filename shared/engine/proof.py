"""What a load must have proved before a revision may serve, the same for every engine."""

from __future__ import annotations

import math

from shared.adapters.manifest import Manifest
from shared.engine.port import AdapterRefused, LoadReport
from shared.engine.settings import Dtype

PROBE_TOLERANCE = 1e-3
"""Largest |Δ logprob| between trainer and engine when both compute in fp32. In bf16 rounding alone
moves logprobs by more, so that the difference is recorded and never judged."""


def probe_difference(report: LoadReport, manifest: Manifest) -> float | None:
    """Largest |Δ logprob| between the trainer's probe and the engine's; None without a probe."""
    if manifest.probe is None:
        return None
    pairs = zip(report.probe_logprobs, manifest.probe.logprobs, strict=True)
    return max((abs(ours - theirs) for ours, theirs in pairs), default=0.0)


def check_report(report: LoadReport, manifest: Manifest, dtype: Dtype) -> None:
    """N of N modules, equal tensors and finite logprobs, always; the probe's differences only where both sides ran
    in fp32, since in bf16 rounding alone moves logprobs by more than a small adapter does. Raises AdapterRefused."""
    if report.modules_applied != report.modules_expected or report.modules_expected == 0:
        raise AdapterRefused(
            f"adapter {report.revision}: {report.modules_applied} of {report.modules_expected} modules applied"
        )
    if not report.tensors_equal:
        raise AdapterRefused(f"adapter {report.revision}: the tensors read back from the engine differ from its file's")
    if manifest.probe is None:
        return
    if len(report.probe_logprobs) != len(manifest.probe.logprobs):
        raise AdapterRefused(
            f"adapter {report.revision}: its probe has {len(manifest.probe.logprobs)} logprobs, "
            f"the engine answered {len(report.probe_logprobs)}"
        )
    if not all(map(math.isfinite, report.probe_logprobs)):
        raise AdapterRefused(f"adapter {report.revision}: its probe's logprobs are not finite in the engine")
    difference = probe_difference(report, manifest)
    if dtype == manifest.probe.dtype == "float32" and difference is not None and not difference <= PROBE_TOLERANCE:
        raise AdapterRefused(
            f"adapter {report.revision}: probe logprobs differ by {difference:.2e} from the trainer's; "
            f"at most {PROBE_TOLERANCE} is allowed in float32"
        )
