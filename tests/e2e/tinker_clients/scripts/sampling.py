"""Sampling: from the base, from a named save and from an ephemeral one; seeds, stops, logprobs of prompts."""

from __future__ import annotations

import desk
from desk import BASE, ROWS, failure, forward, made, prompt, rest, service, step, trainer_of, types

PROMPT = ROWS[3][:5]
GREEDY = types.SamplingParams(max_tokens=8, temperature=0.0)


def drawn(sampler, params, count=1, **more):
    found = sampler.sample(prompt(PROMPT), count, params, **more).result()
    return [
        {"tokens": list(it.tokens), "logprobs": list(it.logprobs), "stop_reason": it.stop_reason}
        for it in found.sequences
    ]


def seeds(sampler):
    def with_seed(seed, stop):
        return drawn(sampler, types.SamplingParams(max_tokens=12, temperature=1.0, seed=seed, stop=stop), 4)

    whole = {"one": with_seed(1, []), "one_again": with_seed(1, []), "two": with_seed(2, [])}
    return {**whole, "ended": with_seed(3, None)}


def stops(sampler, tokenizer):
    """At a token of the greedy sequence behind its first that is text of its own: by its id, and by that text."""

    def stopped(stop):
        return drawn(sampler, types.SamplingParams(max_tokens=8, temperature=0.0, stop=stop))[0]

    whole = stopped([])
    said = [tokenizer.decode([token]) for token in whole["tokens"]]
    at = next(n for n, text in enumerate(said) if n and text.strip().isascii() and text.strip())
    by_text = stopped([said[at]])
    return {
        "whole": whole,
        "stop": whole["tokens"][at],
        "by_id": stopped([whole["tokens"][at]]),
        "text": said[at],
        "by_text": by_text,
        "said": tokenizer.decode(by_text["tokens"]),
        "said_before": tokenizer.decode(by_text["tokens"][:-1]),
    }


def prompts(sampler):
    """Of every row's prompt, its logprobs by both ways and the five likeliest tokens."""
    params = types.SamplingParams(max_tokens=1)
    found = []
    for row in ROWS[:6]:
        answer = sampler.sample(prompt(row), 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=5).result()
        found.append({"row": row, "logprobs": answer.prompt_logprobs, "topk": answer.topk_prompt_logprobs})
    return {"sampled": found, "computed": computed(sampler)}


def computed(sampler):
    return [sampler.compute_logprobs(prompt(row)).result() for row in ROWS]


def main():
    client = service()
    base = made(client.create_sampling_client(base_model=BASE))
    trainer = trainer_of(client)
    for _ in range(3):
        step(trainer)
    path = trainer.save_weights_for_sampler("named").result().path
    sampler = made(client.create_sampling_client(model_path=path))
    ephemeral = made(trainer.save_weights_and_get_sampling_client())
    trained = forward(trainer)
    step(trainer)
    later = made(trainer.save_weights_and_get_sampling_client())
    listed = rest(client).list_checkpoints(trainer.model_id).result().checkpoints
    desk.tell(
        {
            "model_id": trainer.model_id,
            "path": path,
            "prompt": PROMPT,
            "rows": ROWS,
            "base_model": sampler.get_base_model(),
            "base": computed(base),
            "trained": trained,
            "prompts": prompts(sampler),
            "ephemeral": computed(ephemeral),
            "later": {"trained": forward(trainer), "computed": computed(later)},
            "seeds": seeds(sampler),
            "stops": stops(sampler, trainer.get_tokenizer()),
            "stopped_base": drawn(base, GREEDY),
            "listed": [it.checkpoint_id for it in listed],
            "taken": failure(lambda: trainer.save_weights_for_sampler("named").result()),
            "training_path": failure(lambda: made(client.create_sampling_client(model_path=_state(trainer)))),
            "unknown": failure(lambda: made(client.create_sampling_client(model_path=f"{path}-not"))),
            "too_long": failure(lambda: base.sample(prompt([1] * 1024), 1, GREEDY).result()),
            "after": drawn(sampler, GREEDY),
        }
    )


def _state(trainer):
    return trainer.save_state("a-training-checkpoint").result().path


main()
