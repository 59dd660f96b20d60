"""The Transformers + PEFT engine: every architecture, any machine, the correctness reference."""

from .engine import transformers_engine

__all__ = ["transformers_engine"]
