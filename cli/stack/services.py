"""The seven services as parts: their command, their variables, their health.

A learner and a serving replica hold one base model each, so every further base model has its own pair,
named `learner-<token>` and `serving-<token>`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from cli.stack.bases import bases_path, configured
from cli.stack.file import HOST
from cli.stack.part import Part, http_probe
from cli.stack.stores import S3_ACCESS_KEY, S3_BUCKET, S3_SECRET_KEY

SERVICES = ("catalog", "gateway", "rollout", "exporter", "evaluator", "learner", "serving")
PER_BASE = ("learner", "serving")
LEARNER_THREADS = "1"
"""Beside a resident engine the learner takes one thread: together both are faster so."""


def module(name: str) -> tuple[str, ...]:
    """`-P` keeps the working directory, which is the data directory, out of the import path."""
    return (sys.executable, "-P", "-m", name)


def common_env(data: Path, ports: dict[str, int]) -> dict[str, str]:
    return {
        "MINT_NATS_URL": f"nats://{HOST}:{ports['nats']}",
        "MINT_S3_URL": f"http://{HOST}:{ports['s3']}",
        "MINT_S3_ACCESS_KEY": S3_ACCESS_KEY,
        "MINT_S3_SECRET_KEY": S3_SECRET_KEY,
        "MINT_S3_BUCKET": S3_BUCKET,
        "MINT_CATALOG_URL": f"http://{HOST}:{ports['catalog']}",
        "MINT_BASES_FILE": str(bases_path(data)),
        "MINT_DATA_DIR": str(data),
        "MINT_HOST": HOST,
        "TOKENIZERS_PARALLELISM": "false",
    }


def service_names(data: Path) -> list[str]:
    """In start order: the catalog first, since the others ask it; the engines last, being the slowest."""
    return [*SERVICES, *(f"{name}-{base['token']}" for base in configured(data)[1:] for name in PER_BASE)]


def service_parts(data: Path, ports: dict[str, int], engine: str) -> list[Part]:
    bases = configured(data)
    parts = [_part(name, name, bases[0], data, ports, engine) for name in SERVICES]
    for base in bases[1:]:
        parts += [_part(f"{name}-{base['token']}", name, base, data, ports, engine) for name in PER_BASE]
    return parts


def _part(name: str, service: str, base: Mapping[str, str], data: Path, ports: dict[str, int], engine: str) -> Part:
    env = {**common_env(data, ports), "MINT_PORT": str(ports[name])}
    if service == "learner":
        env |= {"MINT_LEARNER_BASE": base["name"], "OMP_NUM_THREADS": LEARNER_THREADS}
    if service == "serving":
        env |= {"MINT_SERVING_BASE": base["name"], "MINT_SERVING_ENGINE": engine}
    return Part(
        name=name,
        command=module(f"services.{service}"),
        probe=http_probe(f"http://{HOST}:{ports[name]}/healthz"),
        env=env,
        reads=bases_path(data).read_text(),
        stop_s=30.0,
    )
