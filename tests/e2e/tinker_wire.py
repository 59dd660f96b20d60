"""`/api/v1` spoken by hand: JSON and protobuf bodies as they are, futures, and the retries of the public clients.

In: a gateway's url and a key. Out: answers, unread by any SDK. Invariant: nothing is corrected on the way, so that a
test sends exactly what it says.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx
import numpy as np

from services.gateway.tinker import wire_pb2
from tests.tiny import TINY_NAME

PROTOBUF = "application/x-protobuf"
PATIENCE_S = 150.0


class Wire:
    """One client. `ask` is one request; `send` repeats it while a part of the server is away, as the SDKs do."""

    def __init__(self, url: str, key: str = "tml-dev") -> None:
        self._http = httpx.Client(
            base_url=f"{url}/api/v1/", headers={"x-api-key": key}, trust_env=False, timeout=httpx.Timeout(60)
        )

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        return self._http.request(method, path, **request)

    def stream(self, path: str, body: Mapping[str, Any]) -> AbstractContextManager[httpx.Response]:
        """An answer whose body nobody reads: it is lost when the context ends."""
        return self._http.stream("POST", path, json=body)

    def post(self, path: str, body: Mapping[str, Any] | str | bytes, **headers: str) -> httpx.Response:
        """A mapping or a text is sent as JSON, bytes as protobuf."""
        kind = PROTOBUF if isinstance(body, bytes) else "application/json"
        content = json.dumps(body) if isinstance(body, Mapping) else body
        return self.ask("POST", path, content=content, headers={"content-type": kind, **headers})

    def send(self, path: str, body: Mapping[str, Any] | bytes) -> Any:
        """The answer, once there is one that is no 5xx."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                answer = self.post(path, body)
                if answer.status_code < 500:
                    assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
                    return answer.json()
                said = f"{answer.status_code} {answer.text}"
            except httpx.HTTPError as error:
                said = repr(error)
            assert time.monotonic() < deadline, f"{path}: {said}"
            time.sleep(0.2)

    def outcome(self, request_id: str) -> dict[str, Any]:
        """The result of a future, or its `{error, category}`."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found: dict[str, Any] = self.send("retrieve_future", {"request_id": request_id})
            if found.get("type") != "try_again":
                return found
            assert time.monotonic() < deadline, f"{request_id} is not over after {PATIENCE_S:g} s: {found}"

    def result(self, request_id: str) -> dict[str, Any]:
        found = self.outcome(request_id)
        assert "error" not in found, found
        return found

    def session(self) -> str:
        return str(self.send("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"])

    def model(self, session_id: str | None = None, number: int = 0, rank: int = 4, seed: int = 5) -> Model:
        session_id = session_id or self.session()
        body = {
            "session_id": session_id,
            "model_seq_id": number,
            "base_model": TINY_NAME,
            "lora_config": {"rank": rank, "seed": seed, "train_unembed": False, "train_mlp": True, "train_attn": True},
        }
        made = self.result(self.send("create_model", body)["request_id"])
        return Model(self, str(made["model_id"]), session_id)

    def sampler(self, session_id: str, number: int = 0, **source: Any) -> str:
        """Of the base, unless `model_path` says of what."""
        body = {"session_id": session_id, "sampling_session_seq_id": number, **(source or {"base_model": TINY_NAME})}
        return str(self.send("create_sampling_session", body)["sampling_session_id"])


@dataclass
class Model:
    """`next` is the number of its next operation."""

    wire: Wire
    model_id: str
    session_id: str
    next: int = 1

    def body(self, content: Mapping[str, Any], number: int | None = None) -> dict[str, Any]:
        return {"model_id": self.model_id, "seq_id": self.next if number is None else number, **content}

    def submit(self, path: str, content: Mapping[str, Any], number: int | None = None) -> str:
        """The request id; without a number of its own it takes the next one."""
        request_id = str(self.wire.send(path, self.body(content, number))["request_id"])
        self.next += number is None
        return request_id

    def do(self, path: str, content: Mapping[str, Any]) -> dict[str, Any]:
        return self.wire.result(self.submit(path, content))

    def save_name(self, name: str) -> str:
        return str(self.do("save_weights", {"path": name})["path"])


def tensor(data: Sequence[float], dtype: str = "int64", **more: Any) -> dict[str, Any]:
    return {"data": list(data), "dtype": dtype, **more}


def text(tokens: Sequence[int]) -> dict[str, Any]:
    """A ModelInput."""
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


def tokens_of(seed: int, length: int = 6) -> list[int]:
    return [(seed * 971 + at * 37) % 40_000 + 100 for at in range(length)]


def datum(seed: int = 0, length: int = 6) -> dict[str, Any]:
    tokens = tokens_of(seed, length + 1)
    inputs = {"target_tokens": tensor(tokens[1:]), "weights": tensor([1.0] * length, "float32")}
    return {"model_input": text(tokens[:-1]), "loss_fn_inputs": inputs}


def forward(*data: Mapping[str, Any], loss: str = "cross_entropy", **more: Any) -> dict[str, Any]:
    return {"forward_input": {"data": list(data), "loss_fn": loss, **more}}


def backward(*data: Mapping[str, Any], loss: str = "cross_entropy", **more: Any) -> dict[str, Any]:
    return {"forward_backward_input": {"data": list(data), "loss_fn": loss, **more}}


def step(learning_rate: float = 1e-3) -> dict[str, Any]:
    return {"adam_params": {"learning_rate": learning_rate}}


def sample(sampler_id: str, number: int, tokens: Sequence[int] = (100, 200, 300), **more: Any) -> dict[str, Any]:
    params = {"max_tokens": 4, "seed": 11, **more.pop("sampling_params", {})}
    fields = {"num_samples": 1, "prompt": text(tokens), "sampling_params": params}
    return {**fields, "sampling_session_id": sampler_id, "seq_id": number, **more}


@dataclass
class Proto:
    """A ForwardBackwardRequest, to be made wrong where a test wants it so."""

    model: Model
    data: list[wire_pb2.Datum] = field(default_factory=list)
    loss: str = "cross_entropy"

    def body(self) -> bytes:
        message = wire_pb2.ForwardBackwardRequest(
            model_id=self.model.model_id, seq_id=self.model.next, loss_fn=self.loss, data=self.data
        )
        return message.SerializeToString()


def packed(values: Sequence[float], dtype: str = "float32", **more: Any) -> wire_pb2.Tensor:
    """A dense tensor of the wire."""
    known = {"float32": ("<f4", wire_pb2.DTYPE_FLOAT32), "int64": ("<i8", wire_pb2.DTYPE_INT64)}
    layout, name = known[dtype]
    return wire_pb2.Tensor(dense=np.array(values, layout).tobytes(), dtype=name, **more)


def proto_datum(seed: int = 0, length: int = 6, **inputs: wire_pb2.Tensor) -> wire_pb2.Datum:
    """The same as `datum`; `inputs` take the place of its own."""
    tokens = tokens_of(seed, length + 1)
    chunk = wire_pb2.Chunk(
        encoded_text=wire_pb2.EncodedTextChunk(tokens=np.array(tokens[:-1], "<i4").tobytes()),
    )
    given = {"target_tokens": packed(tokens[1:], "int64"), "weights": packed([1.0] * length), **inputs}
    return wire_pb2.Datum(model_input=[chunk], loss_fn_inputs=given)
