"""A base model's chat template, rendered the way Transformers renders it.

In: the template's text and the tokenizer's special tokens; out: the chat as one text. Invariant: equal,
character for character, to `apply_chat_template(tokenize=False)` of the same tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.text.tools import CALL_OPEN

__all__ = ["ChatTemplate", "Message", "read_chat_template"]

Message = Mapping[str, Any]

_OTHER_CALLS = ("<function=", "<arg_key>")
"""What stands within the tag in templates whose calls are no JSON (Qwen3-Coder, GLM)."""


def read_chat_template(directory: Path) -> str:
    """The template's text: `chat_template.jinja`, else the tokenizer config's; empty when there is none."""
    own = directory / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    config = directory / "tokenizer_config.json"
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    if isinstance(template, list):
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    return template or ""


class ChatTemplate:
    """Templates come with base models and are not trusted: they run in a sandbox."""

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(text) if text else None
        self._special_tokens = dict(special_tokens)
        names = jinja2.meta.find_undeclared_variables(environment.parse(text))
        self.renders_tools = "tools" in names and CALL_OPEN in text and not any(mark in text for mark in _OTHER_CALLS)
        """Whether it shows tools and calls by itself, in the format of `shared.text.tools`; what other formats it
        may know is of no use here, since nothing would read the calls."""

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Raises ValueError for an empty chat, a missing template, and a chat that the template refuses."""
        if not messages:
            raise ValueError("a chat needs at least one message")
        if self._template is None:
            raise ValueError("this base model has no chat template; send a text prompt instead of chat messages")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the base model's chat template refused these messages: {error}") from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks assistant text for trainers; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which templates for language models do not want."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
