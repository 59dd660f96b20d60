"""lm-eval's `local-completions` through a gateway and a replica: a base and a policy, as the engine scores them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from shared.bus import Bus, Table, table_for
from shared.engine.port import SampleRequest, SamplingSettings
from shared.text.codec import TextCodec
from tests.e2e.harness import by_lm_eval, documents
from tests.gateway_world import World, worded_base, world
from tests.serving_kit import BASE_NAME, BASE_TOKEN, Stage

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval")]


@pytest.fixture
def bus_table() -> Table:
    return table_for((BASE_TOKEN,))


@pytest.fixture
async def found(tmp_path: Path, bus: Bus) -> AsyncIterator[World]:
    stage = Stage(tmp_path, worded_base(tmp_path / "base"), bus=bus)
    await stage.add("acme/adder@1")
    await stage.desire("acme/adder@1", pinned=("acme/adder@1",))
    async with world(stage, TextCodec.load(stage.base.directory)) as running:
        yield running


async def _score(found: World, revision: str | None, context: str, choice: str) -> float:
    """What the engine itself says of the choice's tokens, without a gateway and without HTTP."""
    codec = TextCodec.load(found.stage.base.directory)
    whole = codec.encode(f"{context} {choice}")
    settings = SamplingSettings(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    request = SampleRequest(f"{revision}-{context}-{choice}", tuple(whole), settings, revision=revision)
    async for chunk in found.stage.controls.engines[-1].sample(request):
        assert chunk.prompt_logprobs is not None
        return sum(value for value in chunk.prompt_logprobs[len(codec.encode(context)) :] if value is not None)
    raise AssertionError("the engine said nothing")


@pytest.mark.parametrize(("model", "revision"), [(BASE_NAME, None), ("acme/adder", "acme/adder@1")])
async def test_lm_eval_scores_what_the_engine_scores(
    found: World, tmp_path: Path, model: str, revision: str | None
) -> None:
    asked = await asyncio.to_thread(by_lm_eval, found.url, model, found.stage.base.directory, tmp_path)
    right = 0
    for scores, document in zip(asked.choices, documents(), strict=True):
        context = f"Question: {document['question']}\nAnswer:"
        direct = [await _score(found, revision, context, choice) for choice in document["choices"]]
        assert [score for score, _ in scores] == pytest.approx(direct, abs=1e-3)
        right += direct.index(max(direct)) == document["answer"]
    assert asked.accuracy == right / len(documents())
