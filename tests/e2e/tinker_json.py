"""The Tinker API in JSON by plain HTTP, one operation after another: what tests of numbers ask of a running stack.

In: rows as operations have them. Out: results as arrays. Invariant: nothing here computes; each number came over the
wire.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import numpy as np

from shared.operations.payload import AdamPayload, Array, Row

KEY = "tml-dev"
TENANT = "local"
"""Whose the sessions of the development key are."""

PATIENCE_S = 240.0


@dataclass(frozen=True)
class Passed:
    """Of a forward or forward_backward: logprobs by row, float64 as JSON had them."""

    logprobs: list[Array]
    loss: float


@dataclass(frozen=True)
class Drawn:
    """`prompt_logprobs` without the first, which there is none of."""

    tokens: list[list[int]]
    logprobs: list[Array]
    prompt_logprobs: Array


class Wire:
    """One session at a gateway."""

    def __init__(self, url: str, base: str) -> None:
        self.base = base
        self._http = httpx.Client(base_url=url, headers={"x-api-key": KEY}, trust_env=False, timeout=60)
        self.session_id: str = self.post("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]
        self._models = self._samplers = 0

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.post(f"/api/v1/sessions/{self.session_id}/finish", json={})
        self._http.close()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        answer = self._http.post(f"/api/v1/{path}", json=body)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def result(self, future: Mapping[str, Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self.post("retrieve_future", {"request_id": future["request_id"]})
            if answer.get("type") != "try_again":
                assert "error" not in answer, answer
                return answer
            assert time.monotonic() < deadline, answer

    def model(self, **lora: Any) -> Model:
        self._models += 1
        body = {"session_id": self.session_id, "model_seq_id": self._models, "base_model": self.base}
        made = self.result(
            self.post("create_model", {**body, "lora_config": {"seed": 7, "train_unembed": False, **lora}})
        )
        return Model(self, made["model_id"])

    def model_from(self, path: str) -> Model:
        """A new one that starts from what is saved, as its shape is."""
        self._models += 1
        body = {"session_id": self.session_id, "model_seq_id": self._models, "path": path, "optimizer": False}
        return Model(self, self.result(self.post("load_weights", body))["model_id"])

    def sampler(self, path: str | None = None) -> Sampler:
        """Of a saved path, or of the base itself."""
        self._samplers += 1
        source = {"base_model": self.base} if path is None else {"model_path": path}
        body = {"session_id": self.session_id, "sampling_session_seq_id": self._samplers, **source}
        return Sampler(self, self.post("create_sampling_session", body)["sampling_session_id"])

    def unpack(self, path: str, directory: Path) -> Path:
        """The archive of a `tinker://` path, unpacked."""
        run_id, kind, name = path.removeprefix("tinker://").split("/")
        link = self._http.get(f"/api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/archive")
        assert link.status_code == 302, link.text
        with httpx.Client(trust_env=False, timeout=60) as plain:
            archive = plain.get(link.headers["location"]).raise_for_status().content
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
            tar.extractall(directory, filter="data")
        return directory

    def upload(self, content: bytes) -> dict[str, Any]:
        answer = self._http.post("/mint/v1/data", params={"tenant": TENANT}, content=content)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def import_adapter(self, directory: Path, name: str) -> dict[str, Any]:
        """A PEFT directory, as POST /mint/v1/adapters answers it."""
        files = {"config": "adapter_config.json", "tensors": "adapter_model.safetensors"}
        body = {field: self.upload((directory / file).read_bytes()) for field, file in files.items()}
        answer = self._http.post("/mint/v1/adapters", json={"base": self.base, "name": name, **body})
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found


class Model:
    """One Tinker model; each call waits for its result."""

    def __init__(self, wire: Wire, model_id: str) -> None:
        self._wire, self.model_id, self._number = wire, model_id, 0

    def forward(self, rows: Sequence[Row], loss: str = "cross_entropy", **config: float) -> Passed:
        return self._passed("forward", "forward_input", rows, loss, config)

    def forward_backward(self, rows: Sequence[Row], loss: str = "cross_entropy", **config: float) -> Passed:
        return self._passed("forward_backward", "forward_backward_input", rows, loss, config)

    def optim_step(self, params: AdamPayload) -> dict[str, float]:
        metrics: dict[str, float] = self._done("optim_step", {"adam_params": vars(params)})["metrics"]
        return metrics

    def save_weights(self, name: str) -> str:
        return str(self._done("save_weights", {"path": name})["path"])

    def save_for_sampler(self, name: str) -> str:
        return str(self._done("save_weights_for_sampler", {"path": name})["path"])

    def load_weights(self, path: str, optimizer: bool = False) -> None:
        self._done("load_weights", {"path": path, "optimizer": optimizer})

    def _passed(self, path: str, field: str, rows: Sequence[Row], loss: str, config: Mapping[str, float]) -> Passed:
        content = {"data": [_datum(row) for row in rows], "loss_fn": loss, "loss_fn_config": dict(config) or None}
        answer = self._done(path, {field: content})
        logprobs = [np.asarray(output["logprobs"]["data"], np.float64) for output in answer["loss_fn_outputs"]]
        return Passed(logprobs, answer["metrics"]["loss:sum"])

    def _done(self, path: str, body: Mapping[str, Any]) -> Any:
        self._number += 1
        return self._wire.result(self._wire.post(path, {"model_id": self.model_id, "seq_id": self._number, **body}))


class Sampler:
    def __init__(self, wire: Wire, sampler_id: str) -> None:
        self._wire, self.sampler_id, self._number = wire, sampler_id, 0

    def logprobs(self, tokens: Sequence[int]) -> Array:
        """As the SDKs' `compute_logprobs` asks for them; of tokens 1 to the last."""
        return self.draw(tokens, 1, prompt_logprobs=True).prompt_logprobs

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> Drawn:
        """To the last of `max_tokens`, whatever the model says."""
        return self.draw(prompt, max_tokens, temperature=0.0, stop=[])

    def draw(self, prompt: Sequence[int], max_tokens: int, prompt_logprobs: bool = False, **params: Any) -> Drawn:
        self._number += 1
        body = {
            "sampling_session_id": self.sampler_id,
            "seq_id": self._number,
            "prompt": _input(prompt),
            "num_samples": 1,
            "sampling_params": {"max_tokens": max_tokens, **params},
            "prompt_logprobs": prompt_logprobs,
        }
        answer = self._wire.result(self._wire.post("asample", body))
        scored = answer.get("prompt_logprobs") or [None]
        assert scored[0] is None
        return Drawn(
            [sequence["tokens"] for sequence in answer["sequences"]],
            [np.asarray(sequence["logprobs"], np.float64) for sequence in answer["sequences"]],
            np.asarray(scored[1:], np.float64),
        )


def _input(tokens: Sequence[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


def _datum(row: Row) -> dict[str, Any]:
    return {
        "model_input": _input(row.tokens.tolist()),
        "loss_fn_inputs": {
            name: {
                "data": values.tolist(),
                "dtype": "int64" if values.dtype.kind == "i" else "float32",
                "shape": list(values.shape),
            }
            for name, values in row.inputs.items()
        },
    }
