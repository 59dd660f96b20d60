"""Grammars before and beside vLLM: what is refused, what is kept, and what a completion is held to."""

from __future__ import annotations

import importlib.util
import json
import warnings
from copy import deepcopy
from typing import Any

import pytest

from shared.engine.port import EngineError, Grammar
from tests.hard_grammars import KEPT, REFUSED
from tests.tiny import tokenizer_directory

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore"),
]
SCHEMA = Grammar(
    "json_schema",
    json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
)


@pytest.fixture(scope="module")
def module() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from shared.engine.vllm import grammar
    return grammar


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_directory())


@pytest.fixture(scope="module")
def grammars(module: Any, tokenizer: Any) -> Any:
    made = module.grammars_of(tokenizer, 49152)
    yield made
    made.close()


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_compiled_is_named(grammars: Any, name: str) -> None:
    with pytest.raises(ValueError, match=r"^(json_schema|regex) ") as refused:
        await grammars.followers(REFUSED[name], 1)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("name", KEPT)
async def test_what_is_hard_is_compiled(grammars: Any, name: str) -> None:
    assert len(await grammars.followers(KEPT[name], 2)) == 2


async def test_a_grammar_is_compiled_once_and_each_sequence_goes_its_own_way(grammars: Any, tokenizer: Any) -> None:
    first, second = await grammars.followers(Grammar("regex", "(yes|no)!"), 2)
    (third,) = await grammars.followers(Grammar("regex", "(yes|no)!"), 1)
    for follower, text in ((first, "yes!"), (second, "no!"), (third, "yes!")):
        follower.take(tokenizer.encode(text, add_special_tokens=False), None)
        follower.take([grammars.end], "stop")


async def test_the_last_grammars_are_kept(module: Any, grammars: Any) -> None:
    for i in range(module.KEPT + 5):
        await grammars.followers(Grammar("regex", f"a{i}"), 1)
    assert len(grammars._kept) == module.KEPT
    assert Grammar("regex", "a0") not in grammars._kept


async def test_a_whole_sentence_may_end(grammars: Any, tokenizer: Any) -> None:
    (follower,) = await grammars.followers(SCHEMA, 1)
    for token in tokenizer.encode('{"a":12}', add_special_tokens=False):
        follower.take([token], None)
    follower.take([grammars.end], "stop")


async def test_half_a_sentence_may_reach_its_length_or_a_stop_token_and_may_not_end(
    grammars: Any, tokenizer: Any
) -> None:
    tokens = tokenizer.encode('{"a":', add_special_tokens=False)
    for reason in ("length", "stop"):
        (follower,) = await grammars.followers(SCHEMA, 1)
        follower.take(tokens, reason)
    (follower,) = await grammars.followers(SCHEMA, 1)
    with pytest.raises(EngineError, match="too complex while it was followed"):
        follower.take([*tokens, grammars.end], "stop")


async def test_what_leaves_the_grammar_is_an_error(grammars: Any, tokenizer: Any) -> None:
    (follower,) = await grammars.followers(SCHEMA, 1)
    with pytest.raises(EngineError, match="left the grammar"):
        follower.take(tokenizer.encode("hello", add_special_tokens=False), None)


def test_a_tokenizer_that_cannot_be_read_or_ends_nothing_gives_none(module: Any, tokenizer: Any) -> None:
    assert module.grammars_of(None, 10) is None
    endless = deepcopy(tokenizer)
    endless.eos_token = None
    assert module.grammars_of(endless, 10) is None
