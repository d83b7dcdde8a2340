"""From messages or texts to token ids, off the event loop and within bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from ridgeline.engine.server.errors import ApiError, invalid, must
from ridgeline.engine.server.jobs import JobTimeoutError
from ridgeline.engine.server.messages import Tool
from ridgeline.engine.server.state import ServerState
from ridgeline.engine.server.tools import tools_message

LONGEST_TOKEN_CHARS = 128
"""A text of more characters than the context has tokens, times this, cannot fit: it is refused
before it is tokenized. Longer tokens are runs of blanks."""


async def render_chat(
    state: ServerState,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Tool],
    variables: dict[str, Any],
) -> str:
    """The prompt of a conversation. Raises: ApiError where the template refuses or takes long."""
    template = state.engine.tokenizer.chat_template
    if template is None:
        raise ApiError(
            400, "this model has no chat template; use /v1/completions", param="messages",
            code="no_chat_template",
        )  # fmt: skip
    shown: list[dict[str, Any]] | None = [tool.as_json() for tool in tools] or None
    if tools and not state.tools.in_template:
        messages, shown = with_tools_message(messages, tools), None
    try:
        answer = await state.render_worker.run(
            "render", state.config.template_timeout_s, template=template.source,
            special_tokens=state.engine.tokenizer.special_tokens, messages=list(messages),
            tools=shown, variables=variables,
        )  # fmt: skip
    except JobTimeoutError as error:
        seconds = state.config.template_timeout_s
        raise invalid("messages", f"the chat template must render within {seconds:g} s") from error
    if "error" in answer:
        raise invalid("messages", f"the chat template refused: {answer['error']}")
    return answer["text"]


def with_tools_message(
    messages: Sequence[dict[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: told in the system message, calls and results
    as text."""
    system = tools_message(tools)
    plain = []
    for message in messages:
        text = message["content"]
        for call in message.get("tool_calls", ()):
            function = call["function"]
            text += f"<tool_call>{as_call(function['name'], function['arguments'])}</tool_call>"
        role = "user" if message["role"] == "tool" else message["role"]
        if message["role"] == "tool":
            text = f"<tool_response>{text}</tool_response>"
        plain.append({"role": role, "content": text})
    if plain[0]["role"] == "system":
        plain[0]["content"] += f"\n\n{system}"
        return plain
    return [{"role": "system", "content": system}, *plain]


def as_call(name: str, arguments: dict[str, Any]) -> str:
    """A call as the model is asked to write it."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


async def encode(
    state: ServerState, text: str, param: str, *, add_special_tokens: bool
) -> list[int]:
    """Token ids of a text, on a thread. Raises: ApiError for a text that cannot fit."""
    longest = state.engine.info.max_model_len * LONGEST_TOKEN_CHARS
    if len(text) > longest:
        raise invalid(
            param,
            f"{param!r} must fit in the context of {state.engine.info.max_model_len} tokens, got "
            f"{len(text)} characters",
            "context_length_exceeded",
        )
    async with state.encoding:
        return await asyncio.to_thread(
            state.engine.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )


def read_prompts(value: Any, param: str, most: int) -> list[str | list[int]]:
    """A text, texts, token ids or lists of token ids, as a list of prompts. Raises: ApiError."""
    if isinstance(value, str):
        return [value]
    rule = "be a text, a list of texts, token ids, or lists of token ids"
    if not isinstance(value, list):
        raise must(param, rule, value, "invalid_type")
    if not value:
        raise must(param, "hold something", value)
    if all(_is_id(each) for each in value):
        return [value]
    if len(value) > most:
        raise must(param, f"hold at most {most} prompts", f"{len(value)} prompts")
    for i, each in enumerate(value):
        ids = isinstance(each, list) and each and all(_is_id(token) for token in each)
        if not (isinstance(each, str) or ids):
            raise must(f"{param}[{i}]", "be a text or token ids", each, "invalid_type")
    return value


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
