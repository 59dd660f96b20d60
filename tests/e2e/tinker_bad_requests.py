"""Requests of Tinker clients other than data that cannot be, each with the words that its refusal must hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from services.gateway.tinker import wire_pb2
from tests.e2e.tinker_bad_data import LIMIT, MANY, Body, Case, Scene
from tests.e2e.tinker_wire import Proto, proto_datum, sample

NOWHERE = "5a8fbfa1-0000-4000-8000-000000000000"
PATH_OF_DOTS = f"tinker://{NOWHERE}:train:0/../weights/x"


def bomb(size: int = 1 << 28) -> bytes:
    """A few bytes that say they are `size` bytes."""
    sink, block = pa.BufferOutputStream(), bytes(1 << 20)
    with pa.CompressedOutputStream(sink, "zstd") as packer:
        for _ in range(size >> 20):
            packer.write(block)
    packed_bytes: bytes = sink.getvalue().to_pybytes()
    return packed_bytes


def squeezed(body: Body) -> bytes:
    data = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    made: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return made


COMPRESSED: dict[str, tuple[str, Callable[[Scene], bytes], str, tuple[str, ...]]] = {
    "a zstd bomb": ("forward_backward", lambda scene: bomb(), "zstd", (f"more than {LIMIT} bytes", "decompressed")),
    "a zstd bomb where JSON is read": ("optim_step", lambda scene: bomb(), "zstd", ("bytes when decompressed",)),
    "10^6 data in zstd": (
        "forward_backward",
        lambda scene: squeezed(Proto(scene.model, [wire_pb2.Datum()] * MANY).body()),
        "zstd",
        ("more than 4096 data",),
    ),
    "no zstd": ("forward_backward", lambda scene: b"plain", "zstd", ("zstd", "cannot be decompressed")),
    "zstd that is cut": (
        "forward_backward",
        lambda scene: squeezed(Proto(scene.model, [proto_datum()]).body())[:-8],
        "zstd",
        ("zstd", "cannot be decompressed"),
    ),
    "another compression": ("forward_backward", lambda scene: b"plain", "br", ("'br'", "zstd is")),
}
"""Bodies of protobuf under a content-encoding."""

NUMBERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "0": (0, ("seq_id", "greater than or equal to 1")),
    "below 0": (-1, ("seq_id", "greater than or equal to 1")),
    "of 32 bits": (2**31, ("seq_id", "less than or equal to 2147483647")),
    "of words": ("1", ("seq_id", "valid integer")),
    "of truth": (True, ("seq_id", "valid integer")),
    "a fraction": (1.5, ("seq_id", "valid integer")),
    "nothing": (None, ("seq_id", "valid integer")),
    "far ahead": (1_000_000, ("seq_id 1000000", "ahead of the work")),
}
"""What a seq_id cannot be."""

NAMES = ("..", "", ".", "a/b", "../../etc/passwd", "%2e%2e", ".hidden", "a b", "x" * 300, "a\x00b", "a\\b", "a..b")
"""What a save cannot be called."""

PATHS = (
    PATH_OF_DOTS,
    f"tinker://{NOWHERE}:train:0/weights/..",
    f"tinker://{NOWHERE}:train:0/weights/../../x",
    "tinker://../weights/x",
    "tinker://..",
    "tinker://",
    "file:///etc/passwd",
    "../../etc/passwd",
    f"tinker://{NOWHERE}:train:0/optimizer/x",
    f"tinker://{NOWHERE}:train:0/weights/%2e%2e%2fx",
)


def sampled(tokens: tuple[int, ...] = (100, 200), **more: Any) -> Callable[[Scene], Body]:
    return lambda scene: sample(scene.sampler, scene.next_sample, tokens, **more)


def drawn(**params: Any) -> Callable[[Scene], Body]:
    return sampled(sampling_params=params)


SAMPLES: dict[str, Case] = {
    "a temperature below 0": ("asample", drawn(temperature=-1.0), ("temperature",)),
    "a temperature of 1e300": ("asample", drawn(temperature=1e300), ("temperature", "100")),
    "a temperature of almost 0": ("asample", drawn(temperature=1e-9), ("temperature", "1e-05")),
    "top_p of 0": ("asample", drawn(top_p=0.0), ("top_p", "greater than 0")),
    "top_p above 1": ("asample", drawn(top_p=1.5), ("top_p", "less than or equal to 1")),
    "top_k below -1": ("asample", drawn(top_k=-2), ("top_k", "greater than or equal to -1")),
    "top_k of 0": ("asample", drawn(top_k=0), ("top_k",)),
    "no tokens to make": ("asample", drawn(max_tokens=0), ("max_tokens", "greater than or equal to 1")),
    "more tokens than the context": ("asample", drawn(max_tokens=100_000), ("max_tokens", "100000", "max_context")),
    "a prompt longer than the context": ("asample", sampled((7,) * 3000), ("3000", "context")),
    "an empty prompt": ("asample", sampled(()), ("prompt", "no token")),
    "a prompt token outside the vocabulary": ("asample", sampled((49_152,)), ("prompt", "49151")),
    "a prompt token below 0": ("asample", sampled((-1,)), ("prompt", "-1")),
    "a prompt of pictures": (
        "asample",
        sampled(prompt={"chunks": [{"type": "image", "data": ""}]}),
        ("prompt", "image", "encoded_text"),
    ),
    "no samples": ("asample", sampled(num_samples=0), ("num_samples", "greater than or equal to 1")),
    "10^6 samples": ("asample", sampled(num_samples=MANY), ("num_samples", "1024")),
    "an empty stop string": ("asample", drawn(stop=""), ("sampling_params.stop",)),
    "1000 stop strings": ("asample", drawn(stop=["a"] * 1000), ("sampling_params.stop", "64")),
    "a stop token outside the vocabulary": ("asample", drawn(stop=[60_000]), ("stop", "49151")),
    "a seed of 100 bits": ("asample", drawn(seed=2**100), ("seed",)),
    "more likely tokens than there are": ("asample", sampled(topk_prompt_logprobs=10**6), ("prompt_logprobs", "0 to")),
    "an unknown field": ("asample", drawn(beam_width=4), ("beam_width",)),
    "what is not offered": ("asample", sampled(topk_sample_logprobs=3), ("topk_sample_logprobs", "not supported")),
    "no number": ("asample", sampled(seq_id=None), ("seq_id",)),
    "a number below 0": ("asample", sampled(seq_id=-1), ("seq_id",)),
    "an unknown sampling session": ("asample", sampled(sampling_session_id="nobody:sample:0"), ("nobody:sample:0",)),
    "a session and a base": ("asample", sampled(base_model="tiny/llama"), ("sampling_session_id", "base_model")),
    "NaN for a temperature": (
        "asample",
        lambda scene: json.dumps(
            sample(scene.sampler, scene.next_sample, sampling_params={"temperature": float("nan")})
        ),
        ("temperature", "finite"),
    ),
}

LORA = {"rank": 4, "seed": 1, "train_unembed": False, "train_mlp": True, "train_attn": True}


def new_model(**changes: Any) -> dict[str, Any]:
    """Of the session `NOWHERE` unless the test says of which; `lora_config` changes fields of the usual one."""
    lora = LORA | changes.pop("lora_config", {})
    return {"session_id": NOWHERE, "model_seq_id": 77, "base_model": "tiny/llama", "lora_config": lora} | changes


MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a huge rank": (new_model(lora_config={"rank": 100_000}), ("rank", "100000", "32")),
    "a rank of 0": (new_model(lora_config={"rank": 0}), ("rank", "greater than or equal to 1")),
    "a rank below 0": (new_model(lora_config={"rank": -8}), ("rank", "greater than or equal to 1")),
    "an unknown base": (new_model(base_model="tiny/lama"), ("tiny/lama", "there is tiny/llama")),
    "no base": (new_model(base_model=""), ("base_model",)),
    "nothing to train": (
        new_model(lora_config={"train_mlp": False, "train_attn": False}),
        ("nothing is trained", "train_attn"),
    ),
    "the output layer alone": (
        new_model(lora_config={"train_mlp": False, "train_attn": False, "train_unembed": True}),
        ("train_unembed",),
    ),
    "all weights": (new_model() | {"lora_config": None}, ("all weights", "lora_config")),
    "a session of nobody": (new_model(session_id=NOWHERE), (NOWHERE,)),
    "a session of dots": (new_model(session_id="../x"), ("../x",)),
    "a number below 0": (new_model(model_seq_id=-1), ("model_seq_id",)),
    "another optimizer": (new_model(optimizer_config={"type": "muon"}), ("muon", "not supported")),
    "an alpha of its own": (new_model(lora_config={"alpha": 8}), ("alpha",)),
}
