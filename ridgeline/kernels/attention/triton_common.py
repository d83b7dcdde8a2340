"""What the Triton attention kernels share: arguments, places, scores, masks, dropout.

Legend (device code): i and j are the query and key index inside a sequence; m and n are tile
starts; S and T are the lengths in force (used lengths where given); T - S is the bottom-right
diagonal; `_log2` is a score times log2(e), so that exp2 is the only exponential.

`Call` holds what varies from call to call (pointers, sizes, scalars); `Variant` holds what is
compiled in. An option that is off is None in `Call` or False in `Variant` and costs nothing.

Addresses are 2^31-safe: the start of a tile is a 64-bit product, offsets inside a tile are 32-bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


class Call(NamedTuple):
    """Runtime arguments of every kernel; a pointer that is None is an option that is off."""

    cu_q: Any
    cu_k: Any
    used_q: Any
    used_k: Any
    pad_k: Any
    kv_rows: Any
    pages: Any
    slopes: Any
    sinks: Any
    bias: Any
    page_size: int
    stride_pages: int
    stride_slopes_b: int
    bias_strides: tuple[int, int, int]
    """batch, head, query; the key stride is 1."""
    seqlen_q: int
    seqlen_k: int
    left: int
    right: int
    scale: float
    scale_log2: float
    softcap: float
    keep_scale: float
    """1 / (1 - dropout_p)."""
    threshold: int
    """Words below it are dropped (rng.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is compiled into a kernel: the problem's kind, then the tile."""

    head_dim: int
    head_dim_v: int
    group: int
    """Query heads a key/value head."""
    left: bool
    right: bool
    fold: bool
    """The score is only scaled, by a positive number: the scale rides in exp2's multiply-add."""
    softcap: bool
    dropout: bool
    precision: str
    """Of products of fp32 inputs (tl.dot's input_precision)."""
    block_m: int
    block_n: int
    block_d: int
    block_dv: int
    num_stages: int
    tma: bool
    branch: bool = False
    """One loop with a uniform branch for the mask, in place of masked and unmasked loops."""
    whole_m: bool = False
    """Every tile of queries lies inside its sequence."""
    whole_n: bool = False
    """Every tile of keys lies inside its sequence."""
    direct: bool = False
    """Decode: one split, which writes the results."""


@triton.jit
def sequence(c, b):
    """Where sequence b lies: row of q, start, stored and used length; row of k, start, T, pad."""
    row_q, start_q = b.to(tl.int64), tl.cast(0, tl.int64)
    S = tl.cast(c.seqlen_q, tl.int32)
    if c.cu_q is not None:
        row_q = row_q * 0
        start_q = tl.load(c.cu_q + b).to(tl.int64)
        S = (tl.load(c.cu_q + b + 1).to(tl.int64) - start_q).to(tl.int32)
    stored = S
    if c.used_q is not None:
        S = tl.load(c.used_q + b).to(tl.int32)
    row_k, start_k = b.to(tl.int64), tl.cast(0, tl.int64)
    if c.kv_rows is not None:
        row_k = tl.load(c.kv_rows + b).to(tl.int64)
    T = tl.cast(c.seqlen_k, tl.int32)
    if c.cu_k is not None:
        row_k = row_k * 0
        start_k = tl.load(c.cu_k + b).to(tl.int64)
        T = (tl.load(c.cu_k + b + 1).to(tl.int64) - start_k).to(tl.int32)
    if c.used_k is not None:
        T = tl.load(c.used_k + b).to(tl.int32)
    pad = tl.cast(0, tl.int32)
    if c.pad_k is not None:
        pad = tl.minimum(tl.load(c.pad_k + b).to(tl.int32), T)
    return row_q, start_q, stored, S, row_k, start_k, T, pad


@triton.jit
def spans(low, high, full_low, full_high, BLOCK: tl.constexpr):
    """Tile-aligned (first, full_first, full_end, end): [full_first, full_end) needs no mask.

    [low, high) is what anything in the tile sees, [full_low, full_high) what everything in it sees.
    """
    high = tl.maximum(high, 0)
    first = tl.maximum(low, 0) // BLOCK * BLOCK
    full_first = (tl.maximum(full_low, 0) + BLOCK - 1) // BLOCK * BLOCK
    full_first = tl.minimum(tl.maximum(full_first, first), (high + BLOCK - 1) // BLOCK * BLOCK)
    full_end = tl.maximum(tl.maximum(full_high, 0) // BLOCK * BLOCK, full_first)
    return first, full_first, full_end, high


@triton.jit
def key_spans(m, S, T, pad, c, v: tl.constexpr):
    """`spans` over the keys of the queries [m, m + block_m)."""
    last = tl.minimum(m + v.block_m, S) - 1
    low, full_low, high, full_high = pad, pad, T, T
    if v.left:
        low = tl.maximum(low, m + T - S - c.left)
        full_low = tl.maximum(full_low, last + T - S - c.left)
    if v.right:
        high = tl.minimum(high, last + T - S + c.right + 1)
        full_high = tl.minimum(full_high, m + T - S + c.right + 1)
    return spans(low, high, full_low, full_high, v.block_n)


@triton.jit
def query_spans(n, S, T, pad, c, v: tl.constexpr):
    """`spans` over the queries of the keys [n, n + block_n)."""
    last = tl.minimum(n + v.block_n, T) - 1
    low, full_low, high, full_high = tl.cast(0, tl.int32), tl.cast(0, tl.int32), S, S
    if v.right:
        low = tl.maximum(low, n - (T - S) - c.right)
        full_low = tl.maximum(full_low, last - (T - S) - c.right)
    if v.left:
        high = tl.minimum(high, last - (T - S) + c.left + 1)
        full_high = tl.minimum(full_high, n - (T - S) + c.left + 1)
    if c.pad_k is not None:
        high = tl.where(n + v.block_n > pad, high, 0)
        full_high = tl.where(n >= pad, full_high, 0)
    full_high = tl.where(n + v.block_n <= T, full_high, 0)
    high = tl.where(n < T, high, 0)
    return spans(low, high, full_low, full_high, v.block_m)


@triton.jit
def visible(i, j, S, T, pad, c, v: tl.constexpr):
    """Whether key j exists and query i sees it (whether i exists is not asked)."""
    ok = (j < T) & (i >= 0)
    if c.pad_k is not None:
        ok &= j >= pad
    if v.right:
        ok &= j - i <= T - S + c.right
    if v.left:
        ok &= j - i >= T - S - c.left
    return ok


@triton.jit
def tanh(x):
    """By exp2, saturating to +-1 without an overflow."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def score_log2(qk, i, j, S, T, b, h, c, v: tl.constexpr):
    """(score in log2 units, derivative of the soft cap); with v.fold the product, not yet scaled.

    h is a scalar, or [rows, 1] where rows of several heads are packed.
    """
    damp = 1.0
    if v.fold:
        s = qk
    else:
        s = qk * c.scale
        if v.softcap:
            t = tanh(s / c.softcap)
            s = t * c.softcap
            damp = 1.0 - t * t
        if c.bias is not None:
            stride_b, stride_h, stride_s = c.bias_strides
            base = c.bias + b.to(tl.int64) * stride_b
            ptrs = base + h.to(tl.int64) * stride_h + i.to(tl.int64) * stride_s + j
            s += tl.load(ptrs, mask=(i < S) & (j < T), other=0.0).to(tl.float32)
        if c.slopes is not None:
            slope = tl.load(c.slopes + b * c.stride_slopes_b + h)
            s -= slope * tl.abs(i + T - S - j).to(tl.float32)
        s = s * LOG2E
    return s, damp


@triton.jit
def dropout_keep(i, j, b, h, seed, offset, c):
    """True where an entry of P is kept (rng.py); i and j broadcast against each other."""
    zero = (i * 0).to(tl.uint32)
    r0, r1, _, _ = tl.philox(
        seed,
        i.to(tl.uint32),
        zero + h.to(tl.uint32),
        zero + b.to(tl.uint32),
        zero + offset.to(tl.uint32),
    )
    x = r0 + j.to(tl.uint32) * tl.full((1, 1), 0x9E3779B9, tl.uint32)
    x = (x ^ (x >> 16)) * tl.full((1, 1), 0x7FEB352D, tl.uint32)
    x = x ^ r1
    x = (x ^ (x >> 15)) * tl.full((1, 1), 0x846CA68B, tl.uint32)
    x = x ^ (x >> 16)
    return x >= tl.cast(c.threshold, tl.uint32)


@triton.jit
def load_rows(
    base, stride, start, low, high, ROWS: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr
):
    """Rows [start, start + ROWS) of a row-major matrix, zero outside [low, high) and beyond DIM."""
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    ptrs = base + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + cols[None, :]
    mask = ((start + rows >= low) & (start + rows < high))[:, None]
    if DIM != COLS:
        mask &= (cols < DIM)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def load_paged_rows(
    base,
    strides,
    pages,
    page_size,
    start,
    low,
    high,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
):
    """Like `load_rows` over the pages of a sequence; strides are (page, slot, head)."""
    j, cols = start + tl.arange(0, ROWS), tl.arange(0, COLS)
    exists = (j >= low) & (j < high)
    page = tl.load(pages + j // page_size, mask=exists, other=0).to(tl.int64)
    rows = page * strides[0] + (j % page_size) * strides[1]
    mask = exists[:, None]
    if DIM != COLS:
        mask &= (cols < DIM)[None, :]
    return tl.load(base + rows[:, None] + cols[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(
    base, stride, start, high, x, ROWS: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr
):
    """Store a tile's rows below `high`, cast to the pointer's type."""
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    ptrs = base + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + cols[None, :]
    mask = (start + rows < high)[:, None]
    if DIM != COLS:
        mask &= (cols < DIM)[None, :]
    tl.store(ptrs, x.to(base.dtype.element_ty), mask=mask)
