"""A revision that a run of events made: trained on, with its optimizer and without, and sampled from.

Arguments: its paths as a training checkpoint and as sampler weights.
"""

from __future__ import annotations

import sys

import desk
from desk import ROWS, forward, made, prompt, rest, service, step


def main(weights, sampler_weights):
    client = service()
    bare = made(client.create_training_client_from_state(weights))
    whole = made(client.create_training_client_from_state_with_optimizer(weights))
    sampler = made(client.create_sampling_client(model_path=sampler_weights))
    at_start = [forward(bare), forward(whole)]
    for trainer in (bare, whole):
        step(trainer)
    path = whole.save_weights_for_sampler("onward").result().path
    onward = made(client.create_sampling_client(model_path=path))
    info = rest(client).get_weights_info_by_tinker_path(weights).result()
    desk.tell(
        {
            "info": [info.base_model, info.lora_rank, info.train_attn, info.train_mlp, info.train_unembed],
            "at_start": at_start,
            "sampled": [sampler.compute_logprobs(prompt(row)).result() for row in ROWS],
            "after": [forward(bare), forward(whole)],
            "onward": [onward.compute_logprobs(prompt(row)).result() for row in ROWS],
            "model_id": whole.model_id,
            "base": forward(desk.trainer_of(client)),
        }
    )


main(*sys.argv[1:])
