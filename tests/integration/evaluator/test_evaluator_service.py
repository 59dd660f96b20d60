"""The evaluator on a real bus: a command in, a score and its details out."""

from __future__ import annotations

from dataclasses import replace

from mint_schemas import RevisionEvaluated
from mint_schemas.commands import EvaluationRequested
from mint_schemas.training import ArithmeticTask

from services.evaluator.app import build
from services.evaluator.config import EvaluatorSettings
from services.evaluator.scoring import Details
from shared.bus import CATALOG_EVENTS, Bus, Received
from shared.store.memory import MemoryStore
from shared.tasks import task_digest
from tests.sampling import ADAPTER_SHA256, REVISION, answering, load_codec, small_base
from tests.sampling_stack import Commands, replica, resources, until
from tests.tiny import tokenizer_directory

SUMS = ArithmeticTask(kind="arithmetic", max_operand=20)
COMMAND = EvaluationRequested(
    command_id="run-1:evaluation:3",
    run_id="run-1",
    policy="acme/adder",
    base="tiny/llama",
    revision=REVISION,
    adapter_sha256=ADAPTER_SHA256,
    task=SUMS,
    items=50,
    max_tokens=8,
    seed=0,
)


async def test_a_command_becomes_a_score_and_an_event(bus: Bus) -> None:
    base = replace(small_base(), directory=tokenizer_directory())
    sampler = answering(load_codec(), lambda a, b, index: str(a + b) if a < 10 else "no")
    store, catalog = MemoryStore(), Commands("mint.v1.revision.evaluated", base.token)
    events: list[Received] = []

    async def keep(received: Received) -> None:
        events.append(received)

    await bus.consume(CATALOG_EVENTS, keep)
    async with (
        replica(bus, base, sampler),
        build(resources("evaluator", EvaluatorSettings(), bus, store, catalog, base)) as app,
    ):
        await app.start()
        await bus.publish("mint.v1.evaluation.requested", COMMAND.command_id, "mint/catalog", base.token, COMMAND)
        await until(lambda: events, "revision.evaluated")
        await bus.drain()
        await app.stop()
    event = events[0].decode(RevisionEvaluated)
    details = Details.from_bytes(await store.get(event.details))
    assert (event.revision, event.adapter_sha256) == (REVISION, ADAPTER_SHA256)
    assert (event.items, event.scorer, event.task_sha256) == (50, "exact_match", task_digest(SUMS))
    assert event.sampling == {"temperature": 0.0, "max_tokens": 8.0}
    assert event.score == details.score == sum(int(item.id.split("+")[0]) < 10 for item in details.items) / 50
    assert len({item.id for item in details.items}) == 50
