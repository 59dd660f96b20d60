"""POST /tokenize and /detokenize, at the root as vLLM has them and under /v1.

In: a text or a chat, or token ids. Out: the token ids that a request with the same prompt is served from,
or the text that they stand for. Invariant: `model` is resolved like every request's, so that nobody
learns of another tenant's policies here.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from services.gateway.edge import Caller, Gateway, Here
from services.gateway.errors import BadField
from services.gateway.identity import Identity
from services.gateway.openai.context import context_tokens
from services.gateway.openai.fields import MAX_TOKENS, Integer, StrictFields
from services.gateway.openai.messages import Messages, check_results, unknown_keys
from services.gateway.openai.tools import MAX_TOOLS, Tool, tool_use
from shared.bases import Base
from shared.text.codec import TextCodec

__all__ = ["Detokenize", "Detokenized", "Tokenize", "Tokenized", "detokenize", "tokenize"]

Model = Annotated[
    str, Field(min_length=1, max_length=400, description="may be left out where the gateway has one base model")
]


class Tokenize(StrictFields):
    """A text as `prompt`, or a chat as `messages`, perhaps with its `tools`."""

    model: Model | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[tuple[Tool, ...], Field(max_length=MAX_TOOLS, fail_fast=True)] = ()
    add_special_tokens: bool | None = Field(
        None, description="what the tokenizer puts around a prompt; chats have what their template says"
    )
    add_generation_prompt: bool = Field(True, description="of a chat: end with the head of the assistant's turn")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Tokenize:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens: true goes with prompt; a chat has what its template puts there")
        if self.tools and (self.messages is None or not self.add_generation_prompt):
            raise ValueError("tools go with messages and add_generation_prompt: true")
        check_results(self.messages or ())
        if unknown := unknown_keys(self.messages or ()):
            raise ValueError(f"not supported here: {', '.join(unknown[:20])}; leave it out")
        return self


class Tokenized(BaseModel):
    """`token_strs`: the tokens as the tokenizer's vocabulary writes them, when asked for."""

    count: int
    max_model_len: int = Field(description="prompt and completion together, in tokens")
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenize(StrictFields):
    model: Model | None = None
    tokens: Annotated[list[Integer], Field(max_length=MAX_TOKENS, fail_fast=True)]


class Detokenized(BaseModel):
    """`prompt` shows special tokens too."""

    prompt: str


async def tokenize(body: Tokenize, gateway: Here, caller: Caller) -> Tokenized:
    base = await _base(gateway, body.model, caller)
    codec = gateway.codecs[base.name]
    ids = await asyncio.to_thread(_ids, codec, base, body)
    return Tokenized(
        count=len(ids),
        max_model_len=context_tokens(gateway, base),
        tokens=ids,
        token_strs=[codec.token_name(token) for token in ids] if body.return_token_strs else None,
    )


async def detokenize(body: Detokenize, gateway: Here, caller: Caller) -> Detokenized:
    base = await _base(gateway, body.model, caller)
    codec = gateway.codecs[base.name]
    wrong = next((token for token in body.tokens if not 0 <= token < codec.vocab_size), None)
    if wrong is not None:
        raise BadField("tokens", f"token id {wrong} is outside 0 to {codec.vocab_size - 1}")
    return Detokenized(prompt=await asyncio.to_thread(codec.decode, body.tokens, False))


def _ids(codec: TextCodec, base: Base, body: Tokenize) -> list[int]:
    if body.messages is None:
        try:
            return codec.encode(body.prompt or "", add_special=body.add_special_tokens is not False)
        except ValueError as error:
            raise BadField("prompt", f"the prompt is no text: {error}") from error
    messages = [message.as_template_input() for message in body.messages]
    try:
        if not body.add_generation_prompt:
            return codec.encode(codec.chat_text(messages, add_generation_prompt=False))
        use = tool_use(body.tools, None, True)
        return codec.chat_ids(messages, use.shown if use else ())
    except ValueError as error:
        raise BadField("messages", f"{base.name} does not take this chat: {error}") from error


async def _base(gateway: Gateway, model: str | None, caller: Identity) -> Base:
    """Raises what resolving raises; BadField where the choice is not obvious."""
    if model is not None:
        return (await gateway.resolver.target(model, caller)).base
    if len(gateway.bases) != 1:
        raise BadField("model", f"send model: this gateway has {len(gateway.bases)} base models", "missing")
    return next(iter(gateway.bases.values()))
