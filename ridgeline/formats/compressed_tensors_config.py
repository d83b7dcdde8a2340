"""The compressed-tensors entry of a checkpoint's config: config_groups, targets, ignore.

A group gives its scheme to the layers that its targets name: a full name, "re:" and a regular
expression matched from the name's start, or the class "Linear". Names come before expressions,
expressions before the class; what `ignore` names is plain. Everything this reader cannot run is
refused by name: quantized activations or caches, floating-point types, other storage formats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import UserError
from ridgeline.formats.compressed_tensors import CompressedTensorsFormat
from ridgeline.formats.contract import WeightFormat, names_of, table_of, whole_number
from ridgeline.formats.patterns import refusal

FORMAT = "pack-quantized"
_REGEX = "re:"
_CLASS = "Linear"
_BY_GROUP = ("group", "dynamic")
_IN_ORDER = (None, "weight", "static")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeGroup:
    """Layers that share a form."""

    targets: tuple[str, ...]
    layout: CompressedTensorsFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTensorsConfig:
    """What a checkpoint says of its quantized layers."""

    groups: tuple[SchemeGroup, ...]
    """At least one."""
    ignore: tuple[str, ...] = ()

    side_file = None

    @property
    def layout(self) -> CompressedTensorsFormat:
        """The first group's form."""
        return self.groups[0].layout

    def layout_of(self, name: str) -> CompressedTensorsFormat | None:
        """The form of one layer by its full name; None: it is not quantized."""
        if any(_matches(target, name) for target in self.ignore):
            return None
        kinds = (
            lambda target: target == name,
            lambda target: target.startswith(_REGEX) and _matches(target, name),
            lambda target: target == _CLASS,
        )
        for applies in kinds:
            for group in self.groups:
                if any(applies(target) for target in group.targets):
                    return group.layout
        return None

    def to_dict(self) -> dict[str, Any]:
        """The entry as compressed-tensors loaders read it."""
        return {
            "quant_method": "compressed-tensors",
            "format": FORMAT,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "ignore": list(self.ignore),
            "config_groups": {
                f"group_{index}": {
                    "targets": list(group.targets),
                    "weights": _weights(group.layout),
                    "input_activations": None,
                    "output_activations": None,
                }
                for index, group in enumerate(self.groups)
            },
        }


def _weights(layout: CompressedTensorsFormat) -> dict[str, Any]:
    return {
        "num_bits": layout.bits,
        "type": "int",
        "symmetric": layout.symmetric,
        "strategy": "channel" if layout.group_size is None else "group",
        "group_size": layout.group_size,
        "dynamic": False,
        "actorder": "group" if layout.desc_act else None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def read_config(
    entry: Mapping[str, Any], where: str = "quantization_config"
) -> CompressedTensorsConfig:
    """Read an entry of a compressed-tensors writer.

    Raises: UserError, by name, for what is no weight-only pack-quantized checkpoint, for missing
    or senseless values.
    """
    method = str(entry.get("quant_method", "compressed-tensors")).lower()
    if method not in ("compressed-tensors", "sparseml"):
        raise UserError(
            f"checkpoint: {where}.quant_method must be compressed-tensors here, got {method!r}; "
            "this reader knows compressed-tensors only"
        )
    _refuse_other_kinds(entry, where)
    groups = []
    for name, group in table_of(entry.get("config_groups"), f"{where}.config_groups").items():
        groups.append(_group(table_of(group, f"{where}.{name}"), entry, f"{where}.{name}"))
    if not groups:
        raise UserError(
            f"checkpoint: {where}.config_groups must hold a group, got none; "
            "the config is damaged or of an older writer"
        )
    ignore = names_of(entry.get("ignore"), f"{where}.ignore")
    for target in (*ignore, *(each for group in groups for each in group.targets)):
        _check_regex(target, where)
    return CompressedTensorsConfig(groups=tuple(groups), ignore=ignore)


def _refuse_other_kinds(entry: Mapping[str, Any], where: str) -> None:
    status = entry.get("quantization_status") or "compressed"
    if status != "compressed":
        raise UserError(
            f"checkpoint: {where}.quantization_status must be compressed, got {status!r}; "
            "save the checkpoint compressed"
        )
    if entry.get("kv_cache_scheme"):
        raise UserError(
            f"checkpoint: {where}.kv_cache_scheme must be null, got a quantized cache; "
            "take a checkpoint with quantized weights only"
        )
    sparsity = table_of(entry.get("sparsity_config"), f"{where}.sparsity_config")
    if sparsity.get("format") not in (None, "dense"):
        raise UserError(
            f"checkpoint: {where}.sparsity_config.format must be dense, "
            f"got {sparsity['format']!r}; take a checkpoint that is not sparse"
        )
    if entry.get("transform_config"):
        raise UserError(
            f"checkpoint: {where}.transform_config must be empty, got transforms; "
            "take a checkpoint without rotations"
        )


def _group(group: Mapping[str, Any], entry: Mapping[str, Any], where: str) -> SchemeGroup:
    for part in ("input_activations", "output_activations"):
        if group.get(part):
            raise UserError(
                f"checkpoint: {where}.{part} must be null, got quantized activations; "
                "take a checkpoint with quantized weights only"
            )
    stored = group.get("format") or entry.get("format") or FORMAT
    if stored != FORMAT:
        raise UserError(
            f"checkpoint: {where} must be stored as {FORMAT}, got {stored!r}; "
            "take a checkpoint with packed integer weights"
        )
    targets = names_of(group.get("targets"), f"{where}.targets")
    if not targets:
        raise UserError(
            f"checkpoint: {where}.targets must name layers, got none; the config is damaged"
        )
    return SchemeGroup(
        targets=targets, layout=_layout(table_of(group.get("weights"), f"{where}.weights"), where)
    )


def _layout(weights: Mapping[str, Any], where: str) -> CompressedTensorsFormat:
    kind = weights.get("type") or "int"
    if kind != "int":
        raise UserError(
            f"checkpoint: {where}.weights.type must be int, got {kind!r}; "
            "take a checkpoint with integer weights"
        )
    if weights.get("dynamic"):
        raise UserError(
            f"checkpoint: {where}.weights.dynamic must be false, got {weights['dynamic']!r}; "
            "the config is damaged"
        )
    order = weights.get("actorder")
    by_group = order is True or order in _BY_GROUP
    if not by_group and order is not False and order not in _IN_ORDER:
        raise UserError(
            f"checkpoint: {where}.weights.actorder must be null, weight, static or group, "
            f"got {order!r}; the config is damaged"
        )
    try:
        return CompressedTensorsFormat(
            bits=whole_number(weights.get("num_bits", 8), f"{where}.weights.num_bits"),
            group_size=_group_size(weights, where),
            symmetric=bool(weights.get("symmetric", True)),
            desc_act=by_group,
        )
    except ValueError as error:
        raise UserError(f"checkpoint: {where}.weights: {error}") from error


def _group_size(weights: Mapping[str, Any], where: str) -> int | None:
    size = weights.get("group_size")
    size = None if size is None else whole_number(size, f"{where}.weights.group_size")
    size = None if size == -1 else size
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "channel" if weights.get("group_size") == -1 else "group" if size else "tensor"
    if strategy == "channel" and size is None:
        return None
    if strategy == "group" and size is not None:
        return size
    raise UserError(
        f"checkpoint: {where}.weights must have strategy group with a group_size, or channel "
        f"without one, got {strategy!r} and {size}; quantize in one of these forms"
    )


def _matches(target: str, name: str) -> bool:
    if target.startswith(_REGEX):
        return re.match(target.removeprefix(_REGEX), name) is not None
    return target == name


def _check_regex(target: str, where: str) -> None:
    """Refuse a pattern that does not compile or that could take exponential time on a name."""
    if not target.startswith(_REGEX):
        return
    if reason := refusal(target.removeprefix(_REGEX)):
        raise UserError(
            f"checkpoint: {where} must hold simple regular expressions after re:, got "
            f"{target[:80]!r} ({reason}); the config is damaged"
        )


def describe(
    layout: WeightFormat, layouts: Mapping[str, WeightFormat], skipped: Sequence[str]
) -> CompressedTensorsConfig:
    """The entry for layers of these forms and plain linears of these names.

    Layers of another form than `layout` are listed by name in groups of their own.
    """
    assert isinstance(layout, CompressedTensorsFormat)
    others: dict[CompressedTensorsFormat, list[str]] = {}
    for name, form in layouts.items():
        assert isinstance(form, CompressedTensorsFormat)
        if form != layout:
            others.setdefault(form, []).append(name)
    groups = [SchemeGroup(targets=(_CLASS,), layout=layout)]
    groups += [SchemeGroup(targets=tuple(names), layout=form) for form, names in others.items()]
    head = () if "lm_head" in layouts or "lm_head" in skipped else ("lm_head",)
    return CompressedTensorsConfig(groups=tuple(groups), ignore=(*skipped, *head))
