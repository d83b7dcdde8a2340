"""Tool calls as model families write them, from text to OpenAI's tool_calls.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>  (Qwen2.5, Qwen3, SmolLM2: a
              list of calls between the marks is taken too)
    mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    llama3    {"name": ..., "parameters": {...}} as the whole answer

A model whose template names no tools is told about them in a system message, in the hermes form.
The parser takes text as it comes: what is before a call is content, a call's name and the pieces of
its arguments are given out while they are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ridgeline.engine.server.grammar_text import json_grammar, tool_value_schema
from ridgeline.engine.server.messages import Tool

FormatName = Literal["hermes", "mistral", "llama3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family writes calls."""

    name: FormatName
    opening: str
    """What starts a call; "" where the whole answer is one."""
    closing: str
    arguments_key: str
    in_template: bool
    """Whether the chat template shows tools to the model."""


_FORMATS = {
    "hermes": ("<tool_call>", "</tool_call>", "arguments"),
    "mistral": ("[TOOL_CALLS]", "", "arguments"),
    "llama3": ("", "", "parameters"),
}


def tool_format(template: str | None) -> ToolFormat:
    """The form that a chat template speaks of."""
    text = template or ""
    name: FormatName = "hermes"
    if "[TOOL_CALLS]" in text:
        name = "mistral"
    elif "<tool_call>" not in text and '"parameters"' in text and "tools" in text:
        name = "llama3"
    opening, closing, key = _FORMATS[name]
    return ToolFormat(
        name=name, opening=opening, closing=closing, arguments_key=key,
        in_template="tools" in text,
    )  # fmt: skip


def tools_message(tools: Sequence[Tool]) -> str:
    """What a model is told whose template does not show tools."""
    listed = "\n".join(json.dumps(tool.as_json()["function"]) for tool in tools)
    return (
        "You can call these functions. Each line is one, as JSON:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and arguments as JSON between marks, and nothing else:\n"
        '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
    )


def required_grammar(form: ToolFormat, tools: Sequence[Tool], *, opening_is_special: bool) -> str:
    """An answer that is one call, of one of the tools."""
    schema = tool_value_schema(tools, form.arguments_key, enforce=True)
    if form.name == "llama3":
        return json_grammar(schema)
    opening = form.opening if opening_is_special else json.dumps(form.opening)
    if form.name == "mistral":
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
    closing = f" {json.dumps(form.closing)}" if form.closing else ""
    return json_grammar(schema).replace("start: ", f"start: {opening} ").rstrip() + closing + "\n"


def triggered_grammar(form: ToolFormat, tools: Sequence[Tool]) -> str:
    """What may stand after the opening mark, where the model chooses to write one."""
    schema = tool_value_schema(tools, form.arguments_key, enforce=False)
    text = json_grammar(schema).replace("start: ", "start: /\\n?/ ").rstrip()
    return f"{text} /\\n?/ {json.dumps(form.closing)}\n"


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of the call number `index`: its name (the first piece) or more of its arguments."""

    index: int
    name: str | None
    arguments: str


Piece = str | CallPiece


class ToolParser:
    """Splits one choice's text into content and calls, as it comes."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._held = ""
        self._body: _CallBody | None = None
        self._started = False
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        """Content and pieces of calls that are certain now."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """The rest at the end of the text; a call that is no call is content."""
        pieces = self.push("")
        if self._body is not None:
            pieces += self._close("")
        elif self._held:
            pieces.append(self._held)
        self._held = ""
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """Handle what is held; whether there may be more to do."""
        if self._body is not None:
            return self._inside(self._body, pieces)
        opening = self._form.opening
        if not opening:
            return self._whole_answer(pieces)
        at = self._held.find(opening)
        if at >= 0:
            before = self._held[:at]
            if before and (before.strip() or not self.num_calls):
                pieces.append(before.rstrip() if before.strip() else "")
            self._held = self._held[at + len(opening) :]
            self._body = _CallBody(self._form, self.num_calls)
            return True
        keep = _overlap(self._held, opening)
        certain = self._held[: len(self._held) - keep]
        # Blanks before a call are not content; they wait until it is known what follows.
        kept_blanks = len(certain) - len(certain.rstrip())
        keep += kept_blanks
        certain = certain.rstrip()
        if certain:
            pieces.append(certain)
            self._held = self._held[len(self._held) - keep :]
        return False

    def _whole_answer(self, pieces: list[Piece]) -> bool:
        """llama3: an answer that starts with a brace is a call."""
        text = self._held.lstrip()
        if not self._started and not text:
            return False
        if not self._started and text.startswith(("{", "<|python_tag|>")):
            self._held = text.removeprefix("<|python_tag|>")
            self._body = _CallBody(self._form, self.num_calls)
            return True
        self._started = True
        if self._held:
            pieces.append(self._held)
            self._held = ""
        return False

    def _inside(self, body: _CallBody, pieces: list[Piece]) -> bool:
        closing = self._form.closing
        at = self._held.find(closing) if closing else -1
        if at < 0:
            keep = _overlap(self._held, closing) if closing else 0
            taken = self._held[: len(self._held) - keep]
            self._held = self._held[len(taken) :]
            pieces += body.push(taken)
            return False
        pieces += body.push(self._held[:at])
        rest = self._held[at + len(closing) :]
        pieces += self._close(closing)
        self._held = rest
        return True

    def _close(self, closing: str) -> list[Piece]:
        body, self._body = self._body, None
        assert body is not None
        pieces = body.push(self._held) if not closing else []
        pieces += body.finish()
        self.num_calls += body.num_calls
        if not body.num_calls:
            return [f"{self._form.opening}{body.text}{closing}"]
        return pieces


class _CallBody:
    """The JSON of a call, or of a list of calls, as it is written."""

    def __init__(self, form: ToolFormat, first_index: int) -> None:
        self.text = ""
        self.num_calls = 0
        self._first = first_index
        self._key = form.arguments_key
        self._head = re.compile(
            r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
        )
        self._scan: _ValueEnd | None = None
        self._streamed = False

    def push(self, text: str) -> list[Piece]:
        """What is certain of the first call: where it has the usual order, its arguments stream."""
        self.text += text
        if self._streamed:
            return []
        if self._scan is None:
            head = self._head.match(self.text)
            if head is None:
                return []
            self._scan = _ValueEnd(head.end())
            self.num_calls = 1
            name = json.loads(head.group(1))
            return [CallPiece(self._first, name, ""), *self._arguments()]
        return self._arguments()

    def _arguments(self) -> list[Piece]:
        assert self._scan is not None
        start = self._scan.at
        done = self._scan.advance(self.text)
        piece = self.text[start : self._scan.at]
        self._streamed = done
        return [CallPiece(self._first, None, piece)] if piece else []

    def finish(self) -> list[Piece]:
        """Calls that were not streamed: another order of keys, a list."""
        if self.num_calls:
            return []
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            return []
        calls = value if isinstance(value, list) else [value]
        pieces: list[Piece] = []
        for call in calls:
            name = call.get("name") if isinstance(call, dict) else None
            if not isinstance(name, str):
                return []
            arguments = call.get(self._key, call.get("arguments", call.get("parameters", {})))
            text = json.dumps(arguments, ensure_ascii=False)
            pieces.append(CallPiece(self._first + len(pieces), name, text))
        self.num_calls = len(pieces)
        return pieces


class _ValueEnd:
    """Finds the end of a JSON object, character by character, across pieces."""

    def __init__(self, at: int) -> None:
        self.at = at
        self._depth = 0
        self._in_string = self._escaped = False

    def advance(self, text: str) -> bool:
        """Move `at` over what belongs to the object; True once it is closed."""
        while self.at < len(text):
            char = text[self.at]
            self.at += 1
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return True
        return False


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the start of a mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def assemble(pieces: Sequence[Piece]) -> tuple[str, list[dict[str, Any]]]:
    """Content and tool_calls of a whole answer; ids are given by the caller."""
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, str):
            content.append(piece)
            continue
        call = calls.setdefault(piece.index, {"name": "", "arguments": ""})
        call["name"] += piece.name or ""
        call["arguments"] += piece.arguments
    return "".join(content), [calls[index] for index in sorted(calls)]
