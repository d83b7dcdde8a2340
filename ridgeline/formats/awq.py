"""The AWQ checkpoint form: qweight, qzeros, scales of one linear layer, 4 bits, in three layouts.

    W[n, k] = scales[k // g, n] * (q[k, n] - zero[k // g, n])        (no minus one, no g_idx)

gemm (read and written)
  qweight  int32 [K, N / 8]    packed along N; nibble i of word (k, c) is column 8 c + ORDER[i],
                               ORDER = 0 2 4 6 1 3 5 7
  qzeros   int32 [R, N / 8]    in the same order
  scales   fp16  [R, N]        R = K / g
gemv (read)
  qweight  int32 [N, K / 8]    packed along K in plain order
  qzeros   int32 [N, Z]        packed along groups, Z = ceil(R / 8) rounded up to a multiple of 1, 2
                               or 4 for groups of 128 and more, 64, 32; padded with zeros
  scales   fp16  [N, 8 Z]
gemv_fast (read)
  qweight  int16 [N / 4, K]    nibble p of word (n4, c) is row 4 n4 + (c mod 64) div 16 and input
                               64 (c div 64) + 32 ((c mod 16) div 8) + c mod 8 + 8 p
  scales   fp16  [8 Z, N]
  qzeros   fp16  [8 Z, N]      -scale * zero

Traps this file settles: a file always holds zero points, so a symmetric weight is stored with
zeros of 8 and reads back as symmetric; a gemv_fast zero is a rounded product and is recovered as
the whole number it came from. Golden word: columns with codes 0..7 -> 0x75316420.
Source of the layout: AutoAWQ checkpoints, read as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ridgeline.core.dtypes import torch_dtype
from ridgeline.core.errors import bad_value, unsupported
from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.bitpack import pack_bits, unpack_bits
from ridgeline.formats.contract import (
    TensorSpec,
    check_axis,
    check_present,
    check_shape,
    check_spec,
    check_split,
    check_weight,
    check_words,
)
from ridgeline.formats.grid import GridSpec, quantize_rtn

VERSIONS = ("gemm", "gemv", "gemv_fast")
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MIDDLE = 8
_ZERO_MULTIPLES = {128: 1, 64: 2, 32: 4}
"""Smallest group size -> what the zero words of a gemv row come in multiples of."""
_NAMES = ("qweight", "qzeros", "scales")


@dataclass(frozen=True, slots=True, kw_only=True)
class AWQFormat:
    """One layer's specification in the AWQ form."""

    bits: int = 4
    """4, the width that the form has."""
    group_size: int | None = 128
    """Inputs that share a scale, a divisor of the layer's inputs; None: the whole row."""
    symmetric: bool = field(default=False, compare=False)
    """The grid of `quantize_ref`. A file holds zero points either way and its config cannot tell,
    so two forms that differ here only are the same form."""
    version: str = "gemm"
    """gemm, or gemv and gemv_fast, which are read only."""
    scale_dtype: str = "float16"
    """Of the stored scales."""

    method = "awq"
    codes_name = "qweight"
    desc_act = False

    def __post_init__(self) -> None:
        check_spec("awq", self.bits, self.group_size, allowed=(4,))
        if self.version not in VERSIONS:
            raise bad_value(
                "awq",
                "version",
                f"be one of {', '.join(VERSIONS)}",
                repr(self.version),
                "convert the checkpoint with the library that wrote it",
            )
        if self.version != "gemm" and self.group_size is not None and self.group_size < 128:
            if self.group_size not in _ZERO_MULTIPLES:
                raise bad_value(
                    "awq",
                    "group_size",
                    f"be 32, 64, or 128 and more in version {self.version}",
                    self.group_size,
                    "the config is damaged",
                )

    # -- sizes ---------------------------------------------------------------------------------

    def group_of(self, k: int) -> int:
        """Inputs of a group for a layer with k inputs."""
        return k if self.group_size is None else self.group_size

    def tensor_specs(self, n: int, k: int, *, bias: bool = False) -> dict[str, TensorSpec]:
        """What a file holds for an [n, k] weight.

        Raises: ValueError when n or k cannot be packed whole.
        """
        rows, columns = {"gemm": (8, 1), "gemv": (1, 8), "gemv_fast": (4, 64)}[self.version]
        for name, count, block in (("out_features", n, rows), ("in_features", k, columns)):
            if count % block or count < 1:
                raise bad_value(
                    "awq",
                    name,
                    f"be a multiple of {block} in version {self.version}",
                    count,
                    "leave this layer unquantized or write compressed-tensors",
                )
        if k % self.group_of(k):
            raise bad_value(
                "awq",
                "in_features",
                f"be a multiple of the group size {self.group_of(k)}",
                k,
                "use a group size that divides it or write compressed-tensors",
            )
        scale = torch_dtype(self.scale_dtype)
        specs = {
            name: TensorSpec(shape=shape, dtype=dtype)
            for name, (shape, dtype) in self._shapes(n, k, scale).items()
        }
        if bias:
            specs["bias"] = TensorSpec(shape=(n,), dtype=scale)
        return specs

    def _shapes(
        self, n: int, k: int, scale: torch.dtype
    ) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
        R, Z = k // self.group_of(k), self._zero_words(k)
        if self.version == "gemm":
            return {
                "qweight": ((k, n // 8), torch.int32),
                "qzeros": ((R, n // 8), torch.int32),
                "scales": ((R, n), scale),
            }
        if self.version == "gemv":
            return {
                "qweight": ((n, k // 8), torch.int32),
                "qzeros": ((n, Z), torch.int32),
                "scales": ((n, 8 * Z), scale),
            }
        return {
            "qweight": ((n // 4, k), torch.int16),
            "qzeros": ((8 * Z, n), scale),
            "scales": ((8 * Z, n), scale),
        }

    def _zero_words(self, k: int) -> int:
        """Words of zero points of a gemv row."""
        group = self.group_of(k)
        multiple = next((m for least, m in _ZERO_MULTIPLES.items() if group >= least), 1)
        return -(-(k // group) // (8 * multiple)) * multiple

    def shape_of(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """(N, K) of the weight that tensors hold."""
        dtype = torch.int16 if self.version == "gemv_fast" else torch.int32
        rows, columns = check_words("awq", "qweight", tensors["qweight"], dtype)
        if self.version == "gemm":
            return 8 * columns, rows
        return (rows, 8 * columns) if self.version == "gemv" else (4 * rows, columns)

    def forward_parts(self) -> tuple[str, ...]:
        """Tensors that a one-row forward needs; zero points only where they differ."""
        return ("qweight", "scales") if self.symmetric else _NAMES

    def grid(self) -> GridSpec:
        """The grid of codes that this format stores."""
        return GridSpec(
            bits=self.bits, symmetric=self.symmetric, scale_dtype=torch_dtype(self.scale_dtype)
        )

    # -- weight <-> codes ----------------------------------------------------------------------

    def quantize_ref(self, w_NK: torch.Tensor) -> QuantizedWeight:
        """Round to nearest on this format's grid."""
        return quantize_rtn(w_NK, self.grid(), self.group_of(w_NK.shape[1]))

    def dequant_ref(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The fp32 weight [N, K] that packed tensors stand for."""
        return self.unpack(tensors).dequantize()

    # -- codes <-> tensors ---------------------------------------------------------------------

    def pack(self, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors of a quantized weight; `unpack` returns it bit for bit.

        Raises: ValueError when the weight is not of this format; NotImplementedError for gemv.
        """
        self._need_gemm("be gemm to be written")
        check_weight("awq", self, weight)
        n, k = weight.shape_nk
        specs = self.tensor_specs(n, k, bias=weight.bias_N is not None)
        if weight.zero_NR is None:
            zero_NR = torch.full_like(weight.scale_NR, _MIDDLE, dtype=torch.uint8)
        else:
            zero_NR = weight.zero_NR
        tensors = {
            "qweight": _pack_columns(weight.code_NK.T),
            "qzeros": _pack_columns(zero_NR.T),
            "scales": weight.scale_NR.T.contiguous(),
        }
        if weight.bias_N is not None:
            tensors["bias"] = weight.bias_N
        assert all(tensors[name].shape == spec.shape for name, spec in specs.items())
        return tensors

    def unpack(self, tensors: dict[str, torch.Tensor]) -> QuantizedWeight:
        """The quantized weight that a checkpoint's tensors hold.

        Raises: ValueError for missing tensors or shapes that do not fit each other.
        """
        self.check_tensors(tensors)
        k = self.shape_of(tensors)[1]
        R = k // self.group_of(k)
        words, scales = tensors["qweight"], tensors["scales"]
        if self.version == "gemm":
            code_NK, scale_NR = _unpack_columns(words).T, scales.T
        elif self.version == "gemv":
            code_NK, scale_NR = unpack_bits(words, 4, 1), scales[:, :R]
        else:
            code_NK, scale_NR = _unpack_fast(words), scales[:R].T
        return QuantizedWeight(
            code_NK=code_NK.contiguous(),
            scale_NR=scale_NR.contiguous(),
            zero_NR=self.zeros_of(tensors),
            bits=self.bits,
            group_size=self.group_of(k),
            bias_N=tensors.get("bias"),
        )

    def zeros_of(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """uint8 [N, R] zero points; None where all are the middle one.

        Raises: ValueError where a gemv_fast zero is no whole multiple of its scale.
        """
        k = self.shape_of(tensors)[1]
        R, stored = k // self.group_of(k), tensors["qzeros"]
        if self.version == "gemm":
            zero_NR = _unpack_columns(stored).T
        elif self.version == "gemv":
            zero_NR = unpack_bits(stored, 4, 1)[:, :R]
        else:
            zero_NR = _whole_zeros(stored[:R], tensors["scales"][:R]).T
        return None if bool((zero_NR == _MIDDLE).all()) else zero_NR.contiguous()

    # -- sharding ------------------------------------------------------------------------------

    def shard_dims(self, axis: str) -> dict[str, int | None]:
        """The dim of each tensor that a tensor-parallel layer splits; None: every rank holds it
        whole.

        axis: "column" splits N, "row" splits K. Raises: NotImplementedError for gemv layouts.
        """
        check_axis("awq", axis)
        self._need_gemm("be gemm to be split")
        if axis == "column":
            return {"qweight": 1, "qzeros": 1, "scales": 1, "bias": 0}
        grouped = None if self.group_size is None else 0
        return {"qweight": 0, "qzeros": grouped, "scales": grouped, "bias": None}

    def shard_multiple(self, axis: str) -> int:
        """What a rank's share of N (column) or K (row) must be a multiple of."""
        return 8 if axis == "column" else self.group_size or 1

    def shard(
        self, tensors: dict[str, torch.Tensor], axis: str, rank: int, ranks: int
    ) -> dict[str, torch.Tensor]:
        """One rank's tensors of a layer split over N (column) or K (row).

        Under a row split every rank keeps the bias; the caller adds it once.
        Raises: ValueError when a rank's share is no multiple of shard_multiple.
        """
        dims = self.shard_dims(axis)
        n, k = self.shape_of(tensors)
        check_split("awq", axis, n if axis == "column" else k, ranks, self.shard_multiple(axis))
        parts = {}
        for name, tensor in tensors.items():
            dim = dims[name]
            parts[name] = tensor if dim is None else tensor.chunk(ranks, dim)[rank].contiguous()
        return parts

    # -- checks --------------------------------------------------------------------------------

    def _need_gemm(self, must: str) -> None:
        if self.version != "gemm":
            raise unsupported(
                "awq", "version", must, repr(self.version), "convert the checkpoint to gemm first"
            )

    def check_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Whether a layer's tensors fit this form and each other. Raises: ValueError."""
        check_present("awq", tensors, _NAMES)
        n, k = self.shape_of(tensors)
        for name, spec in self.tensor_specs(n, k, bias="bias" in tensors).items():
            check_shape("awq", self, name, tensors[name], spec.shape)
            if spec.dtype == torch.int32:
                check_words("awq", name, tensors[name])


def _pack_columns(codes_XN: torch.Tensor) -> torch.Tensor:
    """int32 [X, N / 8] words of codes [X, N] in the gemm order."""
    X, N = codes_XN.shape
    ordered = codes_XN.reshape(X, N // 8, 8)[..., list(_ORDER)]
    return pack_bits(ordered.reshape(X, N), 4, 1, op="awq")


def _unpack_columns(words: torch.Tensor) -> torch.Tensor:
    """uint8 [X, N] codes of words in the gemm order."""
    stored = unpack_bits(words, 4, 1)
    X, N = stored.shape
    place = [_ORDER.index(column) for column in range(8)]
    return stored.reshape(X, N // 8, 8)[..., place].reshape(X, N)


def _unpack_fast(words: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] codes of gemv_fast's 16-bit words [N / 4, K]."""
    rows, K = words.shape
    nibbles = (words.int().unsqueeze(-1) >> torch.arange(0, 16, 4, device=words.device)) & 15
    # c = 64 block + 16 row + 8 half + low; k = 64 block + 32 half + 8 nibble + low
    split = nibbles.to(torch.uint8).reshape(rows, K // 64, 4, 2, 8, 4)
    return split.permute(0, 2, 1, 3, 5, 4).reshape(4 * rows, K)


def _whole_zeros(scaled_RN: torch.Tensor, scale_RN: torch.Tensor) -> torch.Tensor:
    """Zero points from -scale * zero, which was rounded to 16 bits."""
    scale = scale_RN.float()
    zero = -scaled_RN.float() / torch.where(scale == 0, 1.0, scale)
    whole = zero.round()
    good = torch.isfinite(zero) & ((zero - whole).abs() < 0.1) & (whole >= 0) & (whole <= 15)
    if not bool(good.all()):
        raise bad_value(
            "awq",
            "qzeros",
            "hold -scale * zero with whole zeros from 0 to 15",
            "other values",
            "the file is damaged",
        )
    return whole.to(torch.uint8)
