"""What the flag parser says in a box, said in the project's form of an error; and a config's own
refusal, with flags in the place of fields.

<command>: <flag> must <rule>, got <value>; <what to do>
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Mapping

_KINDS = {"INT": "a whole number", "FLOAT": "a number", "PATH": "a path", "STR": "a word"}


def usage_error(prog: str, box: str) -> str:
    """The message of a box as one line. prog: "ridgeline train"."""
    parts = _parts(box)
    message = "; ".join(parts) or "the flags do not parse"
    if refused := re.match(r"Error parsing (?!-)[\w.]+: (.*)", message):
        return refused.group(1)  # the config's own refusal, which has the form
    command = prog.removeprefix("ridgeline ")
    for pattern, tell in _FORMS:
        if found := re.match(pattern, message):
            told, also = tell(found)
            return f"{command}: {told}; {also}see {prog} --help"
    return f"{command}: {message}; see {prog} --help"


def flag_names(config: type) -> dict[str, str]:
    """A config's fields -> their flags: by dotted path, and by last name where only one has it."""
    paths = list(_paths(config))
    last = [path.rsplit(".", 1)[-1] for path in paths]
    short = {name: path for name, path in zip(last, paths, strict=True) if last.count(name) == 1}
    named = {path: path for path in paths} | short
    return {name: f"--{path.replace('_', '-')}" for name, path in named.items()}


def _paths(config: type) -> typing.Iterator[str]:
    kinds = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            yield from (f"{field.name}.{inner}" for inner in _paths(typing.cast(type, kind)))
        else:
            yield field.name


def with_flags(reason: str, names: Mapping[str, str], *, plain: bool = True) -> str:
    """An error that names fields, naming flags: its argument, and beside what it got every word
    that can only be a field's name (it has a dot or an underscore).

    plain: the argument may be a plain word too (False: that may be a file's name).
    """
    found = re.match(r"([^:;\s]+): ([\w.]+)(?= (?:\S+ )?must )", reason)
    start = ""
    if found:
        op, argument = found.groups()
        flag = names.get(f"{op}.{argument}", names.get(argument))
        if flag and (plain or "_" in argument or "." in argument):
            start, reason = f"{op}: {flag}", reason[found.end() :]
    head, got, rest = reason.partition(", got ")
    value, semicolon, advice = rest.rpartition("; ")

    def told(text: str) -> str:
        word = r"(?<![\w./'\"=-])[a-z]\w*[._][\w.]*\w(?![\w/'\"=-])"
        return re.sub(word, lambda found: names.get(found.group(), found.group()), text)

    if not semicolon:
        value, advice = rest, ""
    return start + told(head) + got + value + semicolon + told(advice)


def _parts(box: str) -> list[str]:
    """Paragraphs of a box, each on one line, without the frame and the pointer to --help."""
    parts = [""]
    for line in box.splitlines()[1:]:
        words = line.strip("\u2502\u256d\u2570\u256e\u256f| \n")
        if words and not words.strip("\u2500-"):
            parts.append("")
        else:
            parts[-1] += f" {words}"
    kept = [" ".join(part.split()) for part in parts if part.strip()]
    return [part for part in kept if not part.startswith("For full helptext")]


def _unknown(found: re.Match[str]) -> tuple[str, str]:
    near = re.search(r"(--[\w.-]+)", found.group(2))
    also = f"did you mean {near.group(1)}? " if near else ""
    return f"flags must be known ones, got {found.group(1).replace(', ', ' ')}", also


def _valueless(found: re.Match[str]) -> tuple[str, str]:
    return f"{found.group(1)} must have a value, got nothing", ""


def _choice(found: re.Match[str]) -> tuple[str, str]:
    options = ", ".join(re.findall(r"'([^']*)'", found.group(3)))
    return f"{found.group(2)} must be one of {options}, got {found.group(1)}", ""


def _unparsed(found: re.Match[str]) -> tuple[str, str]:
    flag, complaint, metavar = found.groups()
    kinds = [_KINDS.get(kind, kind.strip("{}").lower()) for kind in metavar.split("|")]
    values = re.findall(r"'([^']*)'", complaint)
    first = re.search(r"instantiated from \['([^']*)'", complaint)
    got = first.group(1) if first else values[-1] if values else "something else"
    return f"{flag} must be {' or '.join(kinds)}, got {got}", ""


def _missing(found: re.Match[str]) -> tuple[str, str]:
    flags = re.findall(r"(--[\w.-]+) [A-Z{]", found.group(1))
    return f"{', '.join(flags) or 'a flag'} must be given, got nothing", ""


_FORMS: tuple[tuple[str, Callable[[re.Match[str]], tuple[str, str]]], ...] = (
    (r"Unrecognized options: ([^;]*)(.*)", _unknown),
    (r"Missing value for argument '([^']+)'", _valueless),
    (r"invalid choice '([^']*)' for argument '([^']+)'\. Expected one of \(([^)]*)\)", _choice),
    (r"Error parsing (-[\w.-]+): (.*); Argument helptext: \S+ (\S+)", _unparsed),
    (r"Missing from [^:]*: (.*)", _missing),
)
