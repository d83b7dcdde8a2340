"""Chat templates: the names they need, and that a hostile one gets nowhere."""

from __future__ import annotations

import re
import tracemalloc

import pytest

from ridgeline.core.errors import UserError
from ridgeline.nn import chat, chat_limits
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
    monkeypatch.setattr(chat_limits, "MAX_INPUT_CHARS", 5)
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


DOUBLING = "{% set n = namespace(s='x', i=1) %}{% for i in range(40) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.ljust(100000000) }}",
        "{{ 'a'.center(100000000) }}",
        "{{ 'a'.rjust(100000000) }}",
        "{{ 'a'.zfill(100000000) }}",
        "{{ '\\t'.expandtabs(100000000) }}",
        "{{ '{:100000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 100000000) }}",
        "{% set f = '{:100000000}'.format %}{{ f(1) }}",
        "{% set s = 'a' * 4000000 %}{{ '{0}{0}{0}{0}{0}{0}{0}{0}'.format(s) }}",
        "{% set s = 'a' * 4000000 %}{{ '%s%s%s%s%s%s' % (s, s, s, s, s, s) }}",
        "{{ 'a' | center(100000000) }}",
        "{{ '%0100000000d' | format(1) }}",
        "{{ 'a' | indent(100000000, true) }}",
        "{{ [1] | batch(100000000, 'x') | list }}",
        "{{ [1] | tojson(indent=100000000) }}",
        "{{ lipsum(100000) }}",
        DOUBLING + "{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s | length }}",
        DOUBLING + "{% set n.s = n.s + n.s %}{% endfor %}{{ n.s | length }}",
        DOUBLING + "{% set n.s = ''.join([n.s, n.s]) %}{% endfor %}{{ n.s | length }}",
        DOUBLING + "{% set n.s = [n.s, n.s] | join %}{% endfor %}{{ n.s | length }}",
        DOUBLING + "{% set n.s = n.s.replace('x', 'xx') %}{% endfor %}{{ n.s | length }}",
        DOUBLING + "{% set n.s = n.s | replace('x', 'xx') %}{% endfor %}{{ n.s | length }}",
        DOUBLING + "{% set t %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}{% endfor %}",
        DOUBLING + "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
        DOUBLING + "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}",
        DOUBLING + "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | string }}",
        DOUBLING + "{% set n.s = [n.s, n.s] %}{% endfor %}{{ '%s' % n.s }}",
        "{% set n = namespace(s=[1]) %}{% for i in range(40) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}",
        "{% set n = namespace(i=9) %}{% for i in range(40) %}{% set n.i = n.i * n.i %}{% endfor %}",
    ],
)
def test_nothing_grows_beyond_the_limits(source):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="chat template: messages must be what the template"):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < 130 * 2**20
    finally:
        tracemalloc.stop()


def test_what_templates_do_with_strings_still_works():
    assert render("{{ 'a' ~ 1 ~ none ~ ['b'] }}") == "a1None['b']"
    assert render("{{ ('a' ~ 'b') | upper ~ '!' }}") == "AB!"
    assert render("{{ ', '.join(['a', 'b']) }}{{ [1, 2] | join('-') }}") == "a, b1-2"
    assert render("{{ messages | join(',', attribute='role') }}") == "user"
    assert render("{{ '{}: {:>4}'.format('a', 7) }}{{ '%s!' | format('b') }}") == "a:    7b!"
    assert render("{{ 'a b'.replace(' ', '_') }}{{ 'ab' | replace('b', 'c') }}") == "a_bac"
    assert render("{{ 'a\nb' | indent(2) }}{{ [1, 2] | sum }}") == "a\n  b3"
    assert render("{% set t %}x{{ 1 }}{% endset %}{{ t }}{{ 3 * 'ab' }}") == "x1ababab"
    assert render("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') ~ m('b') }}") == "<a><b>"
