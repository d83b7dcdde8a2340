"""/v1/chat/completions: a conversation's next message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.engine.params import MaskFactory, SamplingParams
from ridgeline.engine.server import params as parameters
from ridgeline.engine.server.errors import ApiError, invalid, must
from ridgeline.engine.server.generation import Plan, log_label, salt_of
from ridgeline.engine.server.grammar_text import check_schema, json_grammar
from ridgeline.engine.server.messages import (
    Tool,
    ToolChoice,
    read_messages,
    read_tool_choice,
    read_tools,
)
from ridgeline.engine.server.prompts import encode, render_chat
from ridgeline.engine.server.state import ServerState
from ridgeline.engine.server.tools import required_grammar, triggered_grammar

ROUTE = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked body."""

    model: str
    messages: list[dict[str, Any]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    tools: ToolChoice
    schema: dict[str, Any] | None
    """Of response_format; None: plain text."""
    variables: dict[str, Any]
    """For the chat template."""
    metadata: dict[str, str] | None
    cache_key: str
    label: str
    deadline_s: float
    names: dict[str, str]


def read_chat(state: ServerState, body: Any) -> ChatRequest:
    """Check a body. Raises: ApiError that names what is wrong."""
    given = parameters.read_object(parameters.CHAT, body)
    model = read_model(state, given)
    messages = read_messages(parameters.require(given, "messages"))
    stream = parameters.read_flag(given, "stream")
    tools = read_tools(given["tools"]) if "tools" in given else []
    choice = read_tool_choice(given.get("tool_choice"), tools)
    schema = read_format(given)
    if schema is not None and choice.mode != "none":
        raise invalid("response_format", "'response_format' cannot be combined with tools")
    if schema is not None or choice.mode == "required":
        parameters.check_grammar_mix(given, "a grammar")
    return ChatRequest(
        model=model,
        messages=messages,
        params=_read_params(state, given, choice),
        stream=stream,
        include_usage=parameters.read_include_usage(given, stream),
        tools=choice,
        schema=schema,
        variables=_read_variables(given),
        metadata=_read_metadata(given),
        cache_key=parameters.read_label(given, "prompt_cache_key"),
        label=log_label(
            user=parameters.read_label(given, "user"),
            safety_identifier=parameters.read_label(given, "safety_identifier"),
        ),
        deadline_s=parameters.read_deadline(given, state.config.deadline_s),
        names={"prompt": "messages", "prompt_ids": "messages"} | parameters.sampling_names(given),
    )


def read_model(state: ServerState, given: dict[str, Any]) -> str:
    """The model's name; it is a label. Raises: ApiError 404 for another."""
    name = parameters.require(given, "model")
    if not isinstance(name, str):
        raise must("model", "be a string", name, "invalid_type")
    if name != state.config.model_name:
        raise ApiError(
            404, f"the model {name[:100]!r} does not exist; this server has "
            f"{state.config.model_name!r}", param="model", code="model_not_found",
        )  # fmt: skip
    return name


def read_format(given: dict[str, Any]) -> dict[str, Any] | None:
    """response_format as a schema; None for text. Raises: ApiError."""
    value = given.get("response_format")
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    allowed = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    if kind not in ("text", "json_object", "json_schema"):
        raise must("response_format.type", "be text, json_object or json_schema", kind)
    if extra := sorted(set(value) - allowed):
        name = f"response_format.{extra[0][:60]}"
        raise invalid(name, f"unknown parameter: {name!r}", "unknown_parameter")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise must("response_format.json_schema", "be an object with a name and a schema", inner)
    if extra := sorted(set(inner) - {"name", "schema", "strict", "description"}):
        name = f"response_format.json_schema.{extra[0][:60]}"
        raise invalid(name, f"unknown parameter: {name!r}", "unknown_parameter")
    if not isinstance(inner.get("strict"), bool | None):
        raise must("response_format.json_schema.strict", "be true or false", inner["strict"])
    return check_schema(inner.get("schema"), "response_format.json_schema.schema")


def _read_params(state: ServerState, given: dict[str, Any], choice: ToolChoice) -> SamplingParams:
    both = "max_tokens" in given and "max_completion_tokens" in given
    if both and given["max_tokens"] != given["max_completion_tokens"]:
        raise invalid(
            "max_tokens", "'max_tokens' must equal 'max_completion_tokens', or be left out"
        )
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    wanted = parameters.read_flag(given, "logprobs")
    top = given.get("top_logprobs")
    if top is not None and not wanted:
        raise invalid("top_logprobs", "'top_logprobs' must come with 'logprobs': true")
    more: dict[str, Any] = {"max_tokens": most, "logprobs": (top or 0) if wanted else None}
    if wanted and top is not None:
        more["logprobs"] = top
    form = state.tools
    one_call = not parameters.read_flag(given, "parallel_tool_calls", True)
    if choice.mode == "auto" and one_call and form.closing:
        stop = given.get("stop", ())
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list | tuple) or len(stops) >= 4:
            raise must("stop", "hold at most 3 strings with parallel_tool_calls false", stop)
        # The mark that closes a call ends the answer; the parser takes a call without it.
        given = {**given, "stop": [*stops, form.closing]}
    if choice.mode != "none" and form.name == "mistral":
        more["skip_special_tokens"] = False  # its mark is one
    return parameters.read_sampling(given, more)


def _read_variables(given: dict[str, Any]) -> dict[str, Any]:
    value = given.get("chat_template_kwargs", {})
    if not isinstance(value, dict):
        raise must("chat_template_kwargs", "be an object", value, "invalid_type")
    for name in value:
        if name != "enable_thinking":
            param = f"chat_template_kwargs.{name[:60]}"
            raise invalid(param, f"unknown parameter: {param!r}", "unknown_parameter")
    if "enable_thinking" in value and not isinstance(value["enable_thinking"], bool):
        raise must("chat_template_kwargs.enable_thinking", "be true or false", value)
    return value


def _read_metadata(given: dict[str, Any]) -> dict[str, str] | None:
    value = given.get("metadata")
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > 16:
        raise must("metadata", "be an object of at most 16 pairs", value)
    for name, text in value.items():
        if not isinstance(text, str) or len(name) > 64 or len(text) > 512:
            raise must(
                "metadata",
                "have keys of at most 64 and strings of at most 512 characters",
                name[:64],
            )
    return value


async def plan_chat(state: ServerState, request: ChatRequest, request_id: str, key: str) -> Plan:
    """Prompt, grammar and the rest of what the engine needs. Raises: ApiError."""
    shown: Sequence[Tool] = request.tools.tools if request.tools.mode != "none" else ()
    text = await render_chat(state, request.messages, shown, request.variables)
    prompt = await encode(state, text, "messages", add_special_tokens=False)
    mask, param = await _mask(state, request)
    return Plan(
        request_id=request_id,
        route=ROUTE,
        prompts=[prompt],
        params=request.params,
        names=request.names,
        salt=salt_of(key, request.cache_key),
        deadline_s=request.deadline_s,
        mask=mask,
        grammar_param=param,
        label=request.label,
    )


async def _mask(state: ServerState, request: ChatRequest) -> tuple[MaskFactory | None, str | None]:
    choice = request.tools
    strict = any(tool.strict for tool in choice.tools)
    free = choice.mode == "none" or (choice.mode == "auto" and not strict)
    if request.schema is None and free:
        return None, None
    param = "response_format" if request.schema is not None else "tools"
    if state.grammars is None:
        raise invalid(param, f"{param!r}: this model's tokenizer has no grammar support")
    if request.schema is not None:
        grammar = json_grammar(request.schema)
        return await state.grammars.compile(grammar, param), param
    for i, tool in enumerate(choice.tools):
        check_schema(tool.parameters, f"tools[{i}].function.parameters")
    form = state.tools
    if choice.mode == "required":
        opening = state.engine.tokenizer.token_id(form.opening) if form.opening else None
        await state.grammars.load(param)
        special = opening is not None and state.grammars.is_special(opening)
        grammar = required_grammar(form, choice.tools, opening_is_special=special)
        return await state.grammars.compile(grammar, param), param
    if not form.closing:
        raise invalid(
            "tools", "'strict' tools need 'tool_choice': 'required' with this model's form of calls"
        )
    grammar = triggered_grammar(form, choice.tools)
    return await state.grammars.compile(grammar, param, marker=form.opening), param
