"""The sandbox that a chat template runs in: no strings, lists or numbers beyond a size.

jinja2's sandbox keeps a template away from Python's insides, not from memory: `"".ljust(10**9)`,
`"{:999999999}".format(1)`, `x ~ x` forty times, a list that holds itself twice at every level.
Everything that can build something larger than its parts passes here and is counted before it is
built; what no template needs is not there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any

import jinja2.filters
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_INPUT_CHARS = 16 * 2**20
MAX_STRING_CHARS = 4 * 2**20
"""Longest string that a template may build, beside what the messages hold."""
MAX_LIST_ITEMS = 1_000_000
MAX_INT_BITS = 4096
MAX_NESTED_ITEMS = 100_000
"""Items, counted through every level, of a list or table that is written as text."""

_WIDE_PRINTF = re.compile(r"%[^a-zA-Z%]*(\*|\d{4,})")
"""A printf width or precision of four digits or from an argument."""
_WIDE_FORMAT = re.compile(r"\{[^{}]*[:!][^{}]*(\{|\d{4,})")
"""The same of str.format."""
_SEQUENCES = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
_NO_METHODS = frozenset("center ljust rjust zfill expandtabs translate format_map encode".split())
_NO_FILTERS = "batch center filesizeformat pprint slice urlize wordwrap xmlattr".split()


def too_long() -> SecurityError:
    """What is raised for a size beyond the limits."""
    return SecurityError("a string of the template is too long")


def check_chars(count: int) -> None:
    """Refuse a string of so many characters."""
    if count > MAX_INPUT_CHARS + MAX_STRING_CHARS:
        raise too_long()


def chars_of(value: Any) -> int:
    """About the characters that str(value) has; stops counting where there are too many."""
    total, items, pending = 0, 0, [value]
    while pending:
        each = pending.pop()
        items += 1
        if isinstance(each, str):
            total += len(each) + 2
        elif isinstance(each, _SEQUENCES):
            pending.extend(each)
        elif isinstance(each, Mapping):
            pending += [part for pair in each.items() for part in pair]
        elif isinstance(each, Namespace):
            raise SecurityError("a namespace is not text")
        total += 4
        check_chars(total)
        if items + len(pending) > MAX_NESTED_ITEMS:
            raise SecurityError("a list of the template is too long to be written")
    return total


def finalize(value: Any) -> Any:
    """What `{{ value }}` writes, its size checked."""
    if not isinstance(value, str):
        chars_of(value)
    return value


def _join(parts: Iterable[Any], separator: str = "") -> str:
    parts = list(parts)
    size = len(separator) * len(parts)
    for part in parts:
        size += len(part) if isinstance(part, str) else chars_of(part)
        check_chars(size)
    return separator.join(map(str, parts))


def _check_replace(text: str, old: str, new: str) -> None:
    check_chars(len(text) + text.count(old) * len(new))


def _check_format(template: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if _WIDE_FORMAT.search(template):
        raise SecurityError("the width of a format is too large")
    longest = max((chars_of(value) for value in (*args, *kwargs.values())), default=0)
    check_chars(len(template) + template.count("{") * longest)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with every growing operation counted."""

    intercepted_binops = frozenset({"*", "%", "+", "**"})
    concat = staticmethod(_join)  # of captured blocks and macros
    join = staticmethod(lambda *parts: _join(parts))  # of `~`

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=finalize, **options)
        del self.globals["lipsum"]
        for name in _NO_FILTERS:
            self.filters[name] = _refusing(name)
        self.filters |= {
            "format": self._format_filter,
            "indent": _indent_filter,
            "join": _join_filter,
            "replace": _replace_filter,
            "string": _string_filter,
            "sum": _sum_filter,
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for node in [source, *source.find_all(nodes.Node)]:
            _call_for_concat(node, self)
        return super()._generate(source, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _NO_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name == "format":
                _check_format(owner, args, kwargs)
            elif name == "join" and args:
                return _join(args[0], owner)
            elif name == "replace" and len(args) >= 2:
                _check_replace(owner, str(args[0]), str(args[1]))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed in a chat template")
        sized = [side for side in (left, right) if isinstance(side, str | list | tuple)]
        whole = [side for side in (left, right) if isinstance(side, int)]
        size = sum(len(side) for side in sized)
        if operator == "*" and sized and whole and size * whole[0] > MAX_STRING_CHARS:
            raise too_long()
        if operator == "*" and sum(side.bit_length() for side in whole) > MAX_INT_BITS:
            raise SecurityError("a number of the template is too large")
        if operator == "%" and isinstance(left, str):
            if _WIDE_PRINTF.search(left):
                raise SecurityError("the width of a format is too large")
            check_chars(len(left) + left.count("%") * chars_of(right))
        if operator == "+" and any(not isinstance(side, str) for side in sized):
            if size > MAX_LIST_ITEMS:
                raise SecurityError("a list of the template is too long")
        elif operator == "+":
            check_chars(size)
        return super().call_binop(context, operator, left, right)

    def _format_filter(self, value: Any, *args: Any, **kwargs: Any) -> str:
        return self.call_binop(None, "%", str(value), kwargs or args)


def _call_for_concat(parent: nodes.Node, environment: BoundedEnvironment) -> None:
    """Replace each `a ~ b` below a node by a call of the environment's `join`."""

    def made(node: Any) -> Any:
        if not isinstance(node, nodes.Concat):
            return node
        target = nodes.EnvironmentAttribute("join", lineno=node.lineno)
        call = nodes.Call(target, node.nodes, [], None, None, lineno=node.lineno)
        return call.set_environment(environment)

    for name, value in list(parent.iter_fields()):
        if isinstance(value, list):
            setattr(parent, name, [made(each) for each in value])
        else:
            setattr(parent, name, made(value))


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise SecurityError(f"the filter {name} is not allowed in a chat template")

    return refuse


@jinja2.pass_eval_context
def _join_filter(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(eval_ctx.environment, attribute), value)
    return _join(value, str(d))


def _replace_filter(s: Any, old: str, new: str, count: int | None = None) -> str:
    text = _string_filter(s)
    _check_replace(text, str(old), str(new))
    return text.replace(str(old), str(new), -1 if count is None else count)


def _indent_filter(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    text = _string_filter(s)
    each = width if isinstance(width, int) else len(width)
    check_chars(len(text) + (text.count("\n") + 2) * each)
    return jinja2.filters.do_indent(text, width, first, blank)


def _string_filter(value: Any) -> str:
    if not isinstance(value, str):
        chars_of(value)
    return str(value)


@jinja2.pass_environment
def _sum_filter(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise SecurityError("a sum in a chat template is of numbers")
    return jinja2.filters.sync_do_sum(environment, iterable, attribute, start)
