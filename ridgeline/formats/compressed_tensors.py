"""The compressed-tensors form "pack-quantized": one linear layer in packed signed integers.

    W[n, k] = weight_scale[n, g(k)] * (s[n, k] - z[n, g(k)])

s and z are signed, -2^(bits-1) .. 2^(bits-1) - 1, and stored with 2^(bits-1) added, which makes
them the unsigned codes of every other form: the words of GPTQ (v2), transposed.

weight_packed      int32 [N, ceil(K bits / 32)]   a dense bit stream along K, its tail zero bits
weight_scale       [N, R] fp16, bf16 or fp32      R = ceil(K / group); one column for "channel"
weight_zero_point  int32 [ceil(N bits / 32), R]   only when asymmetric; packed along N
weight_shape       int64 or int32 [2]             N, K
weight_g_idx       int32 [K]                      only with actorder "group"

Trap this file settles: writers before 2026 aligned 3-bit codes, ten to a word with the two highest
bits clear, later ones let codes straddle words; the config does not say which. The number of words
tells for most sizes, the two bits of every word for the others. We write the dense stream.
Golden word: s = -8 .. -1 at 4 bits -> 0x76543210.
Source of the layout: checkpoints of the compressed-tensors library, read as data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ridgeline.core.dtypes import torch_dtype
from ridgeline.core.errors import bad_value
from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.bitpack import codes_per_block, pack_padded, unpack_padded
from ridgeline.formats.contract import (
    TensorSpec,
    check_axis,
    check_groups,
    check_present,
    check_shape,
    check_spec,
    check_split,
    check_weight,
    check_words,
)
from ridgeline.formats.grid import GridSpec, group_view, range_params

_OP = "compressed-tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTensorsFormat:
    """One layer's specification in the compressed-tensors form."""

    bits: int = 4
    """2, 3, 4 or 8."""
    group_size: int | None = 128
    """Inputs that share a scale; None: the whole row (strategy "channel")."""
    symmetric: bool = True
    desc_act: bool = False
    """weight_g_idx says each input's group (actorder "group")."""
    scale_dtype: str = field(default="float16", compare=False)
    """Of scales that are made; the config does not state it and a file's own is kept."""

    method = "compressed-tensors"
    codes_name = "weight_packed"

    def __post_init__(self) -> None:
        check_spec(_OP, self.bits, self.group_size)

    # -- sizes ---------------------------------------------------------------------------------

    def group_of(self, k: int) -> int:
        """Inputs of a group for a layer with k inputs."""
        return k if self.group_size is None else min(self.group_size, k)

    def tensor_specs(self, n: int, k: int, *, bias: bool = False) -> dict[str, TensorSpec]:
        """What `pack` returns for an [n, k] weight; any n and k from 1 can be packed."""
        for name, count in (("out_features", n), ("in_features", k)):
            if count < 1:
                raise bad_value(_OP, name, "be at least 1", count, "leave this layer unquantized")
        R = -(-k // self.group_of(k))
        scale = torch_dtype(self.scale_dtype)
        specs = {
            "weight_packed": TensorSpec(shape=(n, _words(k, self.bits)), dtype=torch.int32),
            "weight_scale": TensorSpec(shape=(n, R), dtype=scale),
            "weight_shape": TensorSpec(shape=(2,), dtype=torch.int64),
        }
        if not self.symmetric:
            shape = (_words(n, self.bits), R)
            specs["weight_zero_point"] = TensorSpec(shape=shape, dtype=torch.int32)
        if self.desc_act:
            specs["weight_g_idx"] = TensorSpec(shape=(k,), dtype=torch.int32)
        if bias:
            specs["bias"] = TensorSpec(shape=(n,), dtype=scale)
        return specs

    def shape_of(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """(N, K) of the weight that tensors hold. Raises: ValueError for a damaged shape."""
        shape = tensors["weight_shape"]
        rows, words = check_words(_OP, "weight_packed", tensors["weight_packed"])
        n, k = (int(size) for size in shape) if shape.shape == (2,) else (0, 0)
        if n != rows or not 0 < k <= words * 32 // self.bits:
            raise bad_value(
                _OP,
                "weight_shape",
                f"be [N, K] of {rows} rows of {words} words",
                shape.tolist(),
                "the file is damaged",
            )
        return n, k

    def forward_parts(self) -> tuple[str, ...]:
        """Tensors that a one-row forward needs."""
        zeros = () if self.symmetric else ("weight_zero_point",)
        table = ("weight_g_idx",) if self.desc_act else ()
        return ("weight_packed", "weight_scale", *zeros, *table)

    def grid(self) -> GridSpec:
        """The grid of codes that this format stores."""
        return GridSpec(
            bits=self.bits, symmetric=self.symmetric, scale_dtype=torch_dtype(self.scale_dtype)
        )

    # -- weight <-> codes ----------------------------------------------------------------------

    def quantize_ref(self, w_NK: torch.Tensor) -> QuantizedWeight:
        """Round to nearest as the library does: ties to even after the zero point is added."""
        w_NK = w_NK if w_NK.dtype == torch.float64 else w_NK.float()
        spec, group = self.grid(), self.group_of(w_NK.shape[1])
        grouped = group_view(w_NK, group)
        scale_NR, zero_NR = range_params(grouped.amin(-1), grouped.amax(-1), spec)
        index = torch.arange(w_NK.shape[1], device=w_NK.device) // group
        code = torch.round(w_NK / scale_NR[:, index] + zero_NR[:, index]).clamp(0, spec.max_code)
        return QuantizedWeight(
            code_NK=code.to(torch.uint8),
            scale_NR=scale_NR.to(spec.scale_dtype),
            zero_NR=None if self.symmetric else zero_NR.to(torch.uint8),
            bits=self.bits,
            group_size=group,
        )

    def dequant_ref(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The fp32 weight [N, K] that packed tensors stand for."""
        return self.unpack(tensors).dequantize()

    # -- codes <-> tensors ---------------------------------------------------------------------

    def pack(self, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors of a quantized weight; `unpack` returns it bit for bit.

        Raises: ValueError when the weight is not of this format.
        """
        check_weight(_OP, self, weight)
        tensors = {
            "weight_packed": pack_padded(weight.code_NK, self.bits, 1),
            "weight_scale": weight.scale_NR.contiguous(),
            "weight_shape": torch.tensor(weight.shape_nk, device=weight.code_NK.device),
        }
        if not self.symmetric:
            zero_NR = weight.zero_NR
            if zero_NR is None:
                middle = 2 ** (self.bits - 1)
                zero_NR = torch.full_like(weight.scale_NR, middle, dtype=torch.uint8)
            tensors["weight_zero_point"] = pack_padded(zero_NR, self.bits, 0)
        if self.desc_act:
            tensors["weight_g_idx"] = weight.groups_K().to(torch.int32)
        if weight.bias_N is not None:
            tensors["bias"] = weight.bias_N
        return tensors

    def unpack(self, tensors: dict[str, torch.Tensor]) -> QuantizedWeight:
        """The quantized weight that a checkpoint's tensors hold.

        Raises: ValueError for missing tensors or shapes that do not fit each other.
        """
        self.check_tensors(tensors)
        k = self.shape_of(tensors)[1]
        group_size = self.group_of(k)
        table = tensors.get("weight_g_idx")
        natural = torch.arange(k, device=tensors["weight_packed"].device) // group_size
        if table is not None and torch.equal(table.long(), natural):
            table = None
        return QuantizedWeight(
            code_NK=_read_codes(tensors["weight_packed"], self.bits, 1, k),
            scale_NR=tensors["weight_scale"].contiguous(),
            zero_NR=self.zeros_of(tensors),
            bits=self.bits,
            group_size=group_size,
            group_of_K=None if table is None else table.to(torch.int32),
            bias_N=tensors.get("bias"),
        )

    def zeros_of(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """uint8 [N, R] zero points; None where all are the middle one."""
        words = tensors.get("weight_zero_point")
        if words is None:
            return None
        zero_NR = _read_codes(words, self.bits, 0, self.shape_of(tensors)[0])
        return None if bool((zero_NR == 2 ** (self.bits - 1)).all()) else zero_NR

    # -- sharding ------------------------------------------------------------------------------

    def shard_dims(self, axis: str) -> dict[str, int | None]:
        """The dim of each tensor that a tensor-parallel layer splits; None: every rank holds it
        whole (weight_shape says each rank's own shape).

        axis: "column" splits N, "row" splits K. Under act-order a row-split rank may need any
        group, so scales and zero points stay whole and the table keeps its numbers.
        """
        check_axis(_OP, axis)
        column = axis == "column"
        grouped = None if self.desc_act or self.group_size is None else 1
        return {
            "weight_packed": 0 if column else 1,
            "weight_scale": 0 if column else grouped,
            "weight_zero_point": 0 if column else grouped,
            "weight_shape": None,
            "weight_g_idx": None if column else 0,
            "bias": 0 if column else None,
        }

    def shard_multiple(self, axis: str) -> int:
        """What a rank's share of N (column) or K (row) must be a multiple of."""
        block = codes_per_block(self.bits)
        if axis == "column":
            return 1 if self.symmetric else block
        grouped = not self.desc_act and self.group_size is not None
        return math.lcm(block, self.group_size or 1) if grouped else block

    def shard(
        self, tensors: dict[str, torch.Tensor], axis: str, rank: int, ranks: int
    ) -> dict[str, torch.Tensor]:
        """One rank's tensors of a layer split over N (column) or K (row).

        Under a row split every rank keeps the bias; the caller adds it once.
        Raises: ValueError when a rank's share is no multiple of shard_multiple.
        """
        n, k = self.shape_of(tensors)
        dims = self.shard_dims(axis)
        check_split(_OP, axis, n if axis == "column" else k, ranks, self.shard_multiple(axis))
        if 32 % self.bits:
            tensors = self.pack(self.unpack(tensors))  # dense, where it was aligned
        parts = {}
        for name, tensor in tensors.items():
            dim = dims[name]
            parts[name] = tensor if dim is None else tensor.chunk(ranks, dim)[rank].contiguous()
        whole = tensors["weight_shape"]
        split = torch.tensor([ranks, 1] if axis == "column" else [1, ranks], device=whole.device)
        parts["weight_shape"] = (whole // split).to(whole.dtype)
        return parts

    # -- checks --------------------------------------------------------------------------------

    def check_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Whether a layer's tensors fit this form and each other. Raises: ValueError."""
        names = ["weight_packed", "weight_scale", "weight_shape"]
        names += [] if self.symmetric else ["weight_zero_point"]
        names += ["weight_g_idx"] if self.desc_act else []
        check_present(_OP, tensors, names)
        n, k = self.shape_of(tensors)
        scale, table = tensors["weight_scale"], tensors.get("weight_g_idx")
        groups = -(-k // self.group_of(k))
        if table is not None and scale.dim() == 2:
            # A row shard of an act-order layer holds few inputs and every group.
            groups = max(groups, scale.shape[1])
        check_shape(_OP, self, "weight_scale", scale, (n, groups))
        if "bias" in tensors:
            check_shape(_OP, self, "bias", tensors["bias"], (n,))
        if (zeros := tensors.get("weight_zero_point")) is not None:
            check_words(_OP, "weight_zero_point", zeros)
            if zeros.shape[1] != groups:
                check_shape(_OP, self, "weight_zero_point", zeros, (zeros.shape[0], groups))
        if table is not None:
            check_shape(_OP, self, "weight_g_idx", table, (k,))
            check_groups(_OP, "weight_g_idx", table, groups)


def _words(count: int, bits: int) -> int:
    """Words of the dense stream of `count` codes."""
    return -(-count * bits // 32)


def _read_codes(words: torch.Tensor, bits: int, dim: int, count: int) -> torch.Tensor:
    """uint8 codes along `dim` from a dense or, at 3 bits, an aligned stream.

    Raises: ValueError when the words are of neither.
    """
    if 32 % bits:
        per_word = 32 // bits
        aligned = -(-count // per_word)
        spare_clear = words.shape[dim] == aligned and bool(((words >> per_word * bits) == 0).all())
        if words.shape[dim] == aligned and (aligned != _words(count, bits) or spare_clear):
            shifts = torch.arange(per_word, device=words.device) * bits
            codes = (words.movedim(dim, -1).unsqueeze(-1) >> shifts) & (2**bits - 1)
            codes = codes.flatten(-2)[..., :count].to(torch.uint8)
            return codes.movedim(-1, dim).contiguous()
    try:
        return unpack_padded(words, bits, dim, count)
    except ValueError as error:
        raise bad_value(
            _OP,
            f"packed dim {dim}",
            f"be {_words(count, bits)} words for {count} codes of {bits} bits",
            words.shape[dim],
            "check num_bits in the config",
        ) from error
