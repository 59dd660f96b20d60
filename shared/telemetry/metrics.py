"""Every metric of the system, once. Labels are bounded: no policy, revision, run or worker ids.

`/metrics` of each service serves `REGISTRY`; a process counts only what it does.
"""

from __future__ import annotations

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
REWARD_MEAN = Gauge("mint_reward_mean", "Mean reward of the newest rollout record", ["base"], registry=REGISTRY)

LOAD_SECONDS = Histogram(
    "mint_revision_load_seconds", "Time of one cold load", ["base", "outcome"], buckets=_SECONDS, registry=REGISTRY
)
LOADS_WAITING = Gauge("mint_revision_loads_waiting", "Cold loads in the queue", ["base"], registry=REGISTRY)
RESIDENT = Gauge("mint_revisions_resident", "Revisions by tier in this replica", ["base", "tier"], registry=REGISTRY)
IN_FLIGHT = Gauge("mint_samples_in_flight", "Sample requests that run now", ["base"], registry=REGISTRY)

RUNS = Gauge("mint_runs", "Runs by state", ["state"], registry=REGISTRY)
OUTBOX_WAITING = Gauge("mint_outbox_waiting", "Outbox rows not yet acknowledged by the bus", registry=REGISTRY)
REDRIVEN = Counter("mint_commands_redriven_total", "Commands issued again for silent runs", registry=REGISTRY)
