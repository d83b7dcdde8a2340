"""Whatever is sent, the answer is a 2xx or a 4xx in OpenAI's form, and the server goes on."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.engine.server import params

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=8) | st.sampled_from(["type", "role"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
schemas = st.recursive(
    st.sampled_from(
        [{"type": "integer"}, {"type": "boolean"}, {"enum": ["a", 1]}, {"const": None}, {}, True]
    ),
    lambda inner: (
        st.builds(lambda s: {"type": "array", "items": s, "maxItems": 2}, inner)
        | st.builds(
            lambda d: {"type": "object", "properties": d, "required": list(d)[:1]},
            st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
        )
        | st.builds(lambda a: {"anyOf": a}, st.lists(inner, min_size=1, max_size=2))
    ),
    max_leaves=4,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | values},
        optional={"content": st.text(max_size=30) | values, "name": values, "tool_calls": values},
    ),
    max_size=4,
)
tools = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["f", "g", "h"])},
                optional={
                    "parameters": st.just({"type": "object"}) | schemas | values,
                    "strict": st.booleans(),
                    "description": values,
                },
            ),
        }
    ),
    max_size=2,
)
formats = st.sampled_from([{"type": "json_object"}, {"type": "text"}]) | st.builds(
    lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    schemas | values,
)
GOOD = {
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "max_tokens": st.integers(1, 6),
    "max_completion_tokens": st.integers(1, 6),
    "logprobs": st.booleans() | st.integers(0, 3),
    "top_logprobs": st.integers(0, 3),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5),
    "stream": st.booleans(),
    "response_format": formats,
    "tools": tools,
    "tool_choice": st.sampled_from(["none", "auto", "required"]),
    "parallel_tool_calls": st.booleans(),
    "messages": messages,
    "prompt": st.text(max_size=20) | st.lists(st.integers(0, 200), max_size=5),
    "input": st.text(max_size=20) | st.lists(st.text(max_size=5), max_size=3),
    "seed": st.integers(0, 2**40),
    "logit_bias": st.dictionaries(st.integers(0, 200).map(str), st.integers(-100, 100), max_size=3),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
}


@st.composite
def requests(draw):
    """(path, body): most parts are good, some are anything."""
    path, table, needed = draw(
        st.sampled_from(
            [
                ("/v1/chat/completions", params.CHAT, "messages"),
                ("/v1/completions", params.COMPLETION, "prompt"),
                ("/v1/embeddings", params.EMBEDDING, "input"),
            ]
        )
    )
    names = draw(st.lists(st.sampled_from([p.name for p in table]), max_size=4, unique=True))
    body = {"model": "echo"}
    if needed == "messages":
        body["messages"] = [{"role": "user", "content": "hi"}]
    else:
        body[needed] = "hi"
    for name in names:
        good = GOOD.get(name, values)
        body[name] = draw(good if draw(st.integers(0, 3)) else values)
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.text(max_size=10))] = draw(values)
    return path, body


@given(requests())
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_only_2xx_and_4xx(server, asked):
    path, body = asked
    status, _, data = server.ask(path, json.dumps(body).encode("utf-8", "surrogatepass"))
    assert 200 <= status < 300 or 400 <= status < 500, (status, data[:500], body)
    if status >= 400:
        error = json.loads(data)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
    elif isinstance(body.get("stream"), bool) and body["stream"] and path != "/v1/embeddings":
        assert data.endswith(b"data: [DONE]\n\n")
        for event in data.decode().split("\n\n")[:-2]:
            json.loads(event.removeprefix("data: "))
    assert server.json("/health")[0] == 200


@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,0123 echonul', max_size=60))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_bytes_that_are_no_request(server, data):
    data = data if isinstance(data, bytes) else data.encode()
    for path in ("/v1/chat/completions", "/admin/reload"):
        status, answer = server.json(path, data)
        assert 400 <= status < 500 and answer["error"]["message"]
