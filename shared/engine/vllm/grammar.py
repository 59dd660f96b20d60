"""Grammars, compiled here before vLLM sees them and followed here while it generates.

vLLM compiles a grammar on its caller's event loop and once more in its engine process, where a failure, or a
limit that is met between two tokens, only ends the completion early. So every grammar is compiled first in a
thread of its own, within bounds that keep the later ones short, and what comes back is held against it.

In: a `Grammar`; out: a `Follower` for each sequence. Invariant: what the library cannot compile in full is a
ValueError that names it, and a completion that ends by itself is a whole sentence of its grammar.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast

from shared.engine.port import EngineError, Grammar

MAX_BYTES = 64 * 1024
MAX_NESTING = 32
KEPT = 32
LIMITS = LLParserLimits(max_grammar_size=100_000)
# Work on the first mask, in seconds of this thread: vLLM does it between two steps of everybody's.
FIRST_MASK_S = 0.25
# Compact JSON: a small model that may write white space can write it until it runs out of tokens.
COMPACT = {"whitespace_flexible": False}


class Follower:
    """One sequence on its way through a grammar. `end` is the token that ends a completion."""

    def __init__(self, matcher: LLMatcher, end: int) -> None:
        self._matcher, self._end = matcher, end

    def take(self, tokens: Sequence[int], finish_reason: str | None) -> None:
        """Raises EngineError where the tokens leave the grammar or end before a sentence is whole."""
        ended = finish_reason == "stop" and tokens[-1:] and tokens[-1] == self._end
        said = list(tokens[:-1] if ended else tokens)
        if said and not self._matcher.consume_tokens(said):
            raise EngineError(f"vLLM left the grammar of the request: {_reason(self._matcher.get_error())}")
        if ended and not self._matcher.is_accepting():
            raise EngineError("the grammar became too complex while it was followed; ask for a simpler one")


class Grammars:
    """Compiles for one tokenizer, one grammar at a time; the last ones are kept."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
        self._source, self._vocab_size = tokenizer, max(vocab_size, len(tokenizer))
        self.end = int(tokenizer.eos_token_id)
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    async def followers(self, grammar: Grammar, n: int) -> list[Follower]:
        """One for each of n sequences. Raises ValueError saying what of the grammar is not supported."""
        matcher = self._kept.get(grammar)
        if matcher is None:
            matcher = await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, grammar)
            self._kept[grammar] = matcher
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        return [Follower(matcher.deep_copy(), self.end) for _ in range(n)]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        spec = _specification(grammar)
        if self._tokenizer is None:
            self._tokenizer = from_tokenizer(self._source, self._vocab_size)
        matcher = LLMatcher(self._tokenizer, spec, log_level=0, limits=LIMITS)
        # The first mask is tried on a copy: some grammars compile at once and are too complex to take a step.
        trial, began = matcher.deep_copy(), time.thread_time()
        if not trial.is_error():
            trial.compute_bitmask()
        for problem in (matcher.get_error(), trial.get_error(), *matcher.get_grammar_warnings()):
            if problem:
                raise ValueError(f"{_named(grammar)} is not supported: {_reason(problem)}")
        if (spent := time.thread_time() - began) > FIRST_MASK_S:
            raise ValueError(f"{_named(grammar)} is too complex: {spent:.1f} s for its first token; repeat less in it")
        return matcher


def grammars_of(tokenizer: Any, vocab_size: int) -> Grammars | None:
    """None for a tokenizer that the library cannot read, or that ends nothing."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.eos_token_id is None:
        return None
    return Grammars(tokenizer, vocab_size)


def _specification(grammar: Grammar) -> str:
    """As vLLM writes it. Raises ValueError for a text that is too long, too deep or no JSON."""
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{grammar.kind} is no Unicode text: {error}") from error
    if size > MAX_BYTES:
        raise ValueError(f"{grammar.kind} has {size} bytes; at most {MAX_BYTES} are compiled")
    if "\x00" in grammar.text:
        raise ValueError(f"{grammar.kind} holds a NUL character")
    if grammar.kind == "regex":
        return str(llguidance.grammar_from("regex", grammar.text))
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_named(grammar)} is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError(f"{_named(grammar)} is no JSON object")
    if _depth(schema) > MAX_NESTING:
        raise ValueError(f"json_schema nests more than {MAX_NESTING} levels")
    return str(LLMatcher.grammar_from_json_schema(grammar.text, defaults=COMPACT))  # type: ignore[arg-type]


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [child for v in level for child in (v.values() if isinstance(v, dict) else v)]
    return depth


def _named(grammar: Grammar) -> str:
    text = grammar.text if len(grammar.text) <= 80 else f"{grammar.text[:80]}…"
    return f"{grammar.kind} {text!r}"


def _reason(message: str) -> str:
    """The library's own words, which may repeat the grammar at any length."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "no reason given")
    return said if len(said) <= 200 else f"{said[:200]}…"
