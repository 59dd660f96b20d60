"""Replicas that declare what a test needs, and a gateway in front of them with room for tools in a prompt."""

from __future__ import annotations

from shared.residency import Replica
from tests.unit.gateway.kit import BASE, Kit, smollm


def replica(name: str = "replica-0", **fields: object) -> Replica:
    values = {"boot_id": "boot", "url": "http://r", "base": BASE, "token": "smollm2-135m", "engine": "vllm"}
    values |= {"dtype": "float32", "max_rank": 32, "slots": 4, "max_resident": 8, "at": 0.0}
    return Replica.model_validate({"replica": name, **values, **fields})


def declaring(structured_output: bool = True, tools: bool = True) -> Kit:
    kit = Kit()
    kit.bases[BASE] = smollm(max_context=16_384)
    kit.replicas.alive = [replica(structured_output=structured_output, tools=tools)]
    return kit
