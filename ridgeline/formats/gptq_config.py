"""The GPTQ entry of a checkpoint's config: quantization_config in config.json, or
quantize_config.json.

Writers differ in names and leave keys out; `read_config` knows the synonyms, refuses what would be
read wrongly, and warns where it must assume.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline import __version__
from ridgeline.core.errors import UserError, bad_value
from ridgeline.formats.contract import WeightFormat, table_of, whole_number
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.formats.patterns import check_patterns

_SYNONYMS = {
    "bits": ("bits", "w_bit", "wbits"),
    "group_size": ("group_size", "q_group_size"),
    "checkpoint_format": ("checkpoint_format", "format", "version"),
    "desc_act": ("desc_act",),
    "symmetric": ("sym", "symmetric"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRule:
    """An exception for layers whose full name a regular expression matches from its start."""

    pattern: str
    skip: bool = False
    bits: int | None = None
    group_size: int | None = None
    whole_row: bool = False
    """One group for the whole row; group_size None alone keeps the default's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQConfig:
    """What a checkpoint says of its quantized layers."""

    layout: GPTQFormat
    rules: tuple[LayerRule, ...] = ()
    """The first that matches counts."""
    lm_head: bool = False
    damping: float | None = None
    """What the writer states of its run; kept for the reader's interest."""
    true_sequential: bool = True
    static_groups: bool = False

    side_file = "quantize_config.json"

    def layout_of(self, name: str) -> GPTQFormat | None:
        """The form of one layer by its full name; None: it is not quantized."""
        for rule in self.rules:
            if re.match(rule.pattern, name):
                if rule.skip:
                    return None
                group = None if rule.whole_row else rule.group_size or self.layout.group_size
                return replace(self.layout, bits=rule.bits or self.layout.bits, group_size=group)
        return self.layout

    def to_dict(self) -> dict[str, Any]:
        """The entry as GPTQ loaders read it."""
        layout = self.layout
        entry: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": layout.bits,
            "group_size": -1 if layout.group_size is None else layout.group_size,
            "desc_act": layout.desc_act,
            "sym": layout.symmetric,
            "checkpoint_format": layout.checkpoint_format,
            "pack_dtype": "int32",
            "lm_head": self.lm_head,
            "true_sequential": self.true_sequential,
            "static_groups": self.static_groups,
            "meta": {"quantizer": [f"ridgeline:{__version__}"]},
        }
        if self.damping is not None:
            entry["damp_percent"] = self.damping
        if self.rules:
            entry["dynamic"] = {_rule_key(rule): _rule_value(rule) for rule in self.rules}
        return entry


def _rule_key(rule: LayerRule) -> str:
    return ("-:" if rule.skip else "+:") + rule.pattern


def _rule_value(rule: LayerRule) -> dict[str, int]:
    pairs = {"bits": rule.bits, "group_size": -1 if rule.whole_row else rule.group_size}
    return {key: value for key, value in pairs.items() if value is not None}


def read_config(entry: Mapping[str, Any], where: str = "quantization_config") -> GPTQConfig:
    """Read an entry of any GPTQ writer.

    Raises: UserError for another quant_method, a layout other than the two GPTQ ones, or missing or
    senseless values; warns (UserWarning) when symmetry has to be assumed.
    """
    method = str(entry.get("quant_method", "gptq")).lower()
    if method != "gptq":
        raise UserError(
            f"checkpoint: {where}.quant_method must be gptq here, got {method!r}; "
            "this reader knows GPTQ only"
        )
    if entry.get("is_marlin_format"):
        raise UserError(
            f"checkpoint: {where} must describe plain GPTQ tensors, got is_marlin_format; "
            "take the original GPTQ checkpoint"
        )
    check_patterns(entry.get("dynamic"), f"{where}.dynamic")
    if str(entry.get("pack_dtype") or "int32") != "int32":
        raise UserError(
            f"checkpoint: {where}.pack_dtype must be int32, got {entry['pack_dtype']!r}; "
            "save the checkpoint with int32 words"
        )
    try:
        layout = GPTQFormat(
            bits=whole_number(_found(entry, "bits"), f"{where}.bits"),
            group_size=_group_size(
                whole_number(_found(entry, "group_size"), f"{where}.group_size")
            ),
            symmetric=_symmetric(entry, where),
            desc_act=bool(_found(entry, "desc_act") or False),
            checkpoint_format=str(_found(entry, "checkpoint_format") or "gptq").lower(),
            writer=_writer(entry),
        )
    except ValueError as error:
        raise UserError(f"checkpoint: {where}: {error}") from error
    return GPTQConfig(
        layout=layout,
        rules=_rules(table_of(entry.get("dynamic"), f"{where}.dynamic"), layout, where),
        lm_head=bool(entry.get("lm_head", False)),
        damping=entry.get("damp_percent"),
        true_sequential=bool(entry.get("true_sequential", True)),
        static_groups=bool(entry.get("static_groups", False)),
    )


def _found(entry: Mapping[str, Any], key: str) -> Any:
    return next((entry[name] for name in _SYNONYMS[key] if name in entry), None)


def _group_size(value: int) -> int | None:
    return None if value == -1 else value


def _symmetric(entry: Mapping[str, Any], where: str) -> bool:
    value = _found(entry, "symmetric")
    if value is not None:
        return bool(value)
    if "zero_point" in entry:
        return not entry["zero_point"]
    warnings.warn(
        f"checkpoint: {where} does not say sym; symmetric is assumed", UserWarning, stacklevel=4
    )
    return True


def _writer(entry: Mapping[str, Any]) -> str:
    meta = entry.get("meta") or {}
    quantizer = meta.get("quantizer") if isinstance(meta, Mapping) else None
    if isinstance(quantizer, list):
        quantizer = quantizer[0] if quantizer else None
    return str(quantizer or "unknown")


def _rules(dynamic: Mapping[str, Any], layout: GPTQFormat, where: str) -> tuple[LayerRule, ...]:
    rules = []
    for key, value in dynamic.items():
        here = f"{where}.dynamic[{key!r}]"
        skip = key.startswith("-:")
        pattern = key.removeprefix("-:").removeprefix("+:")
        value = {} if skip else table_of(value, here)
        unknown = set(value) - {"bits", "group_size"}
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            unknown = {f"the pattern {pattern!r} ({error})"}
        if unknown:
            raise UserError(
                f"checkpoint: {here} must hold only bits and group_size, got "
                f"{', '.join(sorted(map(str, unknown)))}; quantize without such an exception"
            )
        sizes = {name: whole_number(size, f"{here}.{name}") for name, size in value.items()}
        if whole_row := sizes.get("group_size") == -1:
            del sizes["group_size"]
        try:
            replace(layout, **sizes)
        except ValueError as error:
            raise UserError(f"checkpoint: {here}: {error}") from error
        rules.append(LayerRule(pattern=pattern, skip=skip, whole_row=whole_row, **sizes))
    return tuple(rules)


def describe(
    layout: WeightFormat, layouts: Mapping[str, WeightFormat], skipped: Sequence[str]
) -> GPTQConfig:
    """The entry for layers of these forms and plain linears of these names, one rule each.

    Raises: ValueError for layers that differ in more than a rule can state.
    """
    assert isinstance(layout, GPTQFormat)
    rules = []
    for name, form in layouts.items():
        if form == layout:
            continue
        if replace(layout, bits=form.bits, group_size=form.group_size) != form:
            raise bad_value(
                "gptq",
                "layers",
                "differ in bits and group size only",
                f"more for {name}",
                "write compressed-tensors",
            )
        rules.append(
            LayerRule(
                pattern=f"{re.escape(name)}$",
                bits=form.bits,
                group_size=form.group_size,
                whole_row=form.group_size is None,
            )
        )
    rules += [
        LayerRule(pattern=f"{re.escape(name)}$", skip=True) for name in skipped if name != "lm_head"
    ]
    return GPTQConfig(layout=layout, rules=tuple(rules), lm_head="lm_head" in layouts)
