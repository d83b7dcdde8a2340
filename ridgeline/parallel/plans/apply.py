"""Applying a plan: every key must match, or it is an error.

A plan maps patterns of module names ("model.layers.*.mlp.up_proj") to what replaces the module. A
key that matches nothing would leave a layer whole and train something else without a word.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping

from torch import nn

from ridgeline.core.errors import bad_value

Rule = Callable[[nn.Module], nn.Module]
"""Takes a module, returns what stands in its place (or the same, changed)."""
Plan = Mapping[str, Rule]


def apply_plan(model: nn.Module, plan: Plan, *, absent: frozenset[str] = frozenset()) -> list[str]:
    """Replace every module that a key of the plan matches; returns their names.

    absent: keys that need not match here (what another pipeline stage holds).
    Raises: ValueError for a key that matches no module, or two keys for one module.
    """
    done: dict[str, str] = {}
    for key, rule in plan.items():
        matched = matching(model, key)
        if not matched and key not in absent:
            near = ", ".join(_nearest(model, key)) or "none"
            raise bad_value(
                "plan", repr(key), "match a module", "no match", f"nearest names: {near}"
            )
        for name in matched:
            if name in done:
                raise bad_value("plan", repr(key), f"not match {name} again", done[name], "drop it")
            done[name] = key
            parent_name, _, child = name.rpartition(".")
            parent = model.get_submodule(parent_name)
            old = parent.get_submodule(child)
            new = rule(old)
            if new is not old:
                setattr(parent, child, new)
    return sorted(done)


def matching(model: nn.Module, key: str) -> list[str]:
    """Names of the modules that a pattern matches; * stands for one part of a name."""
    expression = re.compile(re.escape(key).replace(r"\*", "[^.]+"))
    return [name for name, _ in model.named_modules() if expression.fullmatch(name)]


def _nearest(model: nn.Module, key: str) -> list[str]:
    last = key.rpartition(".")[2]
    names = {re.sub(r"\.\d+\.", ".*.", name) for name, _ in model.named_modules() if name}
    close = [n for n in names if fnmatch.fnmatch(n.rpartition(".")[2], f"*{last[:4]}*")]
    return sorted(close)[:4]
