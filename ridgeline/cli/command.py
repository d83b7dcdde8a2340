"""What a command module gives to the command line: one `COMMAND`.

A command is a frozen config dataclass (its flags) and a function of the command's name that takes
it and returns a plain dict; `show` turns that dict into what a person reads. With `--json` the same
dict is printed as one JSON line instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How a command speaks; the same two flags on every command."""

    json: bool = False
    """JSON lines on stdout and nothing else there: progress events, then one `result` line."""
    debug: bool = False
    """Print the traceback of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command as the command line sees it."""

    run: Callable[[Any], Result]
    """The function of the command's name."""
    config: type | Mapping[str, type]
    """The flags; a mapping where a second word chooses them (explain attention | w4a16)."""
    show: Callable[[Result], str]
    """The result as text for a person ("" where all was said already)."""
    kept: Callable[[Any], str]
    """After Ctrl-C: what is kept and how to go on, in one line."""
    defaults: Callable[[list[str]], tuple[Any, list[str]]] | None = None
    """Takes words out of the flags (a config file) and returns the config whose values become the
    flags' defaults, and the rest; None: the dataclass's own defaults."""
    code: Callable[[Result], int] = lambda result: 0
    """Exit code of a run that came to a result (a gate that refuses it: 3)."""
    tells_sigterm: bool = False
    """Whether SIGTERM ends it as Ctrl-C does; False: at once, or as the command itself arranges."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """What errors call otherwise than the config's field -> what the user knows it as."""
    note: str = ""
    """What --help says under the summary."""


def nothing_kept(_config: Any) -> str:
    """For commands that write nothing."""
    return "nothing was written"
