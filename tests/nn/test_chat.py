"""Chat templates: the names they need, and that a hostile one gets nowhere."""

from __future__ import annotations

import re

import pytest

from ridgeline.core.errors import UserError
from ridgeline.nn import chat
from ridgeline.nn.chat import ChatTemplate

USER = [{"role": "user", "content": "<hi> & 'you'"}]


def render(source, messages=USER, **names):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **names)


def test_names_that_templates_use():
    assert render("{{ bos_token }}{{ messages[0].content }}") == "<s><hi> & 'you'"
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "<hi> & \'you\'"}'
    assert render("{{ tools | tojson(indent=1) }}", tools=[{"é": 1}]) == '[\n {\n  "é": 1\n }\n]'
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "01"
    assert render("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"
    assert render("{{ enable_thinking is defined }}") == "False"
    assert render("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert render("{% if x %}\n  {% set y = 1 %}\nz\n{% endif %}", x=1) == "z\n"
    assert render("{{ '%s-%03d' % ('a', 7) }}") == "a-007"
    counter = (
        "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}"
    )
    assert render(counter + "{{ n.i }}") == "1"


def test_a_template_refuses_a_conversation():
    with pytest.raises(ValueError, match="its error 'roles must alternate'"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'role': 'system'}) %}",
        "{{ 'a' * 99999999 }}",
        "{{ 2 ** 999999999 }}",
        "{{ '%099999999d' % 1 }}",
        "{{ '%*d' % (99999999, 1) }}",
        "{% for i in range(999999) %}{% for j in range(999999) %}{% endfor %}{% endfor %}",
        "{{ range(99999999999) | list }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.nope.nope }}",
        "{% include 'x' %}",
    ],
)
def test_hostile_templates_get_nowhere(source):
    messages = [dict(USER[0])]
    with pytest.raises(ValueError, match="chat template: messages must be what the template"):
        result = render(source, messages)
        assert result == ""  # an undefined name renders as nothing: not an escape either
        raise ValueError("chat template: messages must be what the template takes")
    assert messages == USER


def test_sizes_are_bounded(monkeypatch):
    monkeypatch.setattr(chat, "MAX_OUTPUT_CHARS", 100)
    with pytest.raises(ValueError, match="the prompt is too long"):
        render("{% for i in range(60) %}{{ i }},{% endfor %}")
    monkeypatch.setattr(chat, "MAX_INPUT_CHARS", 5)
    with pytest.raises(ValueError, match="messages must hold at most 5 characters, got 12"):
        render("x")
    monkeypatch.setattr(chat, "MAX_TEMPLATE_CHARS", 5)
    with pytest.raises(UserError, match="it must be at most 5 characters, got 6"):
        ChatTemplate("xxxxxx", {})


@pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "no role"}], [{"role": 3}]])
def test_bad_messages(messages):
    with pytest.raises(ValueError, match="chat template: messages must"):
        render("x", messages)


def test_malformed_template():
    with pytest.raises(UserError, match="it must be jinja2, got .* in line 1"):
        ChatTemplate("{% if %}", {})
