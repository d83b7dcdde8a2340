"""W4A16 on a CPU with what PyTorch does well.

Two layouts are made at load: PyTorch's own int4 packing for few rows (memory-bound: it reads half a
byte a weight), and the weight widened once for many rows (compute-bound: a plain matmul wins). The
int4 kernel computes (code - 8) * s + z with s, z in the activation's dtype, so it is taken only
where that is exact: bf16 activations, 4 bits, symmetric, scales that bf16 holds exactly. Elsewhere
the widened weight serves every batch.
Measured, 2048 x 2048, 2 threads: AVX-512 with bf16 instructions, int4 218 us against bf16 348 at
one row, bf16 ahead from 16 rows; AVX2, int4 362 us against 472 at one row and ahead to 16 rows, a
float32 matmul ahead from 32 (bf16 is emulated there, so the wide weight is float32).
Widening costs 2 (bf16) or 4 (float32) bytes a weight of memory beside the half byte packed.
Numerics: fp32 accumulation inside; one-hot activations return the weight bit for bit; with a bias
the int4 path rounds to the activation's dtype before the bias is added.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ridgeline.formats.base import QuantizedWeight
from ridgeline.kernels.w4a16.prepared import Prepared
from ridgeline.kernels.w4a16.ref import finish

_INT4_GROUPS = (32, 64, 128, 256)
_INT4_COLUMNS = 16
"""Output features come in multiples of this in PyTorch's packing."""


@functools.cache
def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 natively (x86; taken as no where PyTorch does not say)."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    asked = (getattr(torch.cpu, name, None) for name in names)
    return any(ask is not None and bool(ask()) for ask in asked)


def int4_refusal(weight: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why PyTorch's int4 matmul cannot hold this weight exactly, or None."""
    N, K = weight.shape_nk
    if dtype != torch.bfloat16:
        return f"fast with bfloat16 activations only, not {dtype}"
    if weight.bits != 4:
        return f"4 bits only, not {weight.bits}"
    if weight.zero_NR is not None:
        return "zero points are rounded to bfloat16"
    if weight.group_size not in _INT4_GROUPS or K % weight.group_size:
        return f"groups of {_INT4_GROUPS} that divide {K} only, not {weight.group_size}"
    if N % _INT4_COLUMNS:
        return f"output features in multiples of {_INT4_COLUMNS} only, not {N}"
    if weight.group_of_K is not None and not _groups_are_full(weight):
        return "act-order groups of unequal size"
    scale = weight.scale_NR.float()
    if not torch.equal(scale.to(torch.bfloat16).float(), scale):
        return "scales have more bits than bfloat16"
    return None


def _groups_are_full(weight: QuantizedWeight) -> bool:
    counts = torch.bincount(weight.groups_K(), minlength=weight.scale_NR.shape[1])
    return bool((counts == weight.group_size).all())


def prepare(
    weight: QuantizedWeight, dtype: torch.dtype, *, silu_mul: bool = False
) -> tuple[torch.Tensor, ...]:
    """(wide_NK,) or (wide_NK, int4 words, scale and zero [R, N, 2], input order [K] or empty)."""
    wide_dtype = dtype if dtype == torch.float32 or _wide_is_fast(dtype) else torch.float32
    wide_NK = weight.dequantize(dtype).to(wide_dtype)
    if int4_refusal(weight, dtype) is not None:
        return (wide_NK,)
    code_NK = weight.code_NK
    order_K = torch.empty(0, dtype=torch.int64)
    if weight.group_of_K is not None:
        order_K = torch.argsort(weight.groups_K(), stable=True)
        code_NK = code_NK[:, order_K]
    words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(code_NK.to(torch.int32), 1)
    scale_RN = weight.scale_NR.T.to(dtype)
    scale_zero = torch.stack([scale_RN, torch.zeros_like(scale_RN)], dim=-1).contiguous()
    return wide_NK, words, scale_zero, order_K


def _wide_is_fast(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and has_fast_bf16()


def decode_bytes(prepared: Prepared) -> int:
    """Bytes of the layout that `forward` reads for one row: the int4 words with their scales where
    they were made, else the whole widened weight."""
    wide_NK, *int4 = prepared.tensors
    return sum(t.numel() * t.element_size() for t in (int4 or [wide_NK]))


def rows_for_wide() -> int:
    """Rows from which the widened weight is faster than the int4 kernel (measured; module
    docstring)."""
    return 16 if has_fast_bf16() else 32


def forward(
    act_MK: torch.Tensor,
    prepared: Prepared,
    bias_N: torch.Tensor | None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Few rows through the int4 kernel where the weight allows, else a matmul on the wide
    weight."""
    if batch_invariant and act_MK.shape[0] > 1:
        rows = [forward(row, prepared, bias_N) for row in act_MK.split(1)]
        return torch.cat(rows)
    has_int4 = len(prepared.tensors) > 1
    if has_int4 and act_MK.shape[0] < rows_for_wide():
        return _int4(act_MK, prepared, bias_N)
    wide_NK = prepared.tensors[0]
    simple = bias_N is None and not prepared.silu_mul
    if wide_NK.dtype == act_MK.dtype and simple:
        return F.linear(act_MK, wide_NK)
    acc_MN = F.linear(act_MK.to(wide_NK.dtype), wide_NK).float()
    return finish(acc_MN, bias_N, prepared.silu_mul, act_MK.dtype)


def _int4(act_MK: torch.Tensor, prepared: Prepared, bias_N: torch.Tensor | None) -> torch.Tensor:
    _, words, scale_zero, order_K = prepared.tensors
    if order_K.numel():
        act_MK = act_MK[:, order_K]
    out_MN = torch.ops.aten._weight_int4pack_mm_for_cpu(
        act_MK.contiguous(), words, prepared.group_size, scale_zero
    )
    if bias_N is None and not prepared.silu_mul:
        return out_MN
    return finish(out_MN.float(), bias_N, prepared.silu_mul, act_MK.dtype)
