"""Five steps over the wire give, to the byte, the adapter that the training primitives alone give."""

from __future__ import annotations

from pathlib import Path

from mint_schemas.training import Lora

from services.learner.config import LearnerSettings
from shared.adapters.layout import TENSOR_FILE
from shared.bases import load_bases
from tests.e2e.tinker_json import Wire
from tests.five_steps import CLIP, SEED, by_primitives, five_steps
from tests.stacks import StackProcess
from tests.tiny import TINY_NAME


def test_five_steps_over_the_wire_give_the_bytes_of_the_primitives(
    shared_stack: StackProcess, bases: Path, tmp_path: Path
) -> None:
    """Equal batch shapes and thread count: the learner's are its defaults under `mint up`."""
    tokens = LearnerSettings.model_fields["learner_batch_tokens"].default
    made = by_primitives(load_bases(bases)[TINY_NAME].directory, five_steps(), Lora(rank=4, alpha=32.0), tokens)
    with Wire(shared_stack.url, TINY_NAME) as wire:
        model, norms = wire.model(rank=4, seed=SEED), []
        for step in five_steps():
            for asked in step.passes:
                model.forward_backward(asked.rows, asked.loss)
            norms.append(model.optim_step(step.adam)["grad_norm:mean"])
        archive = wire.unpack(model.save_for_sampler("five"), tmp_path)
    assert norms == made.norms
    assert made.norms[1] > CLIP
    assert (archive / TENSOR_FILE).read_bytes() == made.adapter
