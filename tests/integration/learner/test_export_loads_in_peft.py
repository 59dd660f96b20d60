"""Learner and exporter together: what is exported loads in plain PEFT and computes the same function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mint_schemas.commands import ExportRequested, UpdateRequested
from mint_schemas.training import ArithmeticTask, Lora, Sft, TaskDemonstrations
from peft import PeftModel
from transformers import AutoModelForCausalLM

from services.exporter.export import ExportJob
from services.learner.app import make_bench
from services.learner.config import LearnerSettings
from services.learner.step import UpdateJob
from shared.adapters.admission import admit
from shared.adapters.host import host_of
from shared.bases import load_bases
from shared.store.memory import MemoryStore
from shared.worker import AttemptFiles
from tests.tiny import TINY_NAME, make_tiny_base, write_bases_file

METHOD = Sft(
    kind="sft",
    data=TaskDemonstrations(kind="task", task=ArithmeticTask(kind="arithmetic")),
    steps=2,
    batch_size=8,
)


class Lease:
    def check(self) -> None:
        return None


def _update(step, lora, start):
    return UpdateRequested(
        command_id=f"run:update:{step}", run_id="run", policy="acme/a", base=TINY_NAME, step=step, steps=2,
        method=METHOD, lora=lora, seed=3, start=start, fresh_optimizer=False, export=step == 2,
    )  # fmt: skip


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(Lora(rank=4, alpha=8.0), id="all-linear"),
        pytest.param(Lora(rank=16, alpha=32.0, use_rslora=True, target_modules=("q_proj", "down_proj")), id="rslora"),
    ],
)
async def test_an_exported_checkpoint_gives_equal_logits_in_plain_peft(tmp_path: Path, lora: Lora) -> None:
    directory = make_tiny_base(tmp_path / "base")
    base = load_bases(write_bases_file(tmp_path / "bases.json", directory))[TINY_NAME]
    store = MemoryStore()
    bench = make_bench(base, LearnerSettings(learner_precision="float32"))
    job, start = UpdateJob({TINY_NAME: bench}, store), None
    for step in (1, 2):
        command = _update(step, lora, start)
        start = (await job(command, AttemptFiles(store, "run", command.command_id), Lease())).checkpoint
    assert start is not None
    request = ExportRequested(
        command_id="run:export:2", run_id="run", policy="acme/a", base=TINY_NAME, step=2, checkpoint=start, lora=lora,
        parent=None,
    )  # fmt: skip
    host = host_of(base)
    result = await ExportJob({TINY_NAME: host}, store)(request, AttemptFiles(store, "run", request.command_id), Lease())
    manifest = result.content
    assert not manifest.zero_delta
    assert manifest.scaling == 8.0 if lora.use_rslora else manifest.scaling == 2.0

    served = tmp_path / "served"
    served.mkdir()
    for name, ref in manifest.files.items():
        (served / name).write_bytes(await store.get(ref))
    admit(manifest, served, host)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    peft = PeftModel.from_pretrained(plain, served).eval()

    assert manifest.probe is not None
    prompt = manifest.probe.prompt
    with torch.no_grad():
        logits = peft(input_ids=torch.tensor([prompt])).logits[0, :-1]
        with peft.disable_adapter():
            untrained = peft(input_ids=torch.tensor([prompt])).logits[0, :-1]
    theirs = torch.log_softmax(logits, -1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert torch.allclose(theirs, torch.tensor(manifest.probe.logprobs), atol=1e-5)
    assert (logits - untrained).abs().max() > 1e-3
    assert json.loads((served / "adapter_config.json").read_bytes())["r"] == lora.rank
