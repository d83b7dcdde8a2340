"""The GPTQ checkpoint form: qweight, qzeros, scales, g_idx of one linear layer.

    W[n, k] = scales[g_idx[k], n] * (q[k, n] - zero[g_idx[k], n])

qweight  int32 [K bits / 32, N]   codes packed along K
qzeros   int32 [R, N bits / 32]   zero points packed along N: "gptq" (v1) stores zero - 1 modulo
                                  2^bits, "gptq_v2" stores zero
scales   fp16  [R, N]             R = ceil(K / group_size)
g_idx    int32 [K]                group of each input; k // group_size unless act-order

Traps this file settles (each has a test with a worked word):
- v1 with a zero point of 0 has two incompatible writers: per field (0 - 1 -> 2^bits - 1) and a
  whole- word subtraction of 0x11111111 that borrows from the next field. 3 bits are always per
  field; at 2, 4 and 8 bits a file by GPTQModel is whole-word, any other per field. We never write
  v1 with such a zero.
- A symmetric file labelled v1 that holds v2 zeros (or the reverse): every field tells, the label
  does not.
Source of the layout: AutoGPTQ / GPTQModel checkpoints, read as data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ridgeline.core.dtypes import torch_dtype
from ridgeline.core.errors import bad_value
from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.bitpack import add_to_words, codes_per_block, pack_bits, unpack_bits
from ridgeline.formats.contract import (
    TensorSpec,
    check_axis,
    check_groups,
    check_present,
    check_spec,
    check_split,
    check_weight,
    check_words,
)
from ridgeline.formats.grid import GridSpec, quantize_rtn

_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQFormat:
    """One layer's specification in the GPTQ form."""

    bits: int = 4
    """2, 3, 4 or 8."""
    group_size: int | None = 128
    """Inputs that share a scale; None: one group for the whole row ("-1" in files)."""
    symmetric: bool = True
    desc_act: bool = False
    """Groups follow the activation order, so g_idx is not k // group_size."""
    checkpoint_format: str = "gptq"
    """gptq (v1 zeros: stored minus one) or gptq_v2 (stored as they are)."""
    scale_dtype: str = "float16"
    """Of the stored scales."""
    writer: str = field(default="ridgeline", compare=False)
    """Who wrote the file, as its config says; decides how v1 asymmetric zeros are read."""

    method = "gptq"
    codes_name = "qweight"

    def __post_init__(self) -> None:
        check_spec("gptq", self.bits, self.group_size)
        if self.checkpoint_format not in ("gptq", "gptq_v2"):
            raise bad_value(
                "gptq",
                "checkpoint_format",
                "be gptq or gptq_v2",
                repr(self.checkpoint_format),
                "convert the checkpoint with the library that wrote it",
            )

    # -- sizes ---------------------------------------------------------------------------------

    def group_of(self, k: int) -> int:
        """Inputs of a group for a layer with k inputs."""
        return k if self.group_size is None else min(self.group_size, k)

    def tensor_specs(self, n: int, k: int, *, bias: bool = False) -> dict[str, TensorSpec]:
        """What `pack` returns for an [n, k] weight.

        Raises: ValueError when n or k cannot be packed whole.
        """
        block = codes_per_block(self.bits)
        for name, count in (("out_features", n), ("in_features", k)):
            if count % block or count < 1:
                raise bad_value(
                    "gptq",
                    name,
                    f"be a multiple of {block} at {self.bits} bits",
                    count,
                    "leave this layer unquantized or choose another width",
                )
        R = -(-k // self.group_of(k))
        scale = torch_dtype(self.scale_dtype)
        specs = {
            "qweight": TensorSpec(shape=(k * self.bits // 32, n), dtype=torch.int32),
            "qzeros": TensorSpec(shape=(R, n * self.bits // 32), dtype=torch.int32),
            "scales": TensorSpec(shape=(R, n), dtype=scale),
            "g_idx": TensorSpec(shape=(k,), dtype=torch.int32),
        }
        if bias:
            specs["bias"] = TensorSpec(shape=(n,), dtype=scale)
        return specs

    def shape_of(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """(N, K) of the weight that tensors hold."""
        words_K, n = check_words("gptq", "qweight", tensors["qweight"])
        return n, words_K * 32 // self.bits

    def forward_parts(self) -> tuple[str, ...]:
        """Tensors that a one-row forward needs; zero points only where they differ."""
        zeros = () if self.symmetric else ("qzeros",)
        return ("qweight", "scales", *zeros, *(("g_idx",) if self.desc_act else ()))

    def grid(self) -> GridSpec:
        """The grid of codes that this format stores."""
        return GridSpec(
            bits=self.bits, symmetric=self.symmetric, scale_dtype=torch_dtype(self.scale_dtype)
        )

    # -- weight <-> codes ----------------------------------------------------------------------

    def quantize_ref(self, w_NK: torch.Tensor) -> QuantizedWeight:
        """Round to nearest on this format's grid (groups in their natural order)."""
        return quantize_rtn(w_NK, self.grid(), self.group_of(w_NK.shape[1]))

    def dequant_ref(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The fp32 weight [N, K] that packed tensors stand for."""
        return self.unpack(tensors).dequantize()

    # -- codes <-> tensors ---------------------------------------------------------------------

    def pack(self, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors of a quantized weight; `unpack` returns it bit for bit.

        Raises: ValueError when the weight is not of this format, or has zero points of 0 in v1.
        """
        n, k = weight.shape_nk
        check_weight("gptq", self, weight)
        specs = self.tensor_specs(n, k, bias=weight.bias_N is not None)
        if weight.zero_NR is None:
            zero_RN = torch.full_like(weight.scale_NR, 2 ** (self.bits - 1), dtype=torch.uint8).T
        else:
            zero_RN = weight.zero_NR.T
        tensors = {
            "qweight": pack_bits(weight.code_NK.T, self.bits, 0, op="gptq"),
            "qzeros": self.zero_words(zero_RN),
            "scales": weight.scale_NR.T.contiguous(),
            "g_idx": weight.groups_K().to(torch.int32),
        }
        if weight.bias_N is not None:
            tensors["bias"] = weight.bias_N
        assert all(tensors[name].shape == spec.shape for name, spec in specs.items())
        return tensors

    def zero_words(self, zero_RN: torch.Tensor) -> torch.Tensor:
        """qzeros of uint8 zero points [R, N]. Raises: ValueError for a 0 in v1."""
        if self.checkpoint_format == "gptq":
            if bool((zero_RN == 0).any()):
                raise bad_value(
                    "gptq",
                    "zero_NR",
                    "have no 0 in checkpoint_format gptq (v1), whose readers disagree about 0 - 1",
                    "a zero point of 0",
                    "write checkpoint_format gptq_v2",
                )
            zero_RN = zero_RN - 1
        return pack_bits(zero_RN, self.bits, 1, op="gptq")

    def unpack(self, tensors: dict[str, torch.Tensor]) -> QuantizedWeight:
        """The quantized weight that a checkpoint's tensors hold.

        Raises: ValueError for missing tensors or shapes that do not fit each other.
        """
        self.check_tensors(tensors)
        code_NK = unpack_bits(tensors["qweight"], self.bits, 0).T.contiguous()
        K = code_NK.shape[1]
        group_size = self.group_of(K)
        group_of_K = tensors.get("g_idx")
        natural = torch.arange(K, device=code_NK.device, dtype=torch.int32) // group_size
        if group_of_K is not None and torch.equal(group_of_K.to(torch.int32), natural):
            group_of_K = None
        return QuantizedWeight(
            code_NK=code_NK,
            scale_NR=tensors["scales"].T.contiguous(),
            zero_NR=self.zeros_of(tensors),
            bits=self.bits,
            group_size=group_size,
            group_of_K=group_of_K,
            bias_N=tensors.get("bias"),
        )

    def zeros_of(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """uint8 [N, R] zero points; None where all are the middle one."""
        zero_RN = self._read_zeros(tensors["qzeros"])
        return None if bool((zero_RN == 2 ** (self.bits - 1)).all()) else zero_RN.T.contiguous()

    def _read_zeros(self, words: torch.Tensor) -> torch.Tensor:
        """uint8 zero points [R, N] from the stored words, whatever the label says of symmetric
        ones."""
        stored = unpack_bits(words, self.bits, 1)
        middle = 2 ** (self.bits - 1)
        if self.symmetric and bool((stored == middle).all()):
            return stored
        if self.symmetric and bool((stored == middle - 1).all()):
            return stored + 1
        if self.checkpoint_format == "gptq_v2":
            return stored
        if self.bits in _ONES and self.writer.lower().startswith("gptqmodel"):
            return unpack_bits(add_to_words(words, _ONES[self.bits]), self.bits, 1)
        return (stored + 1) & (2**self.bits - 1)

    # -- sharding ------------------------------------------------------------------------------

    def shard_dims(self, axis: str) -> dict[str, int | None]:
        """The dim of each tensor that a tensor-parallel layer splits; None: every rank holds it
        whole.

        axis: "column" splits N, "row" splits K. Under act-order a row-split rank may need any
        group, so scales and zero points stay whole and g_idx keeps its numbers.
        """
        check_axis("gptq", axis)
        if axis == "column":
            return {"qweight": 1, "qzeros": 1, "scales": 1, "g_idx": None, "bias": 0}
        grouped = None if self.desc_act or self.group_size is None else 0
        return {"qweight": 0, "qzeros": grouped, "scales": grouped, "g_idx": 0, "bias": None}

    def shard_multiple(self, axis: str) -> int:
        """What a rank's share of N (column) or K (row) must be a multiple of."""
        block = codes_per_block(self.bits)
        if axis == "row" and not self.desc_act and self.group_size is not None:
            return math.lcm(block, self.group_size)
        return block

    def shard(
        self, tensors: dict[str, torch.Tensor], axis: str, rank: int, ranks: int
    ) -> dict[str, torch.Tensor]:
        """One rank's tensors of a layer split over N (column) or K (row).

        Under a row split every rank keeps the bias; the caller adds it once.
        Raises: ValueError when a rank's share is no multiple of shard_multiple.
        """
        n, k = self.shape_of(tensors)
        dims = self.shard_dims(axis)
        check_split("gptq", axis, n if axis == "column" else k, ranks, self.shard_multiple(axis))
        parts = {}
        for name, tensor in tensors.items():
            dim = dims[name]
            parts[name] = tensor if dim is None else tensor.chunk(ranks, dim)[rank].contiguous()
        if axis == "row" and dims["scales"] is not None and "g_idx" in parts:
            parts["g_idx"] = parts["g_idx"] - rank * parts["scales"].shape[0]
        return parts

    # -- checks --------------------------------------------------------------------------------

    def check_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Whether a layer's tensors fit this form and each other. Raises: ValueError."""
        check_present("gptq", tensors, ("qweight", "qzeros", "scales"))
        n, k = self.shape_of(tensors)
        specs = self.tensor_specs(n, k, bias="bias" in tensors)
        g_idx = tensors.get("g_idx")
        groups = tensors["scales"].shape[0]
        # A row shard of an act-order layer holds few inputs and every group.
        whole = g_idx is not None and self.desc_act and groups > specs["scales"].shape[0]
        for name, spec in specs.items():
            if name not in tensors:
                continue
            shape = tuple(tensors[name].shape)
            if whole and name in ("scales", "qzeros"):
                shape = (spec.shape[0], *shape[1:]) if shape[0] == groups else shape
            if shape != spec.shape:
                raise bad_value(
                    "gptq",
                    name,
                    f"have shape {list(spec.shape)} at {self.bits} bits, group {self.group_of(k)}",
                    list(tensors[name].shape),
                    "check bits and group_size in the config",
                )
        if g_idx is not None:
            check_groups("gptq", "g_idx", g_idx, groups)
