"""One content in both encodings, and a session with a model over the whole gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np

from services.gateway.tinker import wire_pb2 as wire
from tests.unit.gateway.kit import BASE, Kit

PROTOBUF = {"content-type": "application/x-protobuf"}
TAKES_PROTOBUF = {"accept": "application/x-protobuf"}
DTYPES = {"int64": (wire.DTYPE_INT64, np.int64), "float32": (wire.DTYPE_FLOAT32, np.float32)}


def tensor(data: list[Any], dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {"data": data, "dtype": dtype, "shape": [len(data)], **more}


def datum(tokens: list[int], targets: list[int] | None = None, **inputs: dict[str, Any]) -> dict[str, Any]:
    """With weights of 1 unless there are other inputs."""
    targets = tokens if targets is None else targets
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "loss_fn_inputs": {
            "target_tokens": tensor(targets, "int64"),
            **(inputs or {"weights": tensor([1.0] * len(targets))}),
        },
    }


def sampled(tokens: list[int]) -> dict[str, Any]:
    return datum(
        tokens, logprobs=tensor([-0.5] * len(tokens)), advantages=tensor([0.25 * i for i in range(len(tokens))])
    )


def train(model_id: str, seq_id: int, data: list[Any], loss: str = "cross_entropy", **config: float) -> dict[str, Any]:
    content: dict[str, Any] = {"data": data, "loss_fn": loss}
    if config:
        content["loss_fn_config"] = config
    return {"forward_backward_input": content, "model_id": model_id, "seq_id": seq_id}


def proto(request: dict[str, Any], forward_only: bool = False) -> wire.ForwardBackwardRequest:
    """The JSON request as the protobuf that the same client would send."""
    content = request["forward_backward_input"]
    message = wire.ForwardBackwardRequest(
        model_id=request["model_id"],
        seq_id=request["seq_id"],
        loss_fn=content["loss_fn"],
        loss_fn_config=content.get("loss_fn_config", {}),
        forward_only=forward_only,
    )
    for found in content["data"]:
        into = message.data.add()
        for chunk in found["model_input"]["chunks"]:
            into.model_input.add().encoded_text.tokens = np.asarray(chunk["tokens"], np.int32).tobytes()
        for name, value in found["loss_fn_inputs"].items():
            into.loss_fn_inputs[name].CopyFrom(proto_tensor(value))
    return message


def proto_tensor(value: dict[str, Any]) -> wire.Tensor:
    number, dtype = DTYPES[value["dtype"]]
    packed = np.asarray(value["data"], dtype).tobytes()
    message = wire.Tensor(dtype=number, shape=value["shape"])
    if "sparse_crow_indices" in value:
        message.sparse_csr.values = packed
        message.sparse_csr.crow_indices = np.asarray(value["sparse_crow_indices"], np.int64).tobytes()
        message.sparse_csr.col_indices = np.asarray(value["sparse_col_indices"], np.int64).tobytes()
    else:
        message.dense = packed
    return message


@dataclass
class Scene:
    """`key-acme`'s client with one session and one model, which is `model_id`."""

    kit: Kit
    http: httpx2.AsyncClient
    session_id: str = ""
    model_id: str = ""

    async def begin(self) -> None:
        answer = await self.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})
        self.session_id = answer.json()["session_id"]
        created = await self.post("create_model", self.model(0))
        self.model_id = created.json()["model_id"]

    def model(self, number: int, **lora: Any) -> dict[str, Any]:
        config = {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True} | lora
        head = {"session_id": self.session_id, "model_seq_id": number, "type": "create_model"}
        return head | {"base_model": BASE, "lora_config": config}

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx2.Response:
        if isinstance(body, bytes):
            return await self.http.post(f"/api/v1/{path}", content=body, headers=headers)
        return await self.http.post(f"/api/v1/{path}", json=body, headers=headers)

    async def retrieve(self, answer: httpx2.Response, headers: dict[str, str] | None = None, **more: Any) -> Any:
        """The result's response, for what a request answered."""
        assert answer.status_code == 200, answer.text
        return await self.post("retrieve_future", {"request_id": answer.json()["request_id"], **more}, headers)

    async def result(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        return (await self.retrieve(await self.post(path, body, headers))).json()

    async def next_is_served(self, seq_id: int) -> None:
        """A good request of the same model right behind is worked on."""
        found = await self.result("forward_backward", train(self.model_id, seq_id, [datum([1, 2, 3])]))
        assert found["metrics"] == {"loss:sum": 1.5}
