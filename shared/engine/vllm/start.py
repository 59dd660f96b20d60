"""Starting vLLM: its arguments, its children's record, its LoRA operators.

Every argument that is not a default has its reason beside it; most are traps of the CPU platform.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import vllm
from vllm import AsyncEngineArgs, AsyncLLMEngine
from vllm.config import StructuredOutputsConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from shared.adapters import layout
from shared.adapters.admission import Host, host_of
from shared.bases import Base
from shared.engine.children import RECORD_FILE, ChildRecord, end_orphans, end_processes
from shared.engine.port import Capabilities
from shared.engine.settings import EngineSettings
from shared.errors import Fatal

from . import executor, grouped
from .grammar import COMPACT, Grammars, grammars_of

# What vLLM fuses: a target on the left is served by the module on the right.
PACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MAX_LOGPROBS = 20
ZERO_ID = 2**30
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Started:
    """`group`: the worker's LoRA operators are to be replaced before the first request. `zero`: the
    adapter that base requests must go through instead; None where they need none. `grammars`: None where
    the base's tokenizer allows no structured output."""

    llm: Any
    children: ChildRecord
    record: Path
    group: bool
    zero: LoRARequest | None
    grammars: Grammars | None = None


def start_vllm(base: Base, settings: EngineSettings) -> tuple[Started, Host, Capabilities, int]:
    """The running engine, the host and capabilities that it makes, and the size of its vocabulary."""
    record = settings.state_dir / RECORD_FILE
    end_orphans(record)
    host = host_of(base, settings.max_rank)
    on_cpu = current_platform.is_cpu()
    group = on_cpu and vllm.__version__ in grouped.VERSIONS
    zero = None
    if on_cpu and not group:
        zero = zero_adapter(settings.state_dir / "zero-adapter", host)
    children = ChildRecord(record)
    children.start()
    try:
        llm = AsyncLLMEngine.from_engine_args(engine_args(base, settings, host, spare=zero is not None))
    except Exception as error:
        children.stop()
        end_processes(children.alive())
        record.unlink(missing_ok=True)
        raise Fatal(f"vLLM does not start on {base.name}: {error}") from error
    children.stop()
    vocab_size = int(json.loads((base.directory / "config.json").read_bytes())["vocab_size"])
    grammars = grammars_of(llm.tokenizer, vocab_size)
    has = Capabilities(
        name="vllm",
        base_name=base.name,
        base_sha256=base.sha256,
        dtype=settings.dtype,
        max_context=min(settings.max_context, base.max_context),
        max_rank=host.max_rank,
        slots=settings.slots,
        max_resident=settings.max_resident,
        target_modules=host.target_modules,
        max_logprobs=MAX_LOGPROBS,
        structured_output=grammars is not None,
        # Their text format is the callers'; a call that must be made needs a grammar here.
        tools=grammars is not None,
        # By recomputation: the lowest priority gives its blocks back first.
        preemption=True,
    )
    return Started(llm, children, record, group, zero, grammars), host, has, vocab_size


def engine_args(base: Base, settings: EngineSettings, host: Host, *, spare: bool) -> AsyncEngineArgs:
    """`spare` adds one slot for the zero adapter."""
    ranks = [rank for rank in RANKS if rank >= host.max_rank]
    if not ranks:
        raise Fatal(f"max_rank {host.max_rank} is above vLLM's {RANKS[-1]}")
    sparing = current_platform.is_cpu() and vllm.__version__ in executor.VERSIONS
    return AsyncEngineArgs(
        model=str(base.directory),
        # Token ids in, token ids out: text is the callers'. Grammars alone speak of text, and need the tokenizer.
        skip_tokenizer_init=not (base.directory / TOKENIZER_FILE).is_file(),
        # One backend, since the default changes with each request's content. llguidance computes as it goes, within
        # bounds, and refuses what it does not know; xgrammar compiles whole automata ahead and ignores some
        # keywords (multipleOf, uniqueItems), and outlines knows fewer.
        structured_outputs_config=StructuredOutputsConfig(
            backend="guidance", disable_any_whitespace=not COMPACT["whitespace_flexible"]
        ),
        dtype=settings.dtype,
        max_model_len=min(settings.max_context, base.max_context),
        max_num_seqs=64,
        # A prompt is shared in whole blocks, and 128 tokens, vLLM's choice on CPU, are longer than most prompts: each
        # sample of a group then reads its prompt again. 32 is the least that its CPU kernels are made for.
        block_size=32 if current_platform.is_cpu() else None,
        # A prefill in parts rewinds the generator of a seeded request, which a CPU generator cannot do: the
        # engine dies (RuntimeError "CPU Generator does not use offset"). So every prefill fits into one step.
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(2048, min(settings.max_context, base.max_context)),
        # By default a share of all memory, which fails beside a learner.
        kv_cache_memory_bytes=settings.kv_cache_bytes,
        enable_lora=True,
        max_loras=settings.slots + spare,
        max_cpu_loras=settings.max_resident + spare,
        max_lora_rank=ranks[0],
        # By default lm_head is wrapped too, and concurrent prompt logprobs then kill the engine (vllm#16668).
        lora_target_modules=sorted(host.target_modules | {PACKED.get(name, name) for name in host.target_modules}),
        # By default logprobs ignore temperature and top_p, and a learner's ratios are wrong.
        logprobs_mode="processed_logprobs",
        max_logprobs=MAX_LOGPROBS,
        # By default the order of arrival alone counts.
        scheduling_policy="priority",
        distributed_executor_backend=executor.SparingExecutor if sparing else None,
        worker_extension_cls="shared.engine.vllm.worker.WorkerExtension",
        disable_log_stats=True,
        enable_log_requests=False,
    )


def zero_adapter(directory: Path, host: Host) -> LoRARequest:
    """A rank-1 adapter of zeros on one module: what base requests run through where vLLM's operators
    would serve them through the last slot."""
    module = next(m for m in sorted(host.modules) if m.rsplit(".", 1)[-1] in host.target_modules)
    out, inner = host.modules[module]
    directory.mkdir(parents=True, exist_ok=True)
    config = layout.config_bytes(host.base, 1, 1.0, False, [module.rsplit(".", 1)[-1]])
    (directory / layout.CONFIG_FILE).write_bytes(config)
    tensors = {
        layout.serving_name(module, "lora_A"): np.zeros((1, inner), np.float32),
        layout.serving_name(module, "lora_B"): np.zeros((out, 1), np.float32),
    }
    (directory / layout.TENSOR_FILE).write_bytes(layout.tensor_file_bytes(tensors))
    return LoRARequest(lora_name="zero", lora_int_id=ZERO_ID, lora_path=str(directory.absolute()))
