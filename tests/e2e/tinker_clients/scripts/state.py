"""State: saved, gone on from, loaded with the optimizer and without it, with gradients that no step had taken."""

from __future__ import annotations

import desk
from desk import data, failure, forward, made, service, step, trainer_of, types


def taken_twice(trainer):
    """A name that is taken; then the same with overwrite."""
    refused = failure(lambda: trainer.save_state("two").result())
    before = forward(trainer)
    step(trainer)
    again = trainer.save_state("two", overwrite=True).result().path
    return {"refused": refused, "again": again, "moved": before != forward(trainer), "after": forward(trainer)}


def pending(client, trainer):
    """Gradients that were summed before a save are in it."""
    trainer.forward_backward(data(), "cross_entropy").result()
    path = trainer.save_state("pending").result().path
    other = made(client.create_training_client_from_state_with_optimizer(path))
    adam = types.AdamParams(learning_rate=5e-3)
    trainer.optim_step(adam).result()
    other.optim_step(adam).result()
    bare = made(client.create_training_client_from_state(path))
    return {
        "own": forward(trainer),
        "other": forward(other),
        "bare": failure(lambda: bare.optim_step(adam).result()),
    }


def main():
    client = service()
    trainer = trainer_of(client)
    fresh = forward(trainer)
    step(trainer)
    step(trainer)
    path = trainer.save_state("two").result().path
    at_two = forward(trainer)
    step(trainer)
    step(trainer)

    resumed = made(client.create_training_client_from_state_with_optimizer(path))
    resumed_at = forward(resumed)
    step(resumed)
    step(resumed)
    bare = made(client.create_training_client_from_state(path))
    bare_at = forward(bare)
    step(bare)
    step(bare)
    back = trainer_of(client, seed=11)
    back.load_state(path).result()
    back_at = forward(back)
    whole = trainer_of(client, seed=12)
    whole.load_state_with_optimizer(path).result()
    step(whole)
    step(whole)
    narrow = trainer_of(client, rank=4)
    desk.tell(
        {
            "path": path,
            "model_id": trainer.model_id,
            "fresh": fresh,
            "at_two": at_two,
            "at_four": forward(trainer),
            "resumed": {"at_two": resumed_at, "at_four": forward(resumed), "model_id": resumed.model_id},
            "bare": {"at_two": bare_at, "at_four": forward(bare)},
            "back_at_two": back_at,
            "whole_at_four": forward(whole),
            "taken": taken_twice(trainer),
            "overwritten": forward(made(client.create_training_client_from_state(path))),
            "pending": pending(client, trainer),
            "other_rank": failure(lambda: narrow.load_state(path).result()),
            "unknown_path": failure(lambda: narrow.load_state(f"{path}-not").result()),
            "dotted_path": failure(lambda: narrow.load_state("tinker://../weights/..").result()),
            "narrow_after": forward(narrow),
        }
    )


main()
