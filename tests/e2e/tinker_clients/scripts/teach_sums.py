"""Supervised steps on the prompt of the arithmetic recipe, over the SDK of either generation; run in a client's venv.

In: a base model by name, a rank, steps and a rate. Out: one JSON line: the path of the saved state, and of each step
the mean NLL of its answers. The sums are others than the recipe's own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys

import tinker
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv
from tinker_cookbook.renderers import TrainOnWhat, get_renderer
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer

LARGEST = 100


def sums(renderer, draw, count):
    shown = ArithmeticEnv.standard_fewshot_prefix()
    for _ in range(count):
        env = ArithmeticEnv(draw.randint(0, LARGEST), draw.randint(0, LARGEST), renderer=renderer)
        turns = [
            {"role": "user", "content": env.get_question()},
            {"role": "assistant", "content": env.get_reference_answer()},
        ]
        yield conversation_to_datum([*shown, *turns], renderer, None, TrainOnWhat.LAST_ASSISTANT_MESSAGE)


def nll(data, outputs):
    """Of the answers' tokens, each answer with the same weight."""
    pairs = [
        (weight, logprob)
        for datum, output in zip(data, outputs, strict=True)
        for weight, logprob in zip(datum.loss_fn_inputs["weights"].data, output["logprobs"].data, strict=True)
    ]
    return -sum(weight * logprob for weight, logprob in pairs) / sum(weight for weight, _ in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base")
    parser.add_argument("--renderer", default="qwen3_instruct")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-3)
    chosen = parser.parse_args()
    renderer = get_renderer(chosen.renderer, get_tokenizer(chosen.base))
    client = tinker.ServiceClient().create_lora_training_client(base_model=chosen.base, rank=chosen.rank, seed=1)
    if hasattr(client, "result"):  # the later generation answers with a future
        client = client.result()
    draw, found = random.Random(7), []
    for _ in range(chosen.steps):
        data = list(sums(renderer, draw, chosen.batch))
        learnt = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(tinker.AdamParams(learning_rate=chosen.rate))
        found.append(nll(data, learnt.result().loss_fn_outputs))
        stepped.result()
    path = client.save_state("sums").result().path
    sys.stdout.write(json.dumps({"path": path, "nll": found}) + "\n")


if __name__ == "__main__":
    main()
