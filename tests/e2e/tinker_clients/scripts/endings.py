"""Endings: a model that is unloaded, and a session that its client closes."""

from __future__ import annotations

import time

import desk
from desk import data, failure, forward, made, rest, sdk, service, step, trainer_of, types
from tinker.lib.api_future_impl import _APIFuture
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType


def unload(trainer):
    """Clients have the types of this request and no method for it."""
    holder = trainer.holder
    body = {"model_id": trainer.model_id, "type": "unload_model"}

    async def ask():
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            return await client.post("/api/v1/unload_model", body=body, cast_to=types.UntypedAPIFuture)

    future = holder.run_coroutine_threadsafe(ask()).result()
    asked = _APIFuture(
        types.UnloadModelResponse, holder, future, request_start_time=time.time(), request_type="UnloadModel"
    )
    return asked.result().model_id


def unloaded(client):
    trainer = trainer_of(client)
    step(trainer)
    path = trainer.save_state("last").result().path
    sampler = made(trainer.save_weights_and_get_sampling_client())
    before = forward(trainer)
    names = [unload(trainer), unload(trainer)]
    return {
        "model_id": trainer.model_id,
        "names": names,
        "before": before,
        "after": failure(lambda: trainer.forward(data(), "cross_entropy").result()),
        "run": rest(client).get_training_run(trainer.model_id).result().training_run_id,
        "again": forward(made(client.create_training_client_from_state(path))),
        "sampled": len(sampler.compute_logprobs(desk.prompt(desk.ROWS[0])).result()),
    }


def closed():
    """0.38 alone says that it is done."""
    client = service()
    trainer = trainer_of(client)
    step(trainer)
    client.close("success", detail="all of it").result()
    return trainer.model_id


def main():
    client = service()
    desk.tell({"version": sdk.__version__, "unloaded": unloaded(client), "closed": closed() if desk.LATER else None})


main()
