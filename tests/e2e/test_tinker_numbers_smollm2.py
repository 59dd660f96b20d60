"""The numbers of SmolLM2 over the wire: equal to Transformers' and PEFT's in fp32, near them in bf16, and greedy
tokens that plain vLLM says too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from shared.bases import Base
from shared.operations.payload import AdamPayload, Array
from tests.contract.engine_rig import SMOL_NAME, peft_greedy, smollm2
from tests.e2e import plain_models as plain
from tests.e2e.conftest import FP32
from tests.e2e.tinker_json import Model, Wire
from tests.stacks import StackProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXACT = 1e-4
NEAR = 0.1
LEARNT = (
    "Question: What is the capital of the moon?\nAnswer: Nobody lives there, so it has none at all.",
    "The old man said to the sea: give me back my net, and I shall sing for you tonight.",
)
HELD_OUT = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "In 1969 two people walked on the moon for the first time.",
    "def add(a, b):\n    return a + b\n",
)
PROMPTS = ("Question: What is the capital of France?\nAnswer:", "The old man said", "Once upon a time")


@dataclass(frozen=True)
class Trained:
    """`archive`: of the sampler weights at `path`, unpacked."""

    precision: str
    base: Base
    wire: Wire
    model: Model
    path: str
    archive: Path

    def tokens(self, text: str) -> list[int]:
        found: list[int] = Tokenizer.from_file(str(self.base.directory / "tokenizer.json")).encode(text).ids
        return found


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    base = smollm2()
    if base is None:
        pytest.skip("SmolLM2 is not converted; run `make setup`")
    env = FP32 if request.param == "float32" else {}
    stack = StackProcess(tmp_path_factory.mktemp("smollm2") / "data", "transformers", env=env)
    try:
        with Wire(stack.up().url, SMOL_NAME) as wire:
            yield train(request.param, base, wire, tmp_path_factory.mktemp("archive"))
    finally:
        stack.down()


def train(precision: str, base: Base, wire: Wire, directory: Path) -> Trained:
    """Three steps on two texts."""
    model = wire.model(rank=8)
    unsaved = Trained(precision, base, wire, model, "", directory)
    for _ in range(3):
        model.forward_backward([plain.row_of(unsaved.tokens(text)) for text in LEARNT])
        model.optim_step(AdamPayload(learning_rate=1e-3))
    path = model.save_for_sampler("numbers")
    return Trained(precision, base, wire, model, path, wire.unpack(path, directory))


def check_near(precision: str, ours: list[Array], theirs: list[Array]) -> None:
    distances = np.abs(np.concatenate(ours) - np.concatenate(theirs))
    if precision == "float32":
        assert distances.max() <= EXACT
    else:
        assert distances.mean() <= NEAR


def test_forward_has_the_logprobs_of_transformers_and_peft(trained: Trained) -> None:
    """In fp32 those of plain PEFT, also where the learner computes in bf16."""
    data = [plain.row_of(trained.tokens(text)) for text in (*LEARNT, *HELD_OUT)]
    ours = trained.model.forward(data).logprobs
    directory = trained.base.directory
    check_near(trained.precision, ours, plain.logprobs(directory, data, trained.archive))
    untrained = np.concatenate(plain.logprobs(directory, data))
    assert np.abs(np.concatenate(ours) - untrained).mean() > 0.2


def test_compute_logprobs_of_the_sampler_equals_forward_of_the_trainer(trained: Trained) -> None:
    sampler = trained.wire.sampler(trained.path)
    texts = [trained.tokens(text) for text in HELD_OUT]
    forward = trained.model.forward([plain.row_of(tokens) for tokens in texts]).logprobs
    check_near(trained.precision, [sampler.logprobs(tokens) for tokens in texts], forward)


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("trained", ["float32"], indirect=True)
def test_the_archive_says_in_plain_vllm_and_plain_peft_what_greedy_samples_say(
    trained: Trained, tmp_path: Path
) -> None:
    """Tokens are equal where the numbers are."""
    prompts = [tuple(trained.tokens(text)) for text in PROMPTS]
    sampler, untrained = trained.wire.sampler(trained.path), trained.wire.sampler()
    ours = [sampler.greedy(prompt, 16).tokens[0] for prompt in prompts]
    assert ours == peft_greedy(trained.base, trained.archive, prompts, 16)
    assert ours == plain.vllm_greedy(trained.base.directory, trained.archive, prompts, 16, tmp_path)
    assert ours != [untrained.greedy(prompt, 16).tokens[0] for prompt in prompts]
