"""What every script here starts from: the SDK of its environment, rows of data, and how a failure reads.

Scripts print one JSON document of what they saw; judging it is left to the tests.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

sdk = importlib.import_module(os.environ["CLIENT_SDK"])
types = sdk.types
BASE = os.environ["CLIENT_BASE"]
LATER = hasattr(sdk, "RestClient")
"""Whether this is 0.38."""

ROWS = [[1, 4093 + 7 * n, 2057 + 31 * n, *(911 + 13 * n + k for k in range(n % 4)), 2] for n in range(20)]
"""Token ids of 4 to 7 tokens, no two rows equal."""


def service(key=None, **more):
    return sdk.ServiceClient(**({"api_key": key} if key else {}), **more)


def rest(client, key=None):
    """0.38 has a client of its own for REST."""
    if LATER:
        return sdk.RestClient(**({"api_key": key} if key else {}))
    return client.create_rest_client()


def made(found):
    """0.38 answers with a future of a client where 0.22 has the client itself."""
    return found.result() if hasattr(found, "result") else found


def trainer_of(client, **lora):
    return made(client.create_lora_training_client(BASE, **{"rank": 8, "seed": 7, **lora}))


def prompt(tokens):
    return types.ModelInput.from_ints(list(tokens))


def datum(tokens, weights=None, **inputs):
    """Position i predicts the next token. `inputs`: more of the loss's, in floats."""
    count = len(tokens) - 1
    found = {"target_tokens": types.TensorData(data=list(tokens[1:]), dtype="int64", shape=[count])}
    if weights is not None:
        inputs["weights"] = weights
    for name, values in inputs.items():
        found[name] = types.TensorData(data=[float(it) for it in values], dtype="float32", shape=[count])
    return types.Datum(model_input=prompt(tokens[:-1]), loss_fn_inputs=found)


def data(rows=ROWS):
    return [datum(row) for row in rows]


def logprobs(output):
    return [list(map(float, it["logprobs"].data)) for it in output.loss_fn_outputs]


def forward(trainer, rows=ROWS):
    return logprobs(trainer.forward(data(rows), "cross_entropy").result())


def step(trainer, rows=ROWS, rate=5e-3):
    """One step; the sum of the loss before it."""
    summed = trainer.forward_backward(data(rows), "cross_entropy")
    stepped = trainer.optim_step(types.AdamParams(learning_rate=rate))
    stepped.result()
    return summed.result().metrics["loss:sum"]


def failure(call):
    """What a call fails with; None where it does not."""
    try:
        call()
    except Exception as error:
        category = getattr(error, "category", None)
        return {
            "type": type(error).__name__,
            "message": str(error),
            "status": getattr(error, "status_code", None),
            "category": getattr(category, "value", category),
        }
    return None


def tell(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document, default=str) + "\n")
