"""W4A16 in Triton: the portable GPU path, Ampere and later, any M.

    out[m, n] = sum_k act[m, k] * (scale[n, group] * (code[n, k] - zero[n, group]))  (+ bias[n])

It reads the packed layout of layout.py without moving a bit: a word holds 2 outputs x 4 inputs, so
a tile of words is eight code planes, one a nibble; plane (hr, hk, e) belongs to outputs
32 T + 16 rt + 8 hr + g and inputs 64 C + 16 i + 8 hk + 2 t + e. A tile is multiplied plane by
plane: the activations are read at the plane's inputs (a sum over k does not mind their order), and
the two output halves have an accumulator each, stored at the plane's outputs.

Bytes a tile: BLOCK_N x BLOCK_K / 2 of codes read once; activations BLOCK_M x BLOCK_K x 2. Bound by
bytes below some 40 rows, by arithmetic above. Weights are rounded to the activations' dtype after
the scale (as a dequantized linear does), sums are fp32. Split-K writes fp32 partial sums that are
added in a fixed order; the split depends on (N, K, M), and on N and K alone with batch invariance.

Legend: M rows, N outputs, K slots; r = (T, rt, g) and c = (C, i, t) index words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.kernels.w4a16 import layout
from ridgeline.kernels.w4a16.config import TritonConfig, triton_config
from ridgeline.kernels.w4a16.layout import (
    PackedW4,
    from_tensors,
    gather_inputs,
    pack,
    to_tensors,
)
from ridgeline.kernels.w4a16.prepared import Prepared
from ridgeline.kernels.w4a16.ref import finish


@triton.jit
def _plane(word, hr: tl.constexpr, hk: tl.constexpr, e: tl.constexpr):
    """Codes of one nibble of every word, as fp32."""
    return ((word >> (8 * hk + 4 * hr + 16 * e)) & 15).to(tl.float32)


@triton.jit
def _half(
    acc, word, scale_ptr, zero_ptr, act_row, mask_m, r, c_k, K, R, hr: tl.constexpr,
    GROUP: tl.constexpr, ONE_GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
):  # fmt: skip
    """Add one output half's four planes to its accumulator; c_k is the input of plane (0, 0)."""
    row = (r // 16) * R * 32 + (r % 8) * 4 + (r // 8 % 2) * 2 + hr
    if ONE_GROUP:
        at = row[:, None] + (tl.min(c_k, 0) // GROUP) * 32
    else:
        at = row[:, None] + (c_k // GROUP)[None, :] * 32
    scale = tl.load(scale_ptr + at).to(tl.float32)
    zero = tl.load(zero_ptr + at).to(tl.float32) if HAS_ZERO else 8.0
    for plane in tl.static_range(4):
        k = c_k + 8 * (plane // 2) + plane % 2
        x = tl.load(act_row + k[None, :], mask=mask_m[:, None] & (k < K)[None, :], other=0.0)
        w = (_plane(word, hr, plane // 2, plane % 2) - zero) * scale
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc)
    return acc


@triton.jit
def _w4a16_kernel(
    act_ptr, word_ptr, scale_ptr, zero_ptr, out_ptr, M, N, K, C64, R, stride_am, stride_om,
    stride_os, k_tiles, GROUP: tl.constexpr, ONE_GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M rows x 2 BLOCK_R outputs over k_tiles tiles of 4 BLOCK_C slots."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    mask_m = m < M
    mask_r = (r // 16) * 32 < N
    r_safe = tl.where(mask_r, r, 0)
    act_row = act_ptr + m.to(tl.int64)[:, None] * stride_am
    # word ((T C64 + C) 2 + rt) 128 + (4 g + t) 4 + i
    word_row = (r_safe // 16).to(tl.int64) * C64 * 256 + (r_safe // 8 % 2) * 128 + r_safe % 8 * 16
    low = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    high = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    first = split * k_tiles
    for tile in range(first, tl.minimum(first + k_tiles, C64 * 16 // BLOCK_C)):
        c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        C, i, t = c // 16, c // 4 % 4, c % 4
        word = tl.load(word_ptr + word_row[:, None] + (C * 256 + t * 4 + i)[None, :])
        c_k = C * 64 + i * 16 + t * 2
        low = _half(
            low, word, scale_ptr, zero_ptr, act_row, mask_m, r_safe, c_k, K, R, 0,
            GROUP, ONE_GROUP, HAS_ZERO,
        )  # fmt: skip
        high = _half(
            high, word, scale_ptr, zero_ptr, act_row, mask_m, r_safe, c_k, K, R, 1,
            GROUP, ONE_GROUP, HAS_ZERO,
        )  # fmt: skip
    n = (r // 16) * 32 + (r // 8 % 2) * 16 + r % 8
    out_row = out_ptr + split.to(tl.int64) * stride_os + m.to(tl.int64)[:, None] * stride_om
    tl.store(out_row + n[None, :], low, mask=mask_m[:, None] & (mask_r & (n < N))[None, :])
    n = n + 8
    tl.store(out_row + n[None, :], high, mask=mask_m[:, None] & (mask_r & (n < N))[None, :])


def prepare(weight, dtype: torch.dtype, *, silu_mul: bool = False) -> tuple[torch.Tensor, ...]:
    """The packed layout as tensors (layout.to_tensors); `weight` may be packed already."""
    return to_tensors(weight if isinstance(weight, PackedW4) else pack(weight))


def restore_codes(prepared: Prepared) -> torch.Tensor:
    """code_NK of the weight that was prepared."""
    return layout.restore_codes(prepared.tensors, n=prepared.n, k=prepared.k)


def forward(
    act_MK: torch.Tensor,
    prepared: Prepared,
    bias_N: torch.Tensor | None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """out_MN in the activation's dtype, fp32 sums, one rounding after bias and silu_mul.

    Shapes: act_MK [M, K] contiguous in K. Numerics: weights rounded once to the activation's dtype.
    """
    packed = from_tensors(prepared.tensors, n=prepared.n, k=prepared.k)
    M = act_MK.shape[0]
    if M == 0:
        return act_MK.new_empty(0, prepared.columns)
    config = triton_config(M, packed.n, packed.k_padded, packed.packed_group, batch_invariant)
    acc_MN = launch(gather_inputs(act_MK, packed), packed, config)
    return finish(acc_MN, bias_N, prepared.silu_mul, act_MK.dtype)


def launch(act_MK: torch.Tensor, packed: PackedW4, config: TritonConfig) -> torch.Tensor:
    """Sums in fp32 [M, N]; splits added in order."""
    M, N = act_MK.shape[0], packed.n
    partial = torch.empty(config.splits, M, N, dtype=torch.float32, device=act_MK.device)
    tile_k = 4 * config.block_c
    tiles = triton.cdiv(packed.k_padded, tile_k)
    scale = packed.scale_TRgj
    zero = packed.zero_TRgj if packed.zero_TRgj is not None else scale
    grid = (
        triton.cdiv(M, config.block_m),
        triton.cdiv(packed.n_padded // 2, config.block_r),
        config.splits,
    )
    _w4a16_kernel[grid](
        act_MK, packed.word_TCrli, scale, zero, partial,
        M, N, act_MK.shape[1], packed.k_padded // 64, scale.shape[1],
        act_MK.stride(0), partial.stride(1), partial.stride(0),
        triton.cdiv(tiles, config.splits),
        GROUP=packed.packed_group,
        ONE_GROUP=packed.packed_group % tile_k == 0 or packed.per_channel,
        HAS_ZERO=packed.zero_TRgj is not None,
        BLOCK_M=config.block_m, BLOCK_R=config.block_r, BLOCK_C=config.block_c,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if config.splits == 1:
        return partial[0]
    total = partial[0]
    for split in range(1, config.splits):
        total = total + partial[split]
    return total
