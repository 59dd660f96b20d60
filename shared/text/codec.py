"""Between text and token ids, for one base model: tokenizer, chat template, end-of-sequence ids.

In: the base model's directory. Out: token ids equal to those of Transformers' tokenizer, without
importing it or torch, so that every service can hold one. Encoding a text leaves other threads running.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shared.text.template import ChatTemplate, Message, read_chat_template
from shared.text.tools import spelled_out
from shared.text.turns import TrainOn, learnt_turns, turn_span

__all__ = ["Detokenizer", "Message", "TextCodec", "TooLong"]

# One text at a time is encoded: the library's own threads would only stand in the way of forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


# A decoder may need this many ids to see the character that the last of them are part of.
_TAIL = 8


class TooLong(ValueError):
    """The text does not fit the tokens that it may have, whatever it says."""


class TextCodec:
    """`eos_ids`: what ends a turn, ascending; sampling stops on any of them."""

    def __init__(self, tokenizer: Any, template: ChatTemplate, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.eos_ids = eos_ids
        self._texts: dict[int, str] = {}  # of single tokens: answers with logprobs ask for the same ones again
        self._longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def load(cls, directory: Path) -> TextCodec:
        """Raises OSError or ValueError for a directory without a readable tokenizer."""
        tokenizer = Tokenizer.from_str((directory / "tokenizer.json").read_text(encoding="utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special = _special_tokens(directory)
        eos: int | None = tokenizer.token_to_id(special.get("eos_token", ""))
        eos_ids = tuple(sorted(_configured_eos(directory) | ({eos} if eos is not None else set())))
        if not eos_ids:
            raise ValueError(f"{directory} names no end-of-sequence token; generation would never stop")
        return cls(tokenizer, ChatTemplate(read_chat_template(directory), special), eos_ids)

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special: bool = False, room: int | None = None) -> list[int]:
        """Token ids of the text as it stands; `add_special` puts around it what the tokenizer's own rule
        says (a beginning-of-sequence token, with some base models).

        Raises ValueError for a text with half of a character in it, and TooLong for one that is longer than
        `room` tokens can be; what it lets pass may still have more."""
        if room is not None and len(text) > room * self._longest:
            raise TooLong(f"the text has {len(text)} characters; {room} tokens have at most {room * self._longest}")
        text.encode()
        # `encode` would hold the interpreter's lock for as long as it takes.
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens included; a part of a character is U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special=False)
        return text

    def token_name(self, token_id: int) -> str:
        """One token as the vocabulary writes it (a leading space is a mark there); empty for an unknown id."""
        return str(self._tokenizer.id_to_token(token_id) or "")

    def chat_text(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Tools, calls and their results stand in it as the template has them, else as `shared.text.tools` spells
        them out. Raises ValueError for chats that the template refuses."""
        if not self._template.renders_tools:
            messages, tools = spelled_out(messages, tools), ()
        return self._template.render(messages, add_generation_prompt, tools)

    def chat_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        begin: str = "",
        room: int | None = None,
    ) -> list[int]:
        """The prompt after which the assistant's next turn follows, of which `begin` is said already.
        Raises what `chat_text` and `encode` raise."""
        return self.encode(self.chat_text(messages, tools=tools) + begin, room=room)

    def conversation(
        self, messages: Sequence[Message], train_on: TrainOn = "assistant"
    ) -> tuple[list[int], list[bool]]:
        """A whole chat, and which of its tokens are to be learnt: what the turns that `train_on` names say
        and the token that ends each, but not what the template puts around them. Both lists have one entry
        a token. `assistant`: each of its turns but those of `weight` 0; `last`: the last turn, which is the
        assistant's; `chosen`: the turns of `weight` 1, whoever speaks.

        Raises ValueError for a chat without such a turn, and for a template that renders a turn differently
        when others follow it (no span of the text would be the turn's)."""
        turns = learnt_turns(messages, train_on)
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        text = self._template.render(plain, False)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = list(encoding.ids)
        mask = [False] * len(ids)
        for start, end in (turn_span(self._template, plain, turn, text) for turn in turns):
            inside = [i for i, (a, b) in enumerate(encoding.offsets) if start <= a and b <= end]
            last = max((i for i in inside if ids[i] in self.eos_ids), default=max(inside, default=-1))
            for i in inside:
                mask[i] = i <= last
        return ids, mask


class Detokenizer:
    """Token ids in, text out, as they come: what is emitted, joined, is what they add to `decode` of all ids.

    `after` are the ids before them, of which nothing is emitted: some decoders drop the space that begins a text, and
    what goes on after others begins none. Text is held back while it ends inside a character, though never for more
    than a few ids: no character has more. `flush` gives what is left at the end. Invariant: each push decodes a bounded
    number of ids."""

    def __init__(self, codec: TextCodec, skip_special: bool = True, after: Sequence[int] = ()) -> None:
        self._codec, self._skip_special = codec, skip_special
        self._ids: list[int] = []
        self._read = 0  # ids before this are emitted; they stay as context, since decoders join neighbours
        self._told = 0  # characters of the text of all ids that are emitted
        self._keep(list(after[-_TAIL:]))

    def push(self, ids: Sequence[int]) -> str:
        """The new text, perhaps empty."""
        self._ids.extend(ids)
        text = self._pending()
        if text and not text.endswith("\ufffd"):
            self._keep(self._ids[self._read :])
            return text
        if len(self._ids) - self._read <= 2 * _TAIL:
            return ""
        if not text:
            del self._ids[self._read : -_TAIL]
            return ""
        # Of bytes that are no character only the last may still become one.
        return text[:-1] if self._keep(self._ids[-_TAIL:], unfinished=True) else text

    def flush(self) -> str:
        """The rest, with U+FFFD for a character that was never finished."""
        text = self._pending()
        self._ids, self._read, self._told = [], 0, 0
        return text

    def _keep(self, ids: list[int], unfinished: bool = False) -> bool:
        """These ids alone from now on, their text as emitted; `unfinished`: without a last U+FFFD. Whether it has
        one that is not."""
        text = self._codec.decode(ids, self._skip_special)
        held = unfinished and text.endswith("\ufffd")
        self._ids, self._read, self._told = ids, 0 if held else len(ids), len(text) - held
        return held

    def _pending(self) -> str:
        return self._codec.decode(self._ids, self._skip_special)[self._told :]


def _special_tokens(directory: Path) -> dict[str, str]:
    config = _read_json(directory / "tokenizer_config.json")
    found = {name: config.get(name) for name in _SPECIAL}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _configured_eos(directory: Path) -> set[int]:
    """Models may end a turn with more tokens than their tokenizer's one; the generation config lists them."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is not None:
            return set(value) if isinstance(value, list) else {value}
    return set()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
