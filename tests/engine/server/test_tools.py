"""Tool calls: parsed from text as it comes, asked for, enforced."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine.server.tools import ToolParser, assemble, tool_format

HERMES, MISTRAL = tool_format("tools <tool_call>"), tool_format("tools [TOOL_CALLS]")
LLAMA3, NONE = tool_format('tools "parameters"'), tool_format("{{ messages }}")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
ASK = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER]}
ARGUMENTS = '{"city": "Rome } \\"x\\"", "days": 2}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


def _parse(form, text: str, size: int):
    parser, pieces = ToolParser(form), []
    for start in range(0, len(text), size):
        pieces += parser.push(text[start : start + size])
    return assemble(pieces + parser.flush())


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, CALL, "", [("weather", ARGUMENTS)]),
        (HERMES, f"Let me see. {CALL}{CALL}", "Let me see.", None),
        (HERMES, "a < b <tool", "a < b <tool", []),
        (HERMES, "<tool_call>no</tool_call>!", "<tool_call>no</tool_call>!", []),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "",
         [("f", '{"a": 1}')]),
        (HERMES, '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>', "",
         [("f", "{}"), ("g", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
        (LLAMA3, '{"name": "f", "parameters": {"a": [1]}}', "", [("f", '{"a": [1]}')]),
        (LLAMA3, "Hello {you}", "Hello {you}", []),
        (LLAMA3, '{"not": "a call"}', '{"not": "a call"}', []),
    ],
)  # fmt: skip
def test_calls_are_found_however_the_text_is_cut(size, form, text, content, calls):
    got_content, got = _parse(form, text, size)
    assert got_content == content
    found = [(call["name"], call["arguments"]) for call in got]
    assert found == calls if calls is not None else len(found) == 2


@given(st.text(alphabet='<tol_ca>{}"name:[] ab\n', max_size=60), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_text_is_never_lost(text, size):
    whole = _parse(HERMES, text, 10_000)
    assert _parse(HERMES, text, size) == whole
    if not whole[1]:
        assert whole[0] == text


def _script(engine, text: str) -> None:
    engine.script = engine.tokenizer.encode(text)


def test_a_call(client, engine):
    _script(engine, f"One moment. {CALL}")
    choice = client.chat.completions.create(**ASK).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "One moment."
    call = choice.message.tool_calls[0]
    assert call.type == "function" and call.id.startswith("call-")
    assert json.loads(call.function.arguments) == {"city": 'Rome } "x"', "days": 2}


def test_a_streamed_call(client, engine):
    _script(engine, f"{CALL}\n{CALL}")
    chunks = list(client.chat.completions.create(**ASK, stream=True))
    calls: dict[int, dict] = {}
    for chunk in chunks:
        for piece in chunk.choices[0].delta.tool_calls or ():
            call = calls.setdefault(piece.index, {"id": piece.id, "name": "", "arguments": ""})
            call["name"] += piece.function.name or ""
            call["arguments"] += piece.function.arguments or ""
    assert [call["name"] for call in calls.values()] == ["weather", "weather"]
    assert all(json.loads(call["arguments"])["days"] == 2 for call in calls.values())
    assert len({call["id"] for call in calls.values()}) == 2
    pieces = [c for c in chunks if c.choices[0].delta.tool_calls]
    assert len(pieces) > 10  # arguments come as they are written
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_template_without_tools_is_told_about_them(client, engine):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function",
             "function": {"name": "weather", "arguments": '{"a": 1}'}},
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]  # fmt: skip
    client.chat.completions.create(model="echo", messages=messages, tools=[WEATHER])
    prompt = engine.tokenizer.decode(engine.seen[-1][0])
    assert prompt.startswith("<system>Be kind.\n\nYou can call these functions.")
    assert '"name": "weather"' in prompt and "<user><tool_response>sunny</tool_response>" in prompt
    assert '<tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>' in prompt
    client.chat.completions.create(**ASK, tool_choice="none")
    assert "weather" not in engine.tokenizer.decode(engine.seen[-1][0])


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_required_call_is_made_whatever_the_model_wants(client, engine, choice):
    _script(engine, "I would rather not.")
    answer = client.chat.completions.create(**ASK, tool_choice=choice).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    call = answer.message.tool_calls[0].function
    arguments = json.loads(call.arguments)
    assert call.name == "weather" and set(arguments) == {"city", "days"}
    assert isinstance(arguments["days"], int)


def test_a_strict_tool_has_its_schema_enforced_where_it_is_called(client, engine):
    wrong = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": "two"}}'
    _script(engine, f"Now: {wrong}")
    answer = client.chat.completions.create(**{**ASK, "tools": [STRICT]}).choices[0]
    assert answer.message.content == "Now:"
    arguments = json.loads(answer.message.tool_calls[0].function.arguments)
    assert arguments["city"] == "Rome" and isinstance(arguments["days"], int)
    _script(engine, "No call here, <tool or such.")
    answer = client.chat.completions.create(**{**ASK, "tools": [STRICT]}).choices[0]
    assert answer.message.content == "No call here, <tool or such."


def test_one_call_at_most(client, engine):
    client.chat.completions.create(**ASK, parallel_tool_calls=False)
    assert engine.seen[-1][1].stop == ("</tool_call>",)
    _script(engine, f"{CALL}{CALL}")
    answer = client.chat.completions.create(**ASK, parallel_tool_calls=False).choices[0]
    assert len(answer.message.tool_calls) == 1 and answer.finish_reason == "tool_calls"


def test_allowed_tools(client, engine):
    other = {"type": "function", "function": {"name": "other"}}
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}],
        },
    }  # fmt: skip
    client.chat.completions.create(**{**ASK, "tools": [WEATHER, other]}, tool_choice=choice)
    prompt = engine.tokenizer.decode(engine.seen[-1][0])
    assert '"other"' in prompt and '"weather"' not in prompt


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": "must"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice.function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{**WEATHER, "type": "custom"}]}, "tools[0].type"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)  # fmt: skip
def test_bad_tools(server, change, param):
    status, answer = server.json("/v1/chat/completions", {**ASK, **change})
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_forms_of_templates():
    assert NONE.name == "hermes" and not NONE.in_template
    assert (HERMES.in_template, MISTRAL.name, LLAMA3.name) == (True, "mistral", "llama3")
