"""Training: one model from its beginning through many data, steps, losses of its own, and refusals."""

from __future__ import annotations

import desk
import torch
from desk import ROWS, data, datum, failure, forward, logprobs, service, step, trainer_of, types

MANY = 2500


def many_data(trainer):
    """More data than one request takes, and the step behind them asked for before they are done."""
    found = data()
    summed = trainer.forward_backward([found[n % len(found)] for n in range(MANY)], "cross_entropy")
    stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-3))
    metrics = stepped.result().metrics
    output = summed.result()
    return {"logprobs": logprobs(output), "metrics": output.metrics, "step_metrics": metrics}


def losses(trainer, current):
    """Each loss where what sampled is what is trained, so that every ratio is 1."""
    advantages = [[(-1.0) ** n * (0.5 + k) for k in range(len(row) - 1)] for n, row in enumerate(ROWS)]
    rows = [datum(row, logprobs=q, advantages=a) for row, q, a in zip(ROWS, current, advantages, strict=True)]
    found = {
        name: trainer.forward(rows, name, config).result().metrics["loss:sum"]
        for name, config in (
            ("importance_sampling", None),
            ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
            ("cispo", None),
            ("dro", {"beta": 0.5}),
        )
    }
    weighed = sum(lp * a for q, each in zip(current, advantages, strict=True) for lp, a in zip(q, each, strict=True))
    return {"found": found, "advantages": sum(map(sum, advantages)), "weighed": weighed}


def custom(client):
    """A custom loss beside the cross-entropy that it equals: the same loss, and the same model after a step."""
    weights = [[0.25 * (k + 1) for k in range(len(row) - 1)] for row in ROWS]
    rows = [datum(row, weights=w) for row, w in zip(ROWS, weights, strict=True)]

    def weighed(asked, found):
        loss = sum(
            -(lp * torch.tensor(it.loss_fn_inputs["weights"].data)).sum() for it, lp in zip(asked, found, strict=True)
        )
        return loss, {"rows:sum": float(len(found))}

    ours, theirs = trainer_of(client), trainer_of(client)
    by_custom = ours.forward_backward_custom(rows, weighed)
    by_custom = by_custom.result()
    by_name = theirs.forward_backward(rows, "cross_entropy").result()
    for trainer in (ours, theirs):
        trainer.optim_step(types.AdamParams(learning_rate=5e-3)).result()
    return {
        "metrics": by_custom.metrics,
        "loss": by_name.metrics["loss:sum"],
        "after_custom": forward(ours),
        "after_named": forward(theirs),
    }


def refusals(client, trainer):
    """Each is the caller's fault and says so, and the next request is served."""
    long = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": types.TensorData(data=[1, 2, 3], dtype="int64", shape=[3])},
    )
    nan = datum([1, 2, 3], weights=[1.0, float("nan")])
    return {
        "no gradient": failure(lambda: trainer.optim_step(types.AdamParams()).result()),
        "no beta": failure(lambda: trainer.forward_backward(data(), "dro").result()),
        "unknown loss": failure(lambda: trainer.forward_backward(data(), "stable_reinforce").result())
        if desk.LATER
        else None,
        "long targets": failure(lambda: trainer.forward([long], "cross_entropy").result()),
        "nan weights": failure(lambda: trainer.forward_backward([nan], "cross_entropy").result()),
        "unknown token": failure(lambda: trainer.forward_backward(data([[1, 49152, 2]]), "cross_entropy").result()),
        "unembed alone": failure(lambda: trainer_of(client, train_mlp=False, train_attn=False)),
        "large rank": failure(lambda: trainer_of(client, rank=4096)),
        "unknown base": failure(lambda: desk.made(client.create_lora_training_client("nobody/nothing", rank=8))),
        "after": forward(trainer),
    }


def main():
    client = service()
    trainer = trainer_of(client, user_metadata={"purpose": "training"})
    info = trainer.get_info()
    tokenizer = trainer.get_tokenizer()
    first = trainer.forward(data(), "cross_entropy").result()
    current = logprobs(first)
    desk.tell(
        {
            "model_id": trainer.model_id,
            "info": {
                "model": info.model_data.model_name,
                "rank": info.lora_rank,
                "lora": info.is_lora,
                "model_id": info.model_id,
            },
            "text": tokenizer.decode(tokenizer.encode("a cat sat")),
            "rows": ROWS,
            "first": {"logprobs": current, "metrics": first.metrics},
            "losses": losses(trainer, current),
            "many": many_data(trainer),
            "after_many": forward(trainer),
            "steps": [step(trainer) for _ in range(5)],
            "custom": custom(client),
            "refusals": refusals(client, trainer),
            "last": forward(trainer),
        }
    )


main()
