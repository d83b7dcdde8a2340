"""Grammars as text for llguidance: JSON of any or a given schema, tool calls of a model family.

Sizes are bounded before anything is compiled; what a schema asks and the library cannot hold is an
error of the library's that reaches the client. No torch, no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ridgeline.engine.server.errors import invalid
from ridgeline.engine.server.messages import Tool

MAX_SCHEMA_CHARS = 64 * 1024
MAX_SCHEMA_DEPTH = 32
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "max_items_in_row": 2000,
    "verbose_errors": False,
}
"""Of compiling and of every step; about 20 ms of work at each step at the most."""
WHITESPACE = r"(\n[ \t]{0,32}| )?"
"""Between the parts of JSON: bounded, or a small model fills its answer with blanks."""


def json_grammar(schema: dict[str, Any]) -> str:
    """JSON of a schema."""
    return f"start: %json {json.dumps(_guided(schema))}\n"


def tool_value_schema(
    tools: Sequence[Tool], arguments_key: str, *, enforce: bool
) -> dict[str, Any]:
    """A call as JSON: {"name": ..., "arguments": ...} of one of the tools.

    enforce: hold every tool's arguments to its schema; else only those of strict ones, the others
    may be any object.
    """
    calls = []
    for tool in tools:
        arguments: dict[str, Any] = {"type": "object"}
        if tool.strict or enforce:
            arguments = tool.parameters
            if not tool.strict:
                arguments = {**arguments, "x-guidance": {"lenient": True}}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, arguments_key: arguments},
                "required": ["name", arguments_key],
                "additionalProperties": False,
            }
        )
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def check_schema(schema: Any, param: str) -> dict[str, Any]:
    """A client's schema, of bounded size. Raises: ApiError."""
    if not isinstance(schema, dict):
        raise invalid(param, f"{param!r} must be a JSON schema object", "invalid_type")
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
        raise invalid(param, f"{param!r} must be at most {MAX_SCHEMA_CHARS} characters")
    depth, level = 0, [schema]
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise invalid(param, f"{param!r} must nest at most {MAX_SCHEMA_DEPTH} deep")
        children = [list(v.values()) if isinstance(v, dict) else v for v in level]
        level = [c for each in children for c in each if isinstance(c, dict | list)]
    return {key: value for key, value in schema.items() if key != "x-guidance"}


def _guided(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
