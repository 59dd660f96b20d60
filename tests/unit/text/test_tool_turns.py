"""Tools in a prompt: as the template shows them where it can, spelled out where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from shared.text.template import ChatTemplate
from shared.text.tools import spelled_out

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHAT: Any = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "So:", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    {"role": "user", "content": "Thanks"},
]
HERMES = (
    "{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{%- for m in messages %}{{ m.role }}: {{ m.content }}"
    "{%- for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}\n"
    "{%- endfor %}"
)


@pytest.mark.parametrize(
    ("text", "renders"),
    [
        (HERMES, True),
        ("", False),
        (HERMES.replace("{{ call.function | tojson }}", "<function={{ call.function.name }}>"), False),
        (HERMES.replace("{{ call.function | tojson }}", "<arg_key>{{ call.function.name }}</arg_key>"), False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}", False),
        ("{{ '<tool_call>' }}{% for tools in messages %}{{ tools }}{% endfor %}", False),
    ],
)
def test_a_template_renders_tools_when_it_knows_them_in_the_format_that_is_read(text: str, renders: bool) -> None:
    assert ChatTemplate(text, {}).renders_tools is renders


def test_a_template_that_knows_tools_renders_them_as_transformers_does() -> None:
    expected, _ = render_jinja_template([CHAT], tools=TOOLS, chat_template=HERMES)
    assert ChatTemplate(HERMES, {}).render(CHAT, False, TOOLS) == expected[0]


def test_calls_and_results_become_plain_turns() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    results = "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    assert spelled_out(CHAT, ()) == [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": f"So:\n{call}\n{call}"},
        {"role": "user", "content": results},
        {"role": "user", "content": "Thanks"},
    ]


@pytest.mark.parametrize(("system", "begin"), [([], "# Tools\n"), (["Be brief."], "Be brief.\n\n# Tools\n")])
def test_tools_stand_in_the_system_turn(system: list[str], begin: str) -> None:
    chat = [*({"role": "system", "content": text} for text in system), CHAT[0]]
    first, *rest = spelled_out(chat, TOOLS)
    assert first["role"] == "system"
    assert first["content"].startswith(begin)
    assert '<tools>\n{"type": "function", "function": {"name": "add"' in first["content"]
    assert rest == [CHAT[0]]


def test_a_chat_without_tools_stays_as_it_is() -> None:
    chat = [{"role": "system", "content": "x"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "y"}]
    assert spelled_out(chat, ()) == chat


def test_many_results_become_one_turn_whose_text_is_joined_once() -> None:
    """Nothing is added to a text that grows: each result is read once, into a list."""

    class Once(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            raise AssertionError("a turn was changed after it was made")

    results = [Once(role="tool", content=str(number)) for number in range(1000)]
    (turn,) = spelled_out(results, ())
    assert turn["content"].split("\n")[1::3] == [str(number) for number in range(1000)]
