"""What schemathesis finds in the published document and the gateway behind it, in process: nothing.

Valid and invalid requests of every operation; no answer is a server error, each has a documented status, media type
and body, what the document refuses is refused, and what it allows is taken.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from mint_schemas.common import FileRef

from services.gateway.mint_v1.owned import RUN_EXAMPLE
from shared.catalog import api
from shared.catalog.keys import KeyView
from tests.unit.gateway.key_book import AT
from tests.unit.gateway.kit import BASE, Kit, run_view

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis (make schemathesis)")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

pytestmark = pytest.mark.slow

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"tensors"}
KEY_ID = "9f86d081884c7d65"
# Beside schemathesis's own: 400, which says that a request agrees with the document and still makes no sense.
TAKEN = ["2xx", "3xx", "400", "401", "403", "404", "409", "429"]
CONFIG = schemathesis.config.SchemathesisConfig.from_dict(
    {"checks": {"positive_data_acceptance": {"expected-statuses": TAKEN}}}
)
# A TrainRequested is the event's contract: what its fields must agree on is in no JSON Schema and refused with 422.
CONTRACT = ("POST", "/mint/v1/runs")
GENERATED = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def _world() -> Kit:
    """The things that the document's examples name, of tenant acme."""
    kit = Kit()
    kit.catalog.run_views[RUN_EXAMPLE] = run_view(RUN_EXAMPLE, {"policy": "acme/adder"}, "completed")
    kit.catalog.entries = [api.JournalEntry(seq=1, at=AT, type="mint.v1.run.completed", body={"outcome": "promoted"})]
    kit.catalog.scores = [_score()]
    for name, data in FILES.items():
        sha256 = hashlib.sha256(data).hexdigest()
        kit.catalog.manifest_files[name] = asyncio.run(kit.store.put(f"blobs/sha256/{sha256}", data))
    view = KeyView(key_id=KEY_ID, tenant="acme", label="", kind="tml", created_at=AT, created_by="key:local")
    kit.book.views[KEY_ID] = view
    return kit


def _score() -> api.EvaluationView:
    return api.EvaluationView(
        evaluation_id=f"{RUN_EXAMPLE}:evaluation:last",
        run_id=RUN_EXAMPLE,
        policy="acme/adder",
        base=BASE,
        revision="acme/adder@2",
        adapter_sha256="2" * 64,
        task_sha256="e" * 64,
        scorer="exact_match",
        sampling={"items": 16},
        items=16,
        score=0.5,
        details=FileRef(key="attempts/x/y", sha256="0" * 64, size=1),
        created_at=AT,
    )


SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", _world().app, config=CONFIG)


@SCHEMA.include(path_regex="^/mint/v1/").parametrize()
@GENERATED
def test_the_mint_api_is_what_its_document_says(case: Any) -> None:
    key = "key-root" if case.path.startswith("/mint/v1/keys") else "key-acme"
    left_out = [checks.positive_data_acceptance] if (case.method, case.path) == CONTRACT else []
    case.call_and_validate(headers={"Authorization": f"Bearer {key}"}, excluded_checks=left_out)


@SCHEMA.exclude(path_regex="^/mint/v1/").parametrize()
@GENERATED
def test_the_other_apis_answer_what_their_document_says(case: Any) -> None:
    """Their requests are described by those who made these APIs, more loosely than they are read."""
    left_out = [checks.positive_data_acceptance, checks.negative_data_rejection, checks.unsupported_method]
    case.call_and_validate(headers={"Authorization": "Bearer key-acme"}, excluded_checks=left_out)
