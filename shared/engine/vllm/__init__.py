"""The vLLM engine: AsyncLLM in process, its cores as child processes."""

from .engine import vllm_engine

__all__ = ["vllm_engine"]
