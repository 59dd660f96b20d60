"""Every metric of the system, once. Labels are bounded: no policy, revision, run or worker ids.

`/metrics` of each service serves `REGISTRY`; a process counts only what it does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

_SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)

BUS_PUBLISHED = Counter("mint_bus_published_total", "Messages stored by the bus", ["type"], registry=REGISTRY)
BUS_HANDLED = Counter(
    "mint_bus_handled_total", "Messages handled, by what became of them", ["durable", "outcome"], registry=REGISTRY
)
BUS_HANDLING_SECONDS = Histogram(
    "mint_bus_handling_seconds", "Time in a handler", ["durable"], buckets=_SECONDS, registry=REGISTRY
)
BUS_DEAD = Counter("mint_bus_dead_letters_total", "Messages dead-lettered", ["durable"], registry=REGISTRY)
BUS_ADVISORIES = Counter("mint_bus_advisories_total", "Consumer advisories seen", ["kind"], registry=REGISTRY)

JOB_SECONDS = Histogram(
    "mint_job_seconds", "Time of one command's job", ["kind", "outcome"], buckets=_SECONDS, registry=REGISTRY
)
LEASES_LOST = Counter("mint_leases_lost_total", "Jobs that lost their lease", ["kind"], registry=REGISTRY)

STORE_BYTES = Counter("mint_store_bytes_total", "Bytes moved to or from the object store", ["way"], registry=REGISTRY)
STORE_RETRIES = Counter("mint_store_retries_total", "Downloads begun again", ["reason"], registry=REGISTRY)

HTTP_SECONDS = Histogram(
    "mint_http_seconds", "Time of one HTTP request", ["method", "route", "status"], buckets=_SECONDS, registry=REGISTRY
)

TOKENS = Counter("mint_tokens_total", "Tokens, by what was done with them", ["base", "use"], registry=REGISTRY)
STEP_SECONDS = Histogram(
    "mint_step_seconds", "Time of one optimizer step", ["method"], buckets=_SECONDS, registry=REGISTRY
)
STEP_PART_SECONDS = Histogram(
    "mint_step_part_seconds",
    "Time of one part of a step: restore, reference, forward_backward, optimizer, write",
    ["part"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
TURN_WAIT_SECONDS = Histogram(
    "mint_turn_wait_seconds", "Time a step waited for others' turns", ["base"], buckets=_SECONDS, registry=REGISTRY
)
REWARD_MEAN = Gauge("mint_reward_mean", "Mean reward of the newest rollout record", ["base"], registry=REGISTRY)

_STEP = ("base", "method")
STEPS_SKIPPED = Counter(
    "mint_steps_skipped_total", "Steps that had no row left to learn from", _STEP, registry=REGISTRY
)
STEP_LOSS = Gauge("mint_step_loss", "Loss of the newest step of any policy", _STEP, registry=REGISTRY)
# Distributions over steps, since one number for hundreds of policies would be that of whichever came last.
STEP_FIGURES = {
    "mismatch_mean": Histogram(
        "mint_step_mismatch_mean",
        "Mean |lp_old - q| of a step: the learner's logprob against the sampler's",
        _STEP,
        buckets=(0.0001, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1),
        registry=REGISTRY,
    ),
    "mismatch_max": Histogram(
        "mint_step_mismatch_max",
        "Largest |lp_old - q| of a step",
        _STEP,
        buckets=(0.001, 0.01, 0.03, 0.1, 0.2, 0.5, 1, 2, 5, 10),
        registry=REGISTRY,
    ),
    "ratio_mean": Histogram(
        "mint_step_ratio_mean",
        "Mean exp(lp_old - q) of a step, 1 when both compute one distribution",
        _STEP,
        buckets=(0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1, 1.01, 1.02, 1.05, 1.1, 1.25, 2),
        registry=REGISTRY,
    ),
    "effective_sample_size": Histogram(
        "mint_step_effective_sample_size",
        "Share of a step's tokens that its importance weights leave, 1 at best",
        _STEP,
        buckets=(0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1),
        registry=REGISTRY,
    ),
    "kl": Histogram(
        "mint_step_kl",
        "Mean k3 distance of a step from the run's starting revision",
        _STEP,
        buckets=(0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
        registry=REGISTRY,
    ),
    "grad_norm": Histogram(
        "mint_step_grad_norm",
        "Gradient norm of a step before clipping",
        _STEP,
        buckets=(0.001, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
        registry=REGISTRY,
    ),
}

FETCH_SECONDS = Histogram(
    "mint_revision_fetch_seconds",
    "Time of a cold load's first stage, by where the files were found: disk, catalog, failed",
    ["base", "outcome"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
ACTIVATE_SECONDS = Histogram(
    "mint_revision_activate_seconds",
    "Time that a cold load keeps the engine busy: ready, failed",
    ["base", "outcome"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
LOADS_WAITING = Gauge("mint_revision_loads_waiting", "Cold loads in the queue", ["base"], registry=REGISTRY)
LOADS_IN_FLIGHT = Gauge(
    "mint_revision_loads_in_flight", "Cold loads by what is done for them now", ["base", "stage"], registry=REGISTRY
)
HOLDS = Counter(
    "mint_revision_holds_total",
    "Requests that held a revision, by the tier that it was found in: slot, memory, disk, catalog",
    ["base", "tier"],
    registry=REGISTRY,
)
RESIDENT = Gauge("mint_revisions_resident", "Revisions by tier in this replica", ["base", "tier"], registry=REGISTRY)
RESIDENT_BYTES = Gauge(
    "mint_revisions_resident_bytes", "Adapter bytes by tier in this replica", ["base", "tier"], registry=REGISTRY
)
IN_FLIGHT = Gauge("mint_samples_in_flight", "Sample requests that a replica has", ["base"], registry=REGISTRY)
SAMPLES_WAITING = Gauge(
    "mint_samples_waiting", "Sample requests that wait for a turn in the engine", ["base", "class"], registry=REGISTRY
)
SAMPLE_WAIT_SECONDS = Histogram(
    "mint_sample_wait_seconds",
    "Time that a sample request waited for its turn",
    ["base", "class"],
    buckets=_SECONDS,
    registry=REGISTRY,
)
SAMPLES_REFUSED = Counter(
    "mint_samples_refused_total",
    "Sample requests refused by a bound: rate, concurrency, queue",
    ["base", "reason"],
    registry=REGISTRY,
)

RUNS = Gauge("mint_runs", "Runs by state", ["state"], registry=REGISTRY)
OUTBOX_WAITING = Gauge("mint_outbox_waiting", "Outbox rows not yet acknowledged by the bus", registry=REGISTRY)
REDRIVEN = Counter("mint_commands_redriven_total", "Commands issued again for silent runs", registry=REGISTRY)


def record_step_metrics(base_token: str, method: str, metrics: Mapping[str, float], skipped: bool = False) -> None:
    """One step's figures by their names in `policy.updated`; those that are not watched, and values that
    are not finite, are left out."""
    if skipped:
        STEPS_SKIPPED.labels(base_token, method).inc()
    known = {name: value for name, value in metrics.items() if math.isfinite(value)}
    if "loss" in known:
        STEP_LOSS.labels(base_token, method).set(known["loss"])
    for name, figure in STEP_FIGURES.items():
        if name in known:
            figure.labels(base_token, method).observe(known[name])
