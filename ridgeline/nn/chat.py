"""Chat templates: jinja2 in a sandbox, with the names that Hugging Face's templates use.

A template comes with a checkpoint and is not trusted: it runs in an immutable sandbox without
attributes that start with an underscore, its loops over `range`, its strings (chat_limits.py) and
its output are bounded, and messages are data only. The names (raise_exception, strftime_now, tojson
without HTML escapes, loop controls, the `generation` tag) are those of transformers' chat
templating guide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.nodes import Node
from jinja2.parser import Parser

from ridgeline.core.errors import UserError, bad_value
from ridgeline.nn import chat_limits
from ridgeline.nn.chat_limits import BoundedEnvironment

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_OUTPUT_CHARS = 32 * 2**20
MAX_RANGE_TOTAL = 1_000_000
"""Iterations over `range` in one rendering."""

_TEMPLATE_ERRORS = (
    jinja2.exceptions.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What an expression of a template can raise."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text; plain text here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    chat_limits.check_chars(_json_chars(value, indent))
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _json_chars(value: Any, indent: int | None) -> int:
    """At least the characters of a value's JSON, so far as they grow with its size."""
    if indent is not None and not 0 <= indent <= 16:
        raise jinja2.exceptions.SecurityError("tojson indents by 0 to 16")
    return chat_limits.chars_of(value)


def _bounded_range() -> Any:
    left = MAX_RANGE_TOTAL

    def bounded(*bounds: int) -> range:
        nonlocal left
        values = range(*bounds)
        left -= len(values)
        if left < 0:
            raise jinja2.exceptions.SecurityError("the template loops too long")
        return values

    return bounded


class ChatTemplate:
    """A compiled chat template.

    Raises: UserError for a template that is too long or no jinja2.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise UserError(
                f"chat template: it must be at most {MAX_TEMPLATE_CHARS} characters, got "
                f"{len(source)}; use another tokenizer"
            )
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise UserError(
                f"chat template: it must be jinja2, got {error.message} in line {error.lineno}; "
                "restore tokenizer_config.json"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation.

        messages: [{"role": ..., "content": ...}, ...]; variables: what the template knows besides
        (enable_thinking, documents, ...).
        Raises: ValueError for messages without role, too much text, or what the template refuses.
        """
        _check_messages(messages)
        names = {
            **self._special_tokens,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "range": _bounded_range(),
        }
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(**names):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_OUTPUT_CHARS:
                    raise jinja2.exceptions.SecurityError("the prompt is too long")
        except _TEMPLATE_ERRORS as error:
            raise bad_value(
                "chat template",
                "messages",
                "be what the template takes",
                f"its error {str(error)!r}",
                "change roles, order or contents",
            ) from error
        return "".join(pieces)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise bad_value("chat template", "messages", "hold a message", "none", "give one")
    total = 0
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise bad_value(
                "chat template", "messages", "be objects with a role", repr(message)[:80], "add it"
            )
        total += len(str(message.get("content") or ""))
    if total > chat_limits.MAX_INPUT_CHARS:
        raise bad_value(
            "chat template",
            "messages",
            f"hold at most {chat_limits.MAX_INPUT_CHARS} characters",
            total,
            "shorten them",
        )
