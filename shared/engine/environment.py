"""The environment variables that vLLM is imported and starts under, restored after."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from shared.engine.settings import EngineSettings


@contextmanager
def vllm_environment(settings: EngineSettings) -> Iterator[None]:
    """No network, no usage reports, `threads` OpenMP threads bound to no core, KV size from the
    settings alone. What it imports sets more by itself; all of it is undone, and its children keep
    their copy."""
    before = dict(os.environ)
    # A KV size from outside would win over the setting.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    os.environ.update(
        {
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(settings.threads),
        }
    )
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
