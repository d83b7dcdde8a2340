"""/v1/chat/completions through the official client."""

from __future__ import annotations

import json

import openai
import pytest

from ridgeline.nn.tokenizer import Tokenizer

ASK = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}


def _script(engine, text: str) -> None:
    engine.script = engine.tokenizer.encode(text)


def test_an_answer(client, engine):
    _script(engine, "Hello, wörld")
    answer = client.chat.completions.create(**ASK)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content == "Hello, wörld"
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    prompt, params, salt, deadline = engine.seen[0]
    assert engine.tokenizer.decode(prompt) == "<user>hi\n<assistant>"
    assert (params.temperature, params.n, salt) == (1.0, 1, "")
    assert 0 < deadline < 600  # what the plan left of it
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(engine.script) + 1


def test_a_stream_is_the_answer_in_pieces(client, engine):
    _script(engine, "Grüße 👋 an alle")
    stream = client.chat.completions.create(
        **ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "Grüße 👋 an alle"
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens > 0
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1
    assert {c.object for c in chunks} == {"chat.completion.chunk"}


def test_the_bytes_of_a_stream(server, engine):
    _script(engine, "ab")
    status, headers, data = server.ask("/v1/chat/completions", {**ASK, "stream": True})
    assert status == 200 and headers["content-type"] == "text/event-stream; charset=utf-8"
    events = data.decode("utf-8").split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") and "\n" not in event for event in events[:-1])
    first = json.loads(events[0].removeprefix("data: "))
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert "usage" not in first


def test_choices_and_logprobs(client, engine):
    _script(engine, "ü")
    answer = client.chat.completions.create(**ASK, n=3, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    content = answer.choices[1].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content[:-1]) == "ü".encode()
    assert content[0].logprob == -0.5 and len(content[0].top_logprobs) == 2
    chunks = list(client.chat.completions.create(**ASK, n=2, logprobs=True, stream=True))
    streamed = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs is not None]
    assert sum(len(each.content) for each in streamed) == 2 * len(content)
    assert {c.choices[0].index for c in chunks} == {0, 1}


def test_every_sampling_parameter_arrives(client, engine):
    client.chat.completions.create(
        **ASK, temperature=0.5, top_p=0.9, seed=7, presence_penalty=0.1, frequency_penalty=-0.2,
        stop=["END", "X"], logit_bias={"5": -3}, max_completion_tokens=4, n=2, user="ann",
        prompt_cache_key="tenant", safety_identifier="s", metadata={"a": "b"}, store=False,
        service_tier="auto", modalities=["text"],
        extra_body={
            "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1,
            "ignore_eos": True, "stop_token_ids": [9], "deadline_s": 3,
        },
    )  # fmt: skip
    _, params, salt, deadline = engine.seen[0]
    assert (params.temperature, params.top_p, params.seed) == (0.5, 0.9, 7)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, -0.2)
    assert params.stop == ("END", "X") and dict(params.logit_bias) == {5: -3}
    assert (params.max_tokens, params.n, params.top_k, params.min_p) == (4, 2, 5, 0.1)
    assert (params.repetition_penalty, params.min_tokens, params.ignore_eos) == (1.1, 1, True)
    assert params.stop_token_ids == (9,) and 0 < deadline < 3 and len(salt) == 64


def test_metadata_comes_back(client):
    assert client.chat.completions.create(**ASK, metadata={"a": "b"}).metadata == {"a": "b"}


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": 1e9}, "temperature", "invalid_value"),
        ({"n": 9}, "n", "invalid_value"),
        ({"n": True}, "n", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
        ({"stop": ["a"] * 5}, "stop", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
        ({"seed": -1}, "seed", "invalid_value"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"functions": []}, "functions", "unsupported_parameter"),
        ({"store": True}, "store", "invalid_value"),
        ({"modalities": ["audio"]}, "modalities", "invalid_value"),
        ({"stream_options": {}}, "stream_options", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": None}, "messages", "missing_required_parameter"),
        ({"model": None}, "model", "missing_required_parameter"),
        ({"model": 3}, "model", "invalid_type"),
        ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "unknown_parameter"),
        ({"deadline_s": 0}, "deadline_s", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_value"),
    ],
)  # fmt: skip
def test_what_does_not_work_is_a_400_that_names_it(server, change, param, code):
    status, answer = server.json("/v1/chat/completions", {**ASK, **change})
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, param, code), answer
    assert error["type"] == "invalid_request_error" and error["message"]


def test_images_are_refused_by_name(server):
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
    body = {**ASK, "messages": [{"role": "user", "content": [part]}]}
    status, answer = server.json("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].type")


def test_text_parts_are_joined(client, engine):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    client.chat.completions.create(model="echo", messages=[{"role": "user", "content": parts}])
    assert engine.tokenizer.decode(engine.seen[0][0]) == "<user>ab\n<assistant>"


def test_another_model_is_404(client):
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(**{**ASK, "model": "../etc/passwd"})
    assert raised.value.code == "model_not_found"


def test_a_stream_ends_with_the_error(client, engine):
    engine.fail_at = 2
    stream = client.chat.completions.create(**ASK, stream=True)
    with pytest.raises(openai.APIError, match="a kernel failed"):
        list(stream)
    engine.fail_at = None
    assert client.chat.completions.create(**ASK).choices[0].message.content


def test_a_failed_request_fails_alone(server, engine):
    engine.fail_at = 2
    status, answer = server.json("/v1/chat/completions", ASK)
    assert (status, answer["error"]["type"]) == (500, "server_error")
    engine.fail_at = None
    assert server.json("/v1/chat/completions", ASK)[0] == 200
    assert engine.running == {}


def test_a_deadline_ends_a_request(server, engine):
    engine.tokens_per_s = 50
    status, answer = server.json("/v1/chat/completions", {**ASK, "deadline_s": 0.1})
    assert (status, answer["error"]["code"]) == (408, "deadline_exceeded")
    assert engine.running == {}


def test_a_prompt_beyond_the_context(server):
    body = {**ASK, "messages": [{"role": "user", "content": "x" * 5000}]}
    status, answer = server.json("/v1/chat/completions", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    long = {**ASK, "messages": [{"role": "user", "content": "x" * 600_000}]}
    status, answer = server.json("/v1/chat/completions", long)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_tokens_as_logprobs_show_them(tokenizer_folder):
    tokenizer = Tokenizer(tokenizer_folder)
    ids = tokenizer.encode("é")
    assert len(ids) == 2 and tokenizer.token(ids[0]) is not None
