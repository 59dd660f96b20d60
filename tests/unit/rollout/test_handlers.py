"""`rollout.requested` → a record's file and a result to commit."""

import pytest
from mint_schemas.commands import RolloutRequested
from mint_schemas.training import ArithmeticTask

from services.rollout.groups import GroupSampler
from services.rollout.handlers import RECORD_FILE, RolloutHandler
from shared.errors import Fatal
from shared.rl.record import RolloutRecord
from shared.tasks import TaskLoader
from tests.sampling import (
    ADAPTER_SHA256,
    REVISION,
    KeptFiles,
    Lease,
    answering,
    as_any,
    load_codec,
    no_files,
    small_base,
)

COMMAND = RolloutRequested(
    command_id="run-1:rollout:1",
    run_id="run-1",
    policy="acme/adder",
    base="tiny/llama",
    step=1,
    revision=REVISION,
    adapter_sha256=ADAPTER_SHA256,
    task=ArithmeticTask(kind="arithmetic", max_operand=20),
    prompts=3,
    group_size=4,
    max_tokens=8,
    temperature=1.0,
    seed=0,
)


def handler() -> RolloutHandler:
    codec = load_codec()
    sampler = answering(codec, lambda a, b, index: str(a + b) if index == 0 else "no")
    return RolloutHandler({"tiny/llama": GroupSampler(sampler, small_base(), codec)}, TaskLoader(no_files))


async def test_the_result_names_the_record_and_its_figures() -> None:
    files = KeptFiles()
    result = await handler()(COMMAND, as_any(files), as_any(Lease()))
    record = RolloutRecord.from_bytes(files.files[RECORD_FILE])
    assert result.record.size == len(files.files[RECORD_FILE])
    assert (result.revision, result.adapter_sha256) == (REVISION, ADAPTER_SHA256)
    assert (result.groups, result.trajectories, result.reward_mean) == (3, 12, 0.25)
    assert result.tokens == sum(len(t.token_ids) for group in record.groups for t in group.trajectories)


async def test_nothing_is_written_once_the_lease_is_lost() -> None:
    files = KeptFiles()
    with pytest.raises(RuntimeError, match="lost"):
        await handler()(COMMAND, as_any(files), as_any(Lease(after=3, lost=RuntimeError("lost"))))
    assert not files.files


async def test_a_base_that_is_not_configured_is_named() -> None:
    with pytest.raises(Fatal, match="no base model 'other/base' is configured here; there are tiny/llama"):
        await handler()(COMMAND.model_copy(update={"base": "other/base"}), as_any(KeptFiles()), as_any(Lease()))
