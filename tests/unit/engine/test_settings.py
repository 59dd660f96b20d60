"""Engine settings and the choice of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.bases import Base
from shared.engine.create import create_engine, vllm_refusal
from shared.engine.settings import EngineSettings
from shared.errors import Fatal


def _base(directory: Path, config: str) -> Base:
    (directory / "config.json").write_text(config)
    return Base("some/base", "some-base", directory, 16, ("q_proj",), "1" * 64, "2" * 64, "3" * 64, 64, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"slots": 0}, "slots"), ({"max_resident": 2}, "max_resident"), ({"dtype": "float16"}, "dtype")],
)
def test_settings_name_the_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineSettings(tmp_path, **change)  # type: ignore[arg-type]


def test_an_unknown_engine_is_named(tmp_path: Path) -> None:
    with pytest.raises(Fatal, match="engine 'onnx' is unknown; allowed: auto, vllm"):
        create_engine("onnx", _base(tmp_path, "{}"), EngineSettings(tmp_path))  # type: ignore[arg-type]


def test_an_architecture_that_vllm_does_not_serve_here(tmp_path: Path) -> None:
    config = '{"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64, "num_attention_heads": 1}'
    base = _base(tmp_path, config)
    assert vllm_refusal(base) is not None
    with pytest.raises(Fatal, match="use engine 'transformers'"):
        create_engine("vllm", base, EngineSettings(tmp_path))
