"""/v1/completions, /v1/embeddings, /v1/models, /health and /metrics."""

from __future__ import annotations

import math
import re

import pytest

ASK = {"model": "echo", "prompt": "abcd"}


def test_prompts_and_choices(client, engine):
    answer = client.completions.create(model="echo", prompt=["ab", [65, 66, 67]], n=2, max_tokens=2)
    assert answer.object == "text_completion"
    echoed = [engine.tokenizer.decode(ids[:2]) for ids in ([*b"ab"], [65, 66])]
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[2].text == answer.choices[3].text == engine.tokenizer.decode([65, 66])
    assert answer.choices[0].text == "ab" and len(echoed) == 2
    assert {c.finish_reason for c in answer.choices} == {"length"}
    assert answer.usage.completion_tokens == 8


def test_a_stream_of_several_prompts(client):
    chunks = list(
        client.completions.create(
            model="echo", prompt=["one", "three"], stream=True, echo=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "oneone", 1: "threethree"}
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens == 8


def test_logprobs(client):
    answer = client.completions.create(model="echo", prompt="xy", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens[:2] == ["x", "y"] and logprobs.text_offset[:2] == [0, 1]
    assert logprobs.token_logprobs[0] == -0.5 and len(logprobs.top_logprobs[0]) == 2
    streamed = list(client.completions.create(model="echo", prompt="xy", logprobs=0, stream=True))
    offsets = [
        o for c in streamed if c.choices[0].logprobs for o in c.choices[0].logprobs.text_offset
    ]
    assert offsets == logprobs.text_offset


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": "a" * 5000}, "max_tokens"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
    ],
)
def test_bad_input(server, change, param):
    status, answer = server.json("/v1/completions", {**ASK, **change})
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_embeddings(client):
    answer = client.embeddings.create(model="echo", input=["a", "bc"])  # asks for base64
    assert [entry.index for entry in answer.data] == [0, 1]
    assert list(answer.data[1].embedding) == [1.0, 0.0, 0.0] and answer.usage.prompt_tokens == 3
    plain = client.embeddings.create(
        model="echo", input=[1, 2], encoding_format="float", extra_body={"pooling": "last"}
    )
    assert plain.data[0].embedding == [0.0, 1.0, 0.0]
    assert math.isclose(sum(x * x for x in plain.data[0].embedding), 1.0)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 2}, "dimensions"),
        ({"pooling": "max"}, "pooling"),
        ({"input": ["a"] * 65}, "input"),
    ],
)
def test_bad_embeddings(server, change, param):
    status, answer = server.json("/v1/embeddings", {"model": "echo", "input": "a", **change})
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_models(client, server):
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").owned_by == "ridgeline"
    for name in ("other", "../../etc/passwd", "%2e%2e/x"):
        assert server.json(f"/v1/models/{name}")[1]["error"]["code"] == "model_not_found"


def test_health_proves_progress(server, engine):
    status, health = server.json("/health")
    assert (status, health["status"], health["steps"]) == (200, "ready", 0)
    server.json("/v1/completions", ASK)
    later = server.json("/health")[1]
    assert later["steps"] > 0 and later["last_step_age_s"] < 5
    engine.dead = True
    status, health = server.json("/health")
    assert (status, health["status"], health["reason"]) == (503, "dead", "its thread ended")
    status, answer = server.json("/v1/completions", ASK)
    assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
    engine.dead = False


def test_metrics(server):
    server.json("/v1/completions", ASK)
    server.json("/nowhere")
    status, headers, data = server.ask("/metrics")
    text = data.decode()
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    number = r"[-+]?(\d+(\.\d+)?(e[-+]?\d+)?|nan|inf)"
    for line in lines:
        assert re.fullmatch(rf'ridgeline_\w+(\{{\w+="[^"]*"(,\w+="[^"]*")*\}})? {number}', line), (
            line
        )
    names = {re.split(r"[ {]", line)[0] for line in lines}
    typed = set(re.findall(r"^# TYPE (\w+) ", text, re.M))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} <= typed
    for name in (
        *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_count"),
        *("requests_waiting", "kv_usage_ratio", "prefix_cache_hits_tokens_total"),
        *("tokens_per_second", "bandwidth_ratio", "last_step_age_seconds"),
    ):
        assert f"ridgeline_{name}" in names, name
    assert 'ridgeline_http_answers_total{route="/v1/completions",status="200"} ' in text
    assert 'route="other",status="404"' in text
