"""The real engine under the real supervisor: its process is killed, and the same revision serves again."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from services.serving.app import engine_factory
from services.serving.config import ServingSettings
from services.serving.replica import Options, ServingReplica, Surroundings
from services.serving.residency import Limits
from services.serving.status import Identity
from shared.engine.children import RECORD_FILE
from tests.contract.engine_rig import smollm2
from tests.serving_kit import Stage, ask, running, tokens, until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


async def test_a_killed_vllm_process_comes_back_with_its_working_set(tmp_path: Path) -> None:
    """aibrix#236, aibrix#1819 on vLLM: the same revision serves without registering again."""
    base = smollm2()
    if base is None:
        pytest.skip("SmolLM2 is not converted; run `make setup`")
    pytest.importorskip("vllm")
    stage = Stage(tmp_path, base)
    manifest = await stage.add("acme/adder@1")
    await stage.desire("acme/adder@1", pinned=("acme/adder@1",))
    settings = ServingSettings(
        serving_base=base.name,
        serving_engine="vllm",
        serving_dtype="float32",
        serving_slots=2,
        serving_max_resident=4,
        serving_kv_bytes=2**28,
        serving_max_context=256,
    )
    options = Options(tmp_path / "serving", Limits(capacity=4))
    replica = ServingReplica(
        Identity("smollm2-0", "http://127.0.0.1:1", base),
        Surroundings(stage.bus, stage.store, stage.catalog),
        engine_factory(settings, base, options),
        options,
    )
    async with running(replica, healthy=False):
        await until(lambda: replica.healthy() is None, lambda: str(replica.healthy()), timeout_s=180)
        before = await tokens(replica, ask("acme/adder@1", max_tokens=8))
        plain = await tokens(replica, ask(max_tokens=8))
        boot = replica.supervisor.boot_id
        record = json.loads((options.directory / "engine" / RECORD_FILE).read_bytes())
        for child in record["children"]:
            # One may end by itself as soon as another is gone.
            with suppress(ProcessLookupError):
                os.kill(child["pid"], signal.SIGKILL)
        await until(lambda: replica.healthy() is not None, timeout_s=10)
        await until(lambda: replica.healthy() is None, lambda: str(replica.healthy()), timeout_s=180)
        assert replica.supervisor.boot_id != boot
        assert await tokens(replica, ask("acme/adder@1", max_tokens=8)) == before
        assert await tokens(replica, ask(max_tokens=8)) == plain
        sampling = await replica.sampler.open(ask("acme/adder@1"))
        await sampling.close()
    assert before != plain
    assert sampling.served.adapter_sha256 == manifest.adapter_sha256
