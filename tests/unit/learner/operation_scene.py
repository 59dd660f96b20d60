"""Operations of two policies at one workbench, whoever holds its base: one process or several."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from mint_schemas.training import Lora
from safetensors.torch import load

from services.learner.workbench import Workbench
from shared.operations.payload import LoadPayload, SavePayload
from shared.store.memory import MemoryStore
from tests.unit.learner.operation_world import ADAM, LORA, Catalog, Learner, Model, kl_payload, train

OTHER = Lora(rank=2, alpha=32.0, target_modules=("up_proj",))


async def operations(bench: Workbench) -> dict[str, Any]:
    """Passes and steps side by side, a row that is wrong, gradients saved and loaded, a reference, a probe."""
    store = MemoryStore()
    catalog = Catalog(store)
    learner = Learner(Path(), catalog, store, bench=bench)
    a, b = catalog.model("acme/tinker-a"), catalog.model("acme/tinker-b", OTHER)
    for model in (a, b):
        await catalog.submit(model, "forward_backward", train(0))
        await catalog.submit(model, "forward_backward", train(1, loss="stable_reinforce"))
        await catalog.submit(model, "forward", train(2))
        await catalog.submit(model, "optim_step", ADAM)
        await catalog.submit(model, "forward_backward", train(3))
    saved = await catalog.submit(a, "save_weights", SavePayload("weights", name="open"))
    await asyncio.gather(learner.drain(a.policy), learner.drain(b.policy))

    about = {"reference": a.checkpoints[saved], "reference_lora": LORA, "has_optimizer": True}
    await catalog.submit(b, "reverse_kl", kl_payload(), **about)
    await catalog.submit(b, "optim_step", ADAM)
    await catalog.submit(a, "load_weights", LoadPayload("tinker://x/weights/open", optimizer=True), **about)
    await catalog.submit(a, "optim_step", ADAM)
    probed = await catalog.submit(a, "save_sampler_weights", SavePayload("sampler_weights", name="s"))
    await asyncio.gather(learner.drain(a.policy), learner.drain(b.policy))
    probe = json.loads(await store.get(a.checkpoints[probed].files["probe.json"]))
    return {
        "adapters": {model.policy: await _adapter(store, model) for model in (a, b)},
        "failures": [view.failure.message for model in (a, b) for view in model.views.values() if view.failure],
        "losses": [await _loss(catalog, model, name) for model in (a, b) for name in model.views],
        "probe": probe["logprobs"],
    }


async def _adapter(store: MemoryStore, model: Model) -> dict[str, Any]:
    assert model.start is not None
    found: dict[str, Any] = load(await store.get(model.start.files["adapter.safetensors"]))
    return found


async def _loss(catalog: Catalog, model: Model, name: str) -> float:
    if model.views[name].failure is not None:
        return 0.0
    result = await catalog.result(model, name)
    return float(getattr(result, "metrics", {}).get("loss:sum", 0.0))
