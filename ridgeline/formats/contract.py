"""What every form of a quantized layer offers, and every checkpoint's statement about its layers.

A form (GPTQFormat, AWQFormat, CompressedTensorsFormat) is one layer's specification; a config
(GPTQConfig, ...) says by a layer's full name which form it has. Whoever loads, shards, converts or
runs layers knows these two and no format's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from ridgeline.core.errors import UserError, bad_value
from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.grid import GridSpec

BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of one stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightFormat(Protocol):
    """One layer's specification in some form: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def method(self) -> str:
        """quant_method in a config: gptq, awq, compressed-tensors."""
        ...

    @property
    def bits(self) -> int: ...

    @property
    def group_size(self) -> int | None:
        """Inputs that share a scale; None: the whole row."""
        ...

    @property
    def symmetric(self) -> bool: ...

    @property
    def desc_act(self) -> bool:
        """Whether a table says each input's group."""
        ...

    @property
    def scale_dtype(self) -> str:
        """Of scales that `quantize_ref` makes; a file may hold another."""
        ...

    @property
    def codes_name(self) -> str:
        """The tensor that holds the codes; a layer is quantized where it exists."""
        ...

    def group_of(self, k: int) -> int: ...

    def tensor_specs(self, n: int, k: int, *, bias: bool = False) -> dict[str, TensorSpec]: ...

    def shape_of(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """(N, K) of the weight that tensors hold."""
        ...

    def forward_parts(self) -> tuple[str, ...]:
        """Tensors whose bytes a one-row forward needs (without the bias)."""
        ...

    def grid(self) -> GridSpec: ...

    def quantize_ref(self, w_NK: torch.Tensor) -> QuantizedWeight: ...

    def dequant_ref(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor: ...

    def pack(self, weight: QuantizedWeight) -> dict[str, torch.Tensor]: ...

    def unpack(self, tensors: dict[str, torch.Tensor]) -> QuantizedWeight: ...

    def zeros_of(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """uint8 [N, R] zero points; None where all are the middle one."""
        ...

    def check_tensors(self, tensors: dict[str, torch.Tensor]) -> None: ...

    def shard_dims(self, axis: str) -> dict[str, int | None]: ...

    def shard_multiple(self, axis: str) -> int: ...

    def shard(
        self, tensors: dict[str, torch.Tensor], axis: str, rank: int, ranks: int
    ) -> dict[str, torch.Tensor]: ...


class Quantization(Protocol):
    """What a checkpoint's config says of its quantized layers."""

    @property
    def layout(self) -> WeightFormat:
        """The form of layers without an exception."""
        ...

    @property
    def side_file(self) -> str | None:
        """A file beside config.json in which older loaders expect the entry too."""
        ...

    def layout_of(self, name: str) -> WeightFormat | None:
        """The form of one layer by its full name; None: it is not quantized."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The entry for config.json."""
        ...


# ---- checks that the forms share -------------------------------------------------------------


def check_spec(op: str, bits: int, group_size: int | None, allowed: Sequence[int] = BITS) -> None:
    """Whether a width and group size make sense. Raises: ValueError."""
    if bits not in allowed:
        names = [str(width) for width in allowed]
        text = " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
        raise bad_value(op, "bits", f"be {text}", bits, "choose one of these")
    if group_size is not None and group_size < 1:
        raise bad_value(op, "group_size", "be positive or None", group_size, "None is whole-row")


def check_weight(op: str, form: WeightFormat, weight: QuantizedWeight) -> None:
    """Whether a weight is of a form. Raises: ValueError naming the field."""
    K = weight.shape_nk[1]
    if weight.bits != form.bits:
        raise bad_value(op, "weight.bits", f"be {form.bits}", weight.bits, "quantize to this width")
    if weight.group_size != form.group_of(K):
        raise bad_value(
            op,
            "weight.group_size",
            f"be {form.group_of(K)}",
            weight.group_size,
            "use the format's group size",
        )
    if form.symmetric and weight.zero_NR is not None:
        raise bad_value(
            op,
            "weight.zero_NR",
            "be None in a symmetric format",
            "zero points",
            "use symmetric=False",
        )
    if not form.desc_act and weight.group_of_K is not None:
        raise bad_value(
            op,
            "weight.group_of_K",
            "be None without desc_act",
            "a group table",
            "use desc_act=True",
        )


def check_present(op: str, tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    """Whether the tensors without which a layer cannot be read are there. Raises: ValueError."""
    missing = [name for name in names if name not in tensors]
    if missing:
        text = f"{', '.join(names[:-1])} and {names[-1]}"
        raise bad_value(
            op,
            "tensors",
            f"hold {text}",
            f"no {', '.join(missing)}",
            "the checkpoint is incomplete",
        )


def check_words(
    op: str, name: str, words: torch.Tensor, dtype: torch.dtype = torch.int32
) -> tuple[int, int]:
    """Shape of packed words, which are a matrix of `dtype`. Raises: ValueError."""
    if words.dim() != 2 or words.dtype != dtype:
        raise bad_value(
            op,
            name,
            f"be a matrix of {str(dtype).removeprefix('torch.')}",
            f"{words.dtype} {list(words.shape)}",
            "the file is damaged or of another format",
        )
    return words.shape[0], words.shape[1]


def check_shape(op: str, form: WeightFormat, name: str, got: torch.Tensor, want: tuple) -> None:
    """Whether a stored tensor has the shape that its form prescribes. Raises: ValueError."""
    if tuple(got.shape) != tuple(want):
        group = "whole rows" if form.group_size is None else f"group {form.group_size}"
        raise bad_value(
            op,
            name,
            f"have shape {list(want)} at {form.bits} bits, {group}",
            list(got.shape),
            "check bits and group_size in the config",
        )


def check_groups(op: str, name: str, table_K: torch.Tensor, groups: int) -> None:
    """Whether a group table points at groups that exist. Raises: ValueError."""
    if table_K.numel() and not 0 <= int(table_K.min()) <= int(table_K.max()) < groups:
        raise bad_value(
            op, name, f"lie in 0 .. {groups - 1}", "values outside", "the file is damaged"
        )


def check_axis(op: str, axis: str) -> None:
    """Raises: ValueError for an axis that is neither column nor row."""
    if axis not in ("column", "row"):
        raise bad_value(op, "axis", "be column or row", repr(axis), "choose one of these")


def check_split(op: str, axis: str, count: int, ranks: int, multiple: int) -> None:
    """Whether ranks get whole shares. Raises: ValueError."""
    if count % (ranks * multiple):
        raise bad_value(
            op,
            f"{axis} split",
            f"give each of {ranks} ranks a multiple of {multiple}",
            count,
            "use fewer ranks or a smaller group",
        )


# ---- reading a config's values ---------------------------------------------------------------


def whole_number(value: Any, where: str) -> int:
    """Raises: UserError for anything but an int."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(
            f"checkpoint: {where} must be a whole number, got {value!r}; the config is damaged"
        )
    return value


def table_of(value: Any, where: str) -> Mapping[str, Any]:
    """An object, {} for null. Raises: UserError for anything else."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(
            f"checkpoint: {where} must be an object, got {type(value).__name__}; "
            "the config is damaged"
        )
    return value


def names_of(value: Any, where: str) -> tuple[str, ...]:
    """A list of strings, () for null. Raises: UserError for anything else."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise UserError(
            f"checkpoint: {where} must be a list of strings, got {value!r}; the config is damaged"
        )
    return tuple(value)
