"""A resident Transformers model whose rows may each run on another PEFT adapter.

Rows of one batch name their adapter (PEFT's mixed-adapter inference); prompts are padded on the left,
and the KV cache is the library's own. Adapters stay in float32 over a base of either dtype.

Invariant: no hook outlives a forward pass, whatever happens in it, so that the next batch never runs
on the adapters of the one before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

from shared.adapters import layout
from shared.adapters.admission import Admitted
from shared.adapters.manifest import Manifest
from shared.engine.batch import Prefilled, Rows
from shared.engine.loop import Applied
from shared.engine.settings import Dtype

BASE = "__base__"
IDLE = "idle"


@dataclass
class _State:
    """`mask` is [rows, positions], 1 where a token is; `position` is [rows], that of the next token."""

    cache: Any
    mask: torch.Tensor
    position: torch.Tensor
    adapters: list[str]


class TransformersModel:
    def __init__(self, directory: Path, dtype: Dtype, target_modules: Collection[str], threads: int) -> None:
        torch.set_num_threads(threads)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), local_files_only=True)
        config = model.config
        self.vocab_size = int(config.vocab_size)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.kv_bytes_per_token = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
        # PEFT needs one adapter to wrap the layers; this one is never named by a row.
        idle = LoraConfig(r=1, target_modules=sorted(target_modules), task_type="CAUSAL_LM")
        self._peft = get_peft_model(model, idle, adapter_name=IDLE).eval()
        self._model = self._peft.get_base_model()
        self._layers = {n: m for n, m in self._model.named_modules() if isinstance(m, LoraLayer)}

    def add(self, handle: int, manifest: Manifest, directory: Path, admitted: Admitted) -> Applied:
        """Apply an adapter and read it back from the layers. Removing it after a failure is safe."""
        name = _name(handle)
        tensors = load_file(directory / layout.TENSOR_FILE)
        config = LoraConfig(
            r=manifest.rank,
            lora_alpha=manifest.alpha,
            use_rslora=manifest.use_rslora,
            target_modules=list(manifest.target_modules),
            task_type="CAUSAL_LM",
            inference_mode=True,
        )
        self._peft.add_adapter(name, config, low_cpu_mem_usage=True)
        for module in admitted.modules:
            layer = self._layers[module]
            for part, slot in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
                value = tensors[layout.serving_name(module, part)].to(torch.float32)
                slot[name].weight = torch.nn.Parameter(value, requires_grad=False)
        self._peft.eval()
        return self._read_back(name, manifest, tensors)

    def remove(self, handle: int) -> None:
        if _name(handle) in self._peft.peft_config:
            self._peft.delete_adapter(_name(handle))

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[tuple[int, ...]], adapters: Sequence[int | None], full: Sequence[bool]
    ) -> Prefilled:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        names = [BASE if adapter is None else _name(adapter) for adapter in adapters]
        state = _State(DynamicCache(config=self._model.config), mask, mask.sum(-1), names)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(ids, positions, state, keep=0 if any(full) else 1)
        every = [
            logits[row, longest - len(prompts[row]) :].float().numpy() if wanted else None
            for row, wanted in enumerate(full)
        ]
        return Prefilled(state, logits[:, -1].float().numpy(), every)

    @torch.inference_mode()
    def select(self, state: Any, rows: Sequence[int]) -> Any:
        index = torch.tensor(rows)
        if not torch.equal(index, torch.arange(len(state.adapters))):
            state.cache.batch_select_indices(index)
        return _State(state.cache, state.mask[index], state.position[index], [state.adapters[i] for i in rows])

    @torch.inference_mode()
    def decode(self, state: Any, tokens: Sequence[int]) -> Rows:
        state.mask = torch.cat([state.mask, state.mask.new_ones((len(tokens), 1))], dim=1)
        logits = self._forward(torch.tensor(tokens)[:, None], state.position[:, None], state, keep=1)
        state.position = state.position + 1
        return logits[:, -1].float().numpy()

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, state: _State, keep: int) -> torch.Tensor:
        with self._adapters(state.adapters):
            return self._model(
                input_ids=ids,
                attention_mask=state.mask,
                position_ids=positions,
                past_key_values=state.cache,
                use_cache=True,
                logits_to_keep=keep,
            ).logits

    @contextmanager
    def _adapters(self, names: list[str]) -> Iterator[None]:
        unknown = set(names) - {BASE} - set(self._peft.peft_config)
        if unknown:
            raise KeyError(f"adapters {sorted(unknown)} are not resident")
        hooks = []
        try:
            for layer in self._layers.values():
                hook = layer.register_forward_pre_hook(
                    lambda module, args, kwargs: (args, kwargs | {"adapter_names": names}), with_kwargs=True
                )
                hooks.append(hook)
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _read_back(self, name: str, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> Applied:
        layers = {module: layer for module, layer in self._layers.items() if name in layer.lora_A}
        equal = all(
            abs(layer.scaling[name] - manifest.scaling) <= 1e-12 * manifest.scaling
            and torch.equal(layer.lora_A[name].weight, tensors[layout.serving_name(module, "lora_A")].float())
            and torch.equal(layer.lora_B[name].weight, tensors[layout.serving_name(module, "lora_B")].float())
            for module, layer in layers.items()
        )
        return Applied(len(layers), equal)


def _name(handle: int) -> str:
    return f"adapter-{handle}"
