"""response_format: what comes out is JSON of the schema, whatever the model wanted to say."""

from __future__ import annotations

import json

import llguidance
import pytest

from ridgeline.engine.server.grammar_text import json_grammar

ASK = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 2, "maximum": 4},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["Sure! Here is", '{"name": "Tom", "kind": "cow", "legs": 9}', ""])
def test_a_schema_is_followed(client, engine, said, stream):
    engine.script = engine.tokenizer.encode(said)
    asked = client.chat.completions.create(**ASK, response_format=FORMAT, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in asked)
    else:
        assert asked.choices[0].finish_reason == "stop"
        text = asked.choices[0].message.content
    value = json.loads(text)
    assert set(value) == {"name", "kind", "legs"} and value["kind"] in ("cat", "dog")
    assert 2 <= value["legs"] <= 4 and len(value["name"]) <= 5


def test_a_json_object(client, engine):
    engine.script = engine.tokenizer.encode('{"a": [1, {"b": null}]} and more')
    kind = {"type": "json_object"}
    answer = client.chat.completions.create(**ASK, response_format=kind).choices[0]
    assert json.loads(answer.message.content) == {"a": [1, {"b": None}]}


def test_choices_have_a_grammar_each(client, engine):
    engine.script = engine.tokenizer.encode('{"a": 1}')
    kind = {"type": "json_object"}
    answer = client.chat.completions.create(**ASK, response_format=kind, n=3)
    assert [choice.message.content for choice in answer.choices] == ['{"a": 1}'] * 3


def test_completions_too(client, engine):
    engine.script = engine.tokenizer.encode("five")
    schema = {"type": "integer", "minimum": 5, "maximum": 5}
    kind = {"type": "json_schema", "json_schema": {"name": "five", "schema": schema}}
    answer = client.completions.create(
        model="echo", prompt="x", extra_body={"response_format": kind}
    )
    assert answer.choices[0].text == "5"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": FORMAT, "min_tokens": 5}, "min_tokens"),
    ],
)  # fmt: skip
def test_bad_formats(server, change, param):
    status, answer = server.json("/v1/chat/completions", {**ASK, **change})
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_plain_text_is_free(client, engine):
    engine.script = engine.tokenizer.encode("free")
    answer = client.chat.completions.create(**ASK, response_format={"type": "text"})
    assert answer.choices[0].message.content == "free"


def test_blanks_between_the_parts(tokenizer_folder):
    """As JSON is written, on one line or indented; no empty lines for a model to go on with."""
    tokenizer = llguidance.LLTokenizer((tokenizer_folder / "tokenizer.json").read_text())

    def taken(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, json_grammar({"type": "object"}), log_level=0)
        assert not matcher.is_error()
        return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()

    value = {"a": [1, 2, {"b": None}], "c": "x  y"}
    for options in ({}, {"separators": (",", ":")}, {"indent": 2}, {"indent": "\t"}):
        assert taken(json.dumps(value, **options)), options
    assert not taken('{\n\n"a": 1}') and not taken('{  "a": 1}')
