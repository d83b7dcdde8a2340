"""The AWQ entry of a checkpoint's config: quantization_config in config.json, or quant_config.json.

AutoAWQ's names and the older ones (w_bit, q_group_size) are known. `modules_to_not_convert` holds
parts of layers' names: a layer whose full name contains one is plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import UserError, bad_value
from ridgeline.formats.awq import VERSIONS, AWQFormat
from ridgeline.formats.contract import WeightFormat, names_of, whole_number

_SYNONYMS = {
    "bits": ("bits", "w_bit", "wbits"),
    "group_size": ("group_size", "q_group_size"),
    "version": ("version", "format", "checkpoint_format"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AWQConfig:
    """What a checkpoint says of its quantized layers."""

    layout: AWQFormat
    skipped: tuple[str, ...] = ()
    """Parts of names; a layer whose name contains one is not quantized."""

    side_file = None

    def layout_of(self, name: str) -> AWQFormat | None:
        """The form of one layer by its full name; None: it is not quantized."""
        return None if any(part in name for part in self.skipped) else self.layout

    def to_dict(self) -> dict[str, Any]:
        """The entry as AWQ loaders read it.

        zero_point is true for symmetric weights too: the file holds their zeros.
        """
        return {
            "quant_method": "awq",
            "bits": self.layout.bits,
            "group_size": -1 if self.layout.group_size is None else self.layout.group_size,
            "zero_point": True,
            "version": self.layout.version,
            "modules_to_not_convert": list(self.skipped) or None,
        }


def read_config(entry: Mapping[str, Any], where: str = "quantization_config") -> AWQConfig:
    """Read an entry of any AWQ writer.

    Raises: UserError for another quant_method or layout, missing or senseless values.
    """
    method = str(entry.get("quant_method", "awq")).lower()
    if method != "awq":
        raise UserError(
            f"checkpoint: {where}.quant_method must be awq here, got {method!r}; "
            "this reader knows AWQ only"
        )
    version = str(_found(entry, "version") or "gemm").lower()
    if version not in VERSIONS:
        raise UserError(
            f"checkpoint: {where}.version must be one of {', '.join(VERSIONS)}, got {version!r}; "
            "take a checkpoint in one of these or convert it with the library that wrote it"
        )
    group = whole_number(_found(entry, "group_size"), f"{where}.group_size")
    try:
        layout = AWQFormat(
            bits=whole_number(_found(entry, "bits"), f"{where}.bits"),
            group_size=None if group == -1 else group,
            symmetric=not entry.get("zero_point", not entry.get("sym", False)),
            version=version,
        )
    except ValueError as error:
        raise UserError(f"checkpoint: {where}: {error}") from error
    if entry.get("dynamic"):
        raise UserError(
            f"checkpoint: {where}.dynamic must be empty for AWQ, got exceptions; "
            "AWQ states one width and group size for all layers"
        )
    skipped = names_of(entry.get("modules_to_not_convert"), f"{where}.modules_to_not_convert")
    if "" in skipped:
        raise UserError(
            f"checkpoint: {where}.modules_to_not_convert must hold names, got an empty one; "
            "it would match every layer"
        )
    return AWQConfig(layout=layout, skipped=skipped)


def describe(
    layout: WeightFormat, layouts: Mapping[str, WeightFormat], skipped: Sequence[str]
) -> AWQConfig:
    """The entry for layers of these forms and plain linears of these names.

    Raises: ValueError for layers of different forms, or a plain one whose name is part of a
    quantized one's: AWQ cannot state either.
    """
    assert isinstance(layout, AWQFormat)
    other = [name for name, form in layouts.items() if form != layout]
    if other:
        raise bad_value(
            "awq",
            "layers",
            "have one width and group size",
            f"others for {other[0]}",
            "write gptq or compressed-tensors",
        )
    config = AWQConfig(layout=layout, skipped=tuple(skipped))
    lost = [name for name in layouts if config.layout_of(name) is None]
    if lost:
        raise bad_value(
            "awq",
            "skipped layers",
            "have names that are no part of a quantized layer's",
            f"one inside {lost[0]}",
            "write gptq or compressed-tensors",
        )
    return config


def _found(entry: Mapping[str, Any], key: str) -> Any:
    return next((entry[name] for name in _SYNONYMS[key] if name in entry), None)
