"""What templates of other base models use, against Transformers' renderer."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from shared.text.template import ChatTemplate

TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{% for m in messages %}\n  {% generation %}{{ m['content'] }}{% endgeneration %}\n{% endfor %}\n",
    "{% if tools %}T{% endif %}{{ strftime_now('%Y') }}{{ messages[0].role.upper() }}",
]


@pytest.mark.parametrize("text", TEMPLATES)
def test_a_template_renders_as_transformers_renders_it(text: str) -> None:
    chat = [{"role": "user", "content": "<a> & 'b' é"}, {"role": "assistant", "content": "ok"}]
    expected, _ = render_jinja_template([chat], chat_template=text, bos_token="<s>")
    assert ChatTemplate(text, {"bos_token": "<s>"}).render(chat, False) == expected[0]


def test_a_template_says_no_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ValueError, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}], True)


def test_a_template_cannot_leave_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(ValueError, match="unsafe"):
        template.render([{"role": "user", "content": "x"}], True)
