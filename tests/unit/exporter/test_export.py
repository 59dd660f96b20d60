"""Training layout in, serving layout out: proved, refused by name, the same bytes each time."""

from __future__ import annotations

import asyncio
import hashlib
import json

import numpy as np
import pytest
import safetensors.numpy
from mint_schemas.commands import CheckpointRef, ExportRequested
from mint_schemas.training import Lora

from services.exporter.export import ExportJob
from shared.adapters.host import Host
from shared.errors import Fatal
from shared.rl.checkpoint import TrainingState
from shared.store import keys
from shared.store.memory import MemoryStore

MODULES = {f"model.layers.{i}.self_attn.{name}": (8, 16) for i in (0, 1) for name in ("q_proj", "v_proj")}
LORA = Lora(rank=4, alpha=8.0, target_modules=("v_proj", "q_proj"))
HOST = Host("tiny/llama", "a" * 64, "b" * 64, "c" * 64, 32, frozenset({"q_proj", "v_proj"}), MODULES)


class Attempt:
    def __init__(self, store, number=0):
        self._store, self._number = store, number

    async def put(self, name, data):
        return await self._store.put(f"attempts/{self._number}/{name}", data)

    async def put_blob(self, data):
        return await self._store.put(keys.blob(hashlib.sha256(data).hexdigest()), data)


class Lease:
    def check(self):
        return None


def tensors(rank=4, zero=False):
    rng = np.random.default_rng(0)
    found = {}
    for module, (out, inner) in MODULES.items():
        found[f"{module}.lora_A.weight"] = rng.standard_normal((rank, inner)).astype(np.float32)
        second = np.zeros if zero else rng.standard_normal
        found[f"{module}.lora_B.weight"] = second((out, rank)).astype(np.float32)
    return found


async def export(store, adapter, attempt=0, lora=LORA, probe=None, state=None, host=HOST, **changes):
    described = {
        "policy": "acme/a", "run_id": "run", "base": "tiny/llama", "base_sha256": "a" * 64, "rank": lora.rank,
        "alpha": lora.alpha, "use_rslora": lora.use_rslora, "target_modules": sorted(lora.target_modules),
        "seed": 0, "step": 3, "optimizer_step": 3, **(state or {}),
    }  # fmt: skip
    data = adapter if isinstance(adapter, bytes) else safetensors.numpy.save(adapter)
    files = {
        "adapter.safetensors": data,
        "state.json": TrainingState(**described).model_dump_json().encode(),
        **({"probe.json": probe} if probe else {}),
    }
    refs = {n: await store.put(f"t/{hashlib.sha256(d).hexdigest()}/{n}", d) for n, d in files.items()}
    command = ExportRequested(
        **{
            "command_id": "run:export:3", "run_id": "run", "policy": "acme/a", "base": "tiny/llama", "step": 3,
            "checkpoint": CheckpointRef(files=refs, step=3), "lora": lora, "parent": "acme/a@2", **changes,
        }
    )  # fmt: skip
    result = await ExportJob({"tiny/llama": host}, store)(command, Attempt(store, attempt), Lease())
    return result, refs


@pytest.fixture
def store():
    return MemoryStore()


async def test_the_values_pass_through_and_the_trainers_bytes_stay(store):
    """unsloth-zoo#941: what the trainer wrote is read, never scaled in place."""
    adapter = tensors()
    result, refs = await export(store, adapter)
    manifest = result.content
    served = safetensors.numpy.load(await store.get(manifest.files["adapter_model.safetensors"]))
    assert served.keys() == {f"base_model.model.{name}" for name in adapter}
    assert all(np.array_equal(served[f"base_model.model.{name}"], tensor) for name, tensor in adapter.items())
    again = await store.get(refs["adapter.safetensors"])
    assert hashlib.sha256(again).hexdigest() == refs["adapter.safetensors"].sha256
    assert again == safetensors.numpy.save(tensors())


async def test_the_manifest_says_everything_and_names_blobs(store):
    probe = b'{"prompt":[1,2,3],"logprobs":[-1.0,-2.0],"dtype":"float32"}'
    result, _ = await export(store, tensors(), probe=probe)
    manifest = result.content
    assert json.loads(await store.get(result.manifest)) == json.loads(manifest.model_dump_json())
    assert (manifest.revision, manifest.parent, manifest.step, manifest.run_id) == ("", "acme/a@2", 3, "run")
    assert manifest.target_modules == ("q_proj", "v_proj")
    assert manifest.probe is not None
    assert manifest.probe.logprobs == (-1.0, -2.0)
    assert len(manifest.tensors) == 8
    assert not manifest.zero_delta
    for name, ref in manifest.files.items():
        assert ref.key == keys.blob(ref.sha256)
        assert hashlib.sha256(await store.get(ref)).hexdigest() == ref.sha256, name
    named = [[name, manifest.files[name].sha256] for name in sorted(manifest.files)]
    assert manifest.adapter_sha256 == hashlib.sha256(json.dumps(named, separators=(",", ":")).encode()).hexdigest()


async def test_the_same_checkpoint_gives_the_same_bytes(store):
    shuffled = dict(reversed(tensors().items()))
    first, _ = await export(store, tensors())
    second, _ = await export(store, shuffled, attempt=1)
    assert first.content == second.content
    assert len([o async for o in store.list("blobs/")]) == 2


async def test_rslora_is_said_in_the_config_and_scales_by_the_root(store):
    """vllm#6909, lorax#299: alpha 32, rank 16, rsLoRA → 8.0, not 2.0; weights stay unscaled."""
    lora = Lora(rank=16, alpha=32.0, use_rslora=True, target_modules=("q_proj", "v_proj"))
    adapter = tensors(rank=16)
    result, _ = await export(store, adapter, lora=lora)
    assert result.content.scaling == 8.0
    config = json.loads(await store.get(result.content.files["adapter_config.json"]))
    assert (config["use_rslora"], config["r"], config["lora_alpha"]) == (True, 16, 32)
    served = safetensors.numpy.load(await store.get(result.content.files["adapter_model.safetensors"]))
    assert all(np.array_equal(served[f"base_model.model.{name}"], adapter[name]) for name in adapter)


async def test_an_adapter_of_zeros_is_said_to_be_one(store):
    result, _ = await export(store, tensors(zero=True))
    assert result.content.zero_delta


def _renamed(old, new):
    return {name.replace(old, new): tensor for name, tensor in tensors().items()}


def _with(name, shape=(8, 16)):
    return tensors() | {name: np.ones(shape, dtype=np.float32)}


def _infinite():
    adapter = tensors()
    adapter["model.layers.1.self_attn.q_proj.lora_B.weight"][0, 0] = np.inf
    return adapter


def _without(suffix):
    return {name: tensor for name, tensor in tensors().items() if not name.endswith(suffix)}


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        pytest.param(_renamed("model.layers", "_orig_mod.model.layers"), "_orig_mod", id="Soup#335"),
        pytest.param(_renamed("model.layers", "model.language_model.layers"), "0 of 4 modules", id="vllm#34186"),
        pytest.param(_with("lm_head.modules_to_save.weight"), "lm_head.modules_to_save.weight", id="vllm#9280"),
        pytest.param(
            _with("model.embed_tokens.trainable_tokens_delta"), "embed_tokens.trainable_tokens_delta", id="vllm#36501"
        ),
        pytest.param(_infinite(), "layers.1.self_attn.q_proj.lora_B.weight.*not finite", id="infinite"),
        pytest.param(_without("1.self_attn.v_proj.lora_A.weight"), "v_proj.lora_B.weight.*no lora_A", id="no-A"),
        pytest.param(_without("1.self_attn.v_proj.lora_B.weight"), "v_proj.*no lora_B", id="no-B"),
        pytest.param(tensors(rank=8), "lora_A.weight.*shape", id="rank"),
        pytest.param(b"torn", "cannot be read", id="torn"),
        pytest.param({n: t.astype(np.float16) for n, t in tensors().items()}, "is float16", id="dtype"),
    ],
)
async def test_what_no_engine_could_load_is_refused_by_name(store, adapter, reason):
    with pytest.raises(Fatal, match=reason):
        await export(store, adapter)
    assert [o async for o in store.list("blobs/")] == []


async def test_a_checkpoint_of_something_else_is_refused(store):
    for state, reason in (
        ({"base_sha256": "f" * 64}, "base_sha256"),
        ({"rank": 8}, "rank is 8, the export asks for 4"),
        ({"use_rslora": True}, "use_rslora"),
        ({"step": 2}, "step is 2"),
        ({"run_id": "other"}, "run_id is 'other'"),
        ({"format": 9}, "format 9"),
    ):
        with pytest.raises(Fatal, match=reason):
            await export(store, tensors(), state=state)
    with pytest.raises(Fatal, match="no base 'other'"):
        await export(store, tensors(), base="other")
    refs = {"adapter.safetensors": await store.put("x", b"x")}
    with pytest.raises(Fatal, match=r"has no state\.json"):
        await export(store, tensors(), checkpoint=CheckpointRef(files=refs, step=3))


async def test_exports_may_run_beside_each_other(store):
    results = await asyncio.gather(*(export(store, tensors(), attempt=i) for i in range(4)))
    assert len({result.content.adapter_sha256 for result, _ in results}) == 1
