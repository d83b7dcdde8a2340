"""The messages and tools of a chat request, checked and in the form that chat templates take."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.engine.server.errors import ApiError, invalid, must

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_CALLS = 128
"""Tool calls in one message."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MESSAGE_KEYS = {
    "system": {"role", "content", "name"},
    "developer": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "tool_calls", "refusal"},
    "tool": {"role", "content", "tool_call_id"},
}


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    parameters: dict[str, Any]
    """A JSON schema of the arguments."""
    strict: bool

    def as_json(self) -> dict[str, Any]:
        """As templates show it to the model."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Checked messages; contents are plain text, tool arguments objects.

    Raises: ApiError that names the part.
    """
    if not isinstance(value, list):
        raise must("messages", "be a list", value, "invalid_type")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise must("messages", f"hold 1 .. {MAX_MESSAGES} messages", len(value))
    return [_read_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _read_message(at: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise must(at, "be an object", message, "invalid_type")
    role = message.get("role")
    if role not in _ROLES:
        raise must(f"{at}.role", f"be one of {', '.join(_ROLES)}", role)
    given = {key: value for key, value in message.items() if value is not None}
    for key in given:
        if key not in _MESSAGE_KEYS[role]:
            raise invalid(
                f"{at}.{key[:60]}", f"a {role} message has no {key[:60]!r}", "unknown_parameter"
            )
    read: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = given.get("tool_calls")
    if "content" not in given and not calls:
        raise ApiError(
            400, f"a {role} message must have content", param=f"{at}.content",
            code="missing_required_parameter",
        )  # fmt: skip
    read["content"] = _read_content(f"{at}.content", given.get("content", ""))
    for key in ("name", "tool_call_id"):
        if key in given:
            if not isinstance(given[key], str):
                raise must(f"{at}.{key}", "be a string", given[key], "invalid_type")
            read[key] = given[key]
    if "refusal" in given:
        raise invalid(f"{at}.refusal", "refusals are not supported", "unsupported_parameter")
    if calls is not None:
        read["tool_calls"] = _read_calls(f"{at}.tool_calls", calls)
    return read


def _read_content(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise must(at, "be a string or a list of text parts", content, "invalid_type")
    texts = []
    for i, part in enumerate(content):
        where = f"{at}[{i}]"
        if not isinstance(part, dict):
            raise must(where, "be an object", part, "invalid_type")
        if part.get("type") != "text":
            raise must(f"{where}.type", "be 'text': the model reads text only", part.get("type"))
        if not isinstance(part.get("text"), str):
            raise must(f"{where}.text", "be a string", part.get("text"), "invalid_type")
        if extra := sorted(set(part) - {"type", "text"}):
            raise invalid(
                f"{where}.{extra[0][:60]}", f"unknown key {extra[0][:60]!r}", "unknown_parameter"
            )
        texts.append(part["text"])
    return "".join(texts)


def _read_calls(at: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not 1 <= len(calls) <= MAX_CALLS:
        raise must(at, f"be a list of 1 .. {MAX_CALLS} calls", calls, "invalid_type")
    read = []
    for i, call in enumerate(calls):
        where = f"{at}[{i}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise must(where, "be a call of a function", call, "invalid_type")
        name, arguments = function.get("name"), function.get("arguments", "{}")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise must(f"{where}.function.name", "be a function's name", name)
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else None
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise must(f"{where}.function.arguments", "be a JSON object as a string", arguments)
        identity = call.get("id", "")
        if not isinstance(identity, str):
            raise must(f"{where}.id", "be a string", identity, "invalid_type")
        body = {"name": name, "arguments": parsed}
        read.append({"id": identity, "type": "function", "function": body})
    return read


def read_tools(value: Any) -> list[Tool]:
    """Checked functions. Raises: ApiError that names the part."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TOOLS:
        raise must("tools", f"be a list of 1 .. {MAX_TOOLS} tools", value, "invalid_type")
    tools = [_read_tool(f"tools[{i}]", tool) for i, tool in enumerate(value)]
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise must("tools", "have names that differ", name)
    return tools


def _read_tool(at: str, tool: Any) -> Tool:
    if not isinstance(tool, dict):
        raise must(at, "be an object", tool, "invalid_type")
    if tool.get("type") != "function":
        raise must(f"{at}.type", "be 'function'", tool.get("type"))
    function = tool.get("function")
    if not isinstance(function, dict):
        raise must(f"{at}.function", "be an object", function, "invalid_type")
    known = {"name", "description", "parameters", "strict"}
    if extra := sorted(set(function) - known):
        name = f"{at}.function.{extra[0][:60]}"
        raise invalid(name, f"unknown parameter: {name!r}", "unknown_parameter")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise must(f"{at}.function.name", "be 1 .. 64 of a-z, A-Z, 0-9, _ and -", name)
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise must(f"{at}.function.description", "be a string", description, "invalid_type")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise must(f"{at}.function.parameters", "be a JSON schema object", parameters)
    if parameters.get("type", "object") != "object":
        raise must(f"{at}.function.parameters.type", "be 'object'", parameters.get("type"))
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise must(f"{at}.function.strict", "be true or false", strict, "invalid_type")
    return Tool(name, description, parameters, bool(strict))


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which of the tools may and must be called."""

    mode: str
    """none, auto or required."""
    tools: tuple[Tool, ...]
    """Those that may be called."""


def read_tool_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """tool_choice in all of OpenAI's forms. Raises: ApiError that names the part."""
    if value is None:
        return ToolChoice("auto" if tools else "none", tuple(tools))
    if not tools:
        if value == "none":
            return ToolChoice("none", ())
        raise invalid("tool_choice", "'tool_choice' must come with 'tools'")
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise must("tool_choice", "be none, auto, required or an object", value)
        return ToolChoice(value, () if value == "none" else tuple(tools))
    if not isinstance(value, dict):
        raise must("tool_choice", "be a string or an object", value, "invalid_type")
    if value.get("type") == "function":
        chosen = _named("tool_choice", value, tools)
        return ToolChoice("required", (chosen,))
    if value.get("type") == "allowed_tools":
        allowed = value.get("allowed_tools")
        listed = allowed.get("tools") if isinstance(allowed, dict) else None
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            raise must(
                "tool_choice.allowed_tools", "have a mode (auto, required) and tools", allowed
            )
        chosen_tools = [
            _named(f"tool_choice.allowed_tools.tools[{i}]", each, tools)
            for i, each in enumerate(listed)
        ]
        return ToolChoice(mode, tuple(dict.fromkeys(chosen_tools)))
    raise must("tool_choice.type", "be 'function' or 'allowed_tools'", value.get("type"))


def _named(at: str, value: Any, tools: Sequence[Tool]) -> Tool:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    for tool in tools:
        if tool.name == name:
            return tool
    raise must(f"{at}.function.name", "be the name of one of the tools", name)
