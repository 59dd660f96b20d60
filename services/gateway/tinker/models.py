"""Models: begun, described, unloaded.

In: a base model and which of its modules to train. Out: a future whose model id is known at once. Rules: alpha is 32
whatever the rank; `train_unembed` is accepted beside other modules and recorded, the output layer is not trained, and
the answer says so.
"""

from __future__ import annotations

import difflib
import hashlib
from typing import Any

from mint_schemas.training import Lora

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.tinker.errors import invalid, unsupported
from services.gateway.tinker.messages import CreateModel, LoraConfig, ModelRef
from services.gateway.tinker.operations import future
from services.gateway.tinker.rest.paths import checked_name
from services.gateway.tinker.rest.views import UNEMBED_NOTE
from services.gateway.tinker.sessions import texts
from shared.bases import Base
from shared.catalog.operations import Content, NewModel, Submit
from shared.errors import Refused

__all__ = ["begun", "check_optimizer", "create_model", "get_info", "named_base", "seed_of", "unload_model"]

ALPHA = 32.0
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


async def create_model(body: CreateModel, gateway: Here, caller: Caller) -> dict[str, Any]:
    base = named_base(gateway, body.base_model)
    check_optimizer(body.optimizer_config)
    if body.lora_config is None:
        raise unsupported("training all weights", "send a lora_config")
    return await begun(
        gateway,
        NewModel(
            tenant=caller.tenant,
            actor=caller.actor,
            session_id=checked_name(body.session_id, "session id"),
            model_seq_id=body.model_seq_id,
            base=base.name,
            lora=_lora(body.lora_config, base),
            seed=seed_of(body.lora_config.seed),
            train_unembed=body.lora_config.train_unembed,
            user_metadata=texts(body.user_metadata),
        ),
    )


async def begun(gateway: Gateway, request: NewModel) -> dict[str, Any]:
    answer = future(await gateway.operations.new_model(request))
    return answer | ({"note": UNEMBED_NOTE} if request.train_unembed else {})


async def get_info(body: ModelRef, gateway: Here, caller: Caller) -> dict[str, Any]:
    """The tokenizer is that of the base model's name."""
    model = await gateway.operations.model(checked_name(body.model_id, "model id"), caller.tenant)
    info = {
        "type": "get_info",
        "model_data": {"model_name": model.base, "tokenizer_id": model.base},
        "model_id": model.model_id,
        "is_lora": True,
        "lora_rank": model.lora.rank,
        "model_name": model.base,
    }
    return info | ({"note": UNEMBED_NOTE} if model.train_unembed else {})


async def unload_model(body: ModelRef, gateway: Here, caller: Caller) -> dict[str, Any]:
    """Behind everything accepted so far; a second time it is the same operation."""
    request = Submit(
        tenant=caller.tenant,
        actor=caller.actor,
        model_id=checked_name(body.model_id, "model id"),
        seq_id=0,
        kind="unload_model",
        digest=hashlib.sha256(b"unload_model").hexdigest(),
        payload=Content(),
        key="unload_model",
    )
    return future(await gateway.operations.submit(request))


def named_base(gateway: Gateway, name: str) -> Base:
    base = gateway.bases.get(name)
    if base is None:
        known = sorted(gateway.bases)
        raise Refused(
            f"there is no base model {name[:200]!r} here; there is {', '.join(known)}",
            code="unknown_base",
            near=difflib.get_close_matches(name, known, 3, 0.5),
        )
    return base


def check_optimizer(config: dict[str, Any] | None) -> None:
    if config is not None and config.get("type", "adamw") != "adamw":
        raise unsupported(f"the optimizer {str(config.get('type'))[:40]!r}", "use adamw")


def seed_of(seed: int | None) -> int | None:
    """As the catalog keeps it: 63 bits."""
    return None if seed is None else seed % 2**63


def _lora(config: LoraConfig, base: Base) -> Lora:
    if config.rank > base.max_rank:
        raise invalid(f"lora_config.rank: {config.rank} is above {base.max_rank}, the highest for {base.name}")
    targets = (ATTENTION if config.train_attn else ()) + (FEED_FORWARD if config.train_mlp else ())
    if not targets:
        only = "; train_unembed alone cannot be trained here" if config.train_unembed else ""
        raise invalid(f"lora_config: nothing is trained; set train_attn, train_mlp or both{only}")
    return Lora(rank=config.rank, alpha=ALPHA, target_modules=targets)
