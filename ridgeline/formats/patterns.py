"""Regular expressions that come with a checkpoint: bounded before they are run.

Python's matcher backtracks: `(a+)+$` takes time exponential in a layer's name. A pattern is refused
where it is long, repeats something that itself repeats or chooses, refers back to a group, or
repeats without bound in many places (each one multiplies the time by the name's length).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from ridgeline.core.errors import UserError

MAX_PATTERN_CHARS = 1024
MAX_PATTERNS = 10_000
MAX_REPEATS = 4
"""Repetitions without a small bound in one pattern."""
_SMALL_REPEAT = 8
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}


def refusal(pattern: str) -> str | None:
    """Why a pattern is not run; None: it is safe to match with a layer's name."""
    if len(pattern) > MAX_PATTERN_CHARS:
        return f"{len(pattern)} characters where {MAX_PATTERN_CHARS} are allowed"
    try:
        parsed = _parser.parse(pattern)
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"no regular expression ({error})"
    found: list[int] = []
    reason = _walk(parsed, False, found)
    if reason is None and len(found) > MAX_REPEATS:
        return f"{len(found)} repetitions where {MAX_REPEATS} are allowed"
    return reason


def check_patterns(rules: Any, where: str) -> None:
    """Refuse patterns, a table's keys with "+:" or "-:" before them, that are not safe to run.

    Raises: UserError naming the pattern.
    """
    if not isinstance(rules, Mapping):
        return  # of another form: refused where it is read
    if len(rules) > MAX_PATTERNS:
        raise UserError(
            f"checkpoint: {where} must hold at most {MAX_PATTERNS} patterns, got {len(rules)}; "
            "quantize with fewer exceptions"
        )
    for key in rules:
        pattern = str(key).removeprefix("-:").removeprefix("+:")
        if reason := refusal(pattern):
            raise UserError(
                f"checkpoint: {where}[{str(key)[:80]!r}]: the pattern must be a simple regular "
                f"expression, got {reason}; quantize without such an exception"
            )


def _walk(parsed: Any, inside: bool, found: list[int]) -> str | None:
    """Look through a parsed pattern; inside: something around it repeats without a small bound."""
    for code, argument in parsed:
        name, children, repeats = str(code), [], inside
        if name in _REPEATS:
            _, most, child = argument
            if int(most) > 1:
                if inside:
                    return "a repetition inside a repetition"
                repeats = True
                if int(most) > _SMALL_REPEAT:
                    found.append(int(most))
            children = [child]
        elif name == "BRANCH":
            if inside:
                return "a choice inside a repetition"
            children = argument[1]
        elif name == "SUBPATTERN":
            children = [argument[-1]]
        elif name in ("ASSERT", "ASSERT_NOT"):
            children = [argument[1]]
        elif name == "ATOMIC_GROUP":
            children = [argument]
        elif name in ("GROUPREF", "GROUPREF_EXISTS"):
            return "a reference to a group"
        for child in children:
            if reason := _walk(child, repeats, found):
                return reason
    return None
