"""What the Triton attention kernels share: arguments, places, scores, masks, dropout.

Legend (device code): i and j are the query and key index inside a sequence; m and n are tile
starts; S and T are the lengths in force (used lengths where given); T - S is the bottom-right
diagonal; `_log2` is a score times log2(e), so that exp2 is the only exponential.

`Call` holds what varies from call to call (pointers, sizes, scalars); `Variant` holds what is
compiled in. An option that is off is None in `Call` or False in `Variant` and costs nothing. Nor do
assertions on the values of index tensors, but in debug mode (core/env.py), where they trap.

Addresses are 2^31-safe: the start of a tile is a 64-bit product, offsets inside a tile are 32-bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
MASK_BLOCK: tl.constexpr = tl.constexpr(128)
"""mods.BLOCK"""
NOWHERE: tl.constexpr = tl.constexpr(2**30)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
RAGGED_ROWS: tl.constexpr = tl.constexpr(2**30)
"""Rows that a ragged descriptor claims to have."""


class Call(NamedTuple):
    """Runtime arguments of every kernel; a pointer that is None is an option that is off."""

    tiles: Any
    """int32 pairs (sequence, tile) of packed sequences (triton_tiles.py); None: by the grid."""
    num_tiles: int
    """Entries of the list."""
    head_group: int
    """Heads that a program's neighbours take before the next tile."""
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
    stride_pages: int
    stride_slopes_b: int
    bias_strides: tuple[int, int, int]
    """batch, head, query; the key stride is 1."""
    aux: Any
    """Tensors that the mods index: (pointer, sizes) each (triton_mods.py)."""
    block_entries: Any
    """The blocks that a block mask leaves to a block of the program's side (mods.py)."""
    block_counts: Any
    block_strides: tuple[int, int, int]
    """Batch and head, in counts; the entries of a block."""
    batch: int
    rows_q: int
    """Stored rows of a packed tensor."""
    rows_k: int
    stores_k: int
    """Sequences or pages that k holds; 0 but in debug mode, which alone asks."""
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
    ragged: bool = False
    """Descriptors of tiles that may reach beyond their sequence end with it (`load_tile`)."""
    page_size: int = 0
    """Tokens of a page, 0: contiguous."""
    page_shift: int = 0
    """log2 of it."""
    same_rows: bool = False
    """Keys and values lie at the same offsets from their bases."""
    branch: bool = False
    """One loop with a uniform branch for the mask, in place of masked and unmasked loops."""
    whole_m: bool = False
    """Every tile of queries lies inside its sequence."""
    whole_n: bool = False
    """Every tile of keys lies inside its sequence."""
    direct: bool = False
    """Decode: one split, which writes the results."""
    held: bool = False
    """Q (in dQ: and dO) stays in registers (`in_registers`)."""
    mods: Any = None
    """A user's functions (triton_mods.ModCode), None without."""
    blocks: bool = False
    """Only the blocks of a block mask are visited."""


@triton.jit
def sequence(c, b):
    """Where sequence b lies: row of q, start, stored and used length; row of k, start, T, pad.

    b = c.batch is what lies behind the last packed sequence: rows, none of them used.
    """
    inside = b < c.batch
    row_q, start_q = b.to(tl.int64), tl.cast(0, tl.int64)
    S = tl.cast(c.seqlen_q, tl.int32)
    stored = S
    if c.cu_q is not None:
        row_q = row_q * 0
        start_q = tl.load(c.cu_q + b).to(tl.int64)
        end_q = tl.load(c.cu_q + b + 1, mask=inside, other=c.rows_q).to(tl.int64)
        ordered = (start_q >= 0) & (start_q <= end_q) & (end_q <= c.rows_q)
        tl.device_assert(ordered, "attention: cu_seqlens_q must not decrease or exceed the tensor")
        stored = (end_q - start_q).to(tl.int32)
        fits = (stored <= c.seqlen_q) | (b >= c.batch)
        tl.device_assert(fits, "attention: max_seqlen_q must be at least the longest length")
        S = tl.where(inside, stored, 0)
    if c.used_q is not None:
        S = tl.load(c.used_q + b, mask=inside, other=0).to(tl.int32)
        tl.device_assert((S >= 0) & (S <= stored), "attention: seqused_q must be a prefix's length")
    row_k, start_k, capacity = stored_keys(c, b)
    T = tl.cast(c.seqlen_k, tl.int32)
    if c.cu_k is not None:
        T = (tl.load(c.cu_k + b + 1, mask=inside, other=0).to(tl.int64) - start_k).to(tl.int32)
        T = tl.where(inside, T, 0)
    if c.used_k is not None:
        T = tl.load(c.used_k + b, mask=inside, other=0).to(tl.int32)
        fits = (T >= 0) & (T <= capacity) | (b >= c.batch)
        tl.device_assert(fits, "attention: seqused_k or cache_seqlens must be a prefix's length")
    pad = tl.cast(0, tl.int32)
    if c.pad_k is not None:
        pad = tl.load(c.pad_k + b, mask=inside, other=0).to(tl.int32)
        tl.device_assert((pad >= 0) & (pad <= capacity), "attention: leftpad_k must name a key")
        pad = tl.minimum(pad, T)
    return row_q, start_q, stored, S, row_k, start_k, T, pad


@triton.jit
def stored_keys(c, b):
    """Where the keys of sequence b lie: row of k, start, stored length."""
    row_k, start_k = b.to(tl.int64), tl.cast(0, tl.int64)
    stored = tl.cast(c.seqlen_k, tl.int32)
    if c.kv_rows is not None:
        row_k = tl.load(c.kv_rows + b, mask=b < c.batch, other=0).to(tl.int64)
        exists = (row_k >= 0) & (row_k < c.stores_k)
        tl.device_assert(exists, "attention: cache_batch_idx must name a row of the cache")
    if c.cu_k is not None:
        row_k = row_k * 0
        start_k = tl.load(c.cu_k + b).to(tl.int64)
        end_k = tl.load(c.cu_k + b + 1, mask=b < c.batch, other=c.rows_k).to(tl.int64)
        ordered = (start_k >= 0) & (start_k <= end_k)
        if c.pages is not None:  # nothing lies behind the last sequence's pages
            ordered |= b >= c.batch
        else:
            ordered &= end_k <= c.rows_k
        tl.device_assert(ordered, "attention: cu_seqlens_k must not decrease or exceed the tensor")
        stored = (end_k - start_k).to(tl.int32)
    return row_k, start_k, stored


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
    """`spans` over the queries of the keys [n, n + block_n).

    What does not exist needs no mask: keys are loaded as zeros and their rows not stored, queries
    have an infinite log-sum-exp.
    """
    last = tl.minimum(n + v.block_n, T) - 1
    ceiling = (S + v.block_m - 1) // v.block_m * v.block_m
    low, full_low, high, full_high = tl.cast(0, tl.int32), tl.cast(0, tl.int32), S, ceiling
    if v.right:
        low = tl.maximum(low, n - (T - S) - c.right)
        full_low = tl.maximum(full_low, last - (T - S) - c.right)
    if v.left:
        high = tl.minimum(high, last - (T - S) + c.left + 1)
        full_high = tl.minimum(full_high, n - (T - S) + c.left + 1)
    exists = (n < T) & (n + v.block_n > pad)
    high, full_high = tl.where(exists, high, 0), tl.where(exists, full_high, 0)
    return spans(low, high, full_low, full_high, v.block_m)


@triton.jit
def block_list(own, b, h, c):
    """(entries, how many) that the block mask leaves to block `own` of the program's side."""
    at = b.to(tl.int64) * c.block_strides[0] + h * c.block_strides[1] + own
    return c.block_entries + at * c.block_strides[2], tl.load(c.block_counts + at)


@triton.jit
def block_tile(entries, index, full_first, BLOCK: tl.constexpr):
    """(start of the index-th tile of the listed blocks, full_first: nowhere if partly hidden)."""
    TILES: tl.constexpr = MASK_BLOCK // BLOCK
    index += tl.cast(0, tl.int32)
    entry = tl.load(entries + index // TILES)
    start = (entry >> 1) * MASK_BLOCK + index % TILES * BLOCK
    return start, tl.where((entry & 1) == 1, full_first, NOWHERE)


@triton.jit
def visible(i, j, S, T, pad, b, h, c, v: tl.constexpr):
    """Whether key j exists and query i sees it (whether i exists is not asked)."""
    ok = (j < T) & (i >= 0)
    if c.pad_k is not None:
        ok &= j >= pad
    if v.right:
        ok &= j - i <= T - S + c.right
    if v.left:
        ok &= j - i >= T - S - c.left
    if v.mods is not None:
        if v.mods.masked:
            ok &= v.mods.functions.mask(b, h, i, j, c.aux)
    return ok


@triton.jit
def tanh(x):
    """By exp2, saturating to +-1 without an overflow."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def score_log2(qk, i, j, S, T, b, h, c, v: tl.constexpr):
    """(score in log2 units, derivative of the soft cap, the score before a user's score_mod).

    With v.fold the score is the product, not yet scaled. h is a scalar, or [rows, 1] where rows of
    several heads are packed.
    """
    damp = 1.0
    raw = qk
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
        raw = s
        if v.mods is not None:
            if v.mods.scored:
                s = v.mods.functions.score(s, b, h, i, j, c.aux)
        s = s * LOG2E
    return s, damp, raw


@triton.jit
def before_mod(ds, raw, b, h, i, j, c, v: tl.constexpr):
    """Gradient of the score before score_mod, from that after it (0 where P is)."""
    if v.mods is not None:
        if v.mods.scored:
            grad = v.mods.functions.grad(raw, b, h, i, j, ds, c.aux)
            ds = tl.where(ds == 0.0, 0.0, grad)
    return ds


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
def load_tile(
    desc,
    first,
    n,
    length,
    col,
    RAGGED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Rows [n, n + ROWS) of a sequence whose first row is `first` in the descriptor's matrix.

    RAGGED: zero from `length` on, by the bounds check of the copy engine. The descriptor's row
    dimension then ends where the sequence does: row n is asked for as the one that lies
    length - n before its end, and two dimensions of extent 1 in the tile move the address back
    (their strides make it wrap around 2^64).
    """
    if RAGGED:
        at = [RAGGED_ROWS, first + length, RAGGED_ROWS - length + n, col]
        tile = tl.reshape(desc.load(at), (ROWS, COLS))
    else:
        tile = desc.load([first + n, col])
    return tile


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
def in_registers(x, COLS: tl.constexpr):
    """x as the result of a product, so that wgmma takes it from registers and not once a step from
    shared memory, which is as busy as the matrix units (docs/log/attention_triton.md).

    Exact; NaN and inf stay in their row. Triton has no way to ask for a layout.
    """
    cols = tl.arange(0, COLS)
    one = (cols[:, None] == cols[None, :]).to(x.dtype)
    return tl.dot(x, one).to(x.dtype)


@triton.jit
def existing(page, c):
    """The page id, which must be one."""
    exists = (page >= 0) & (page < c.stores_k)
    tl.device_assert(exists, "attention: block_table must hold ids of pages of the cache")
    return page


@triton.jit
def paged_rows(x, pages, start, low, high, MASKED: tl.constexpr, c, v: tl.constexpr):
    """Offsets of the keys [start, start + block_n) of a sequence from its head in the pages."""
    j = start + tl.arange(0, v.block_n)
    if MASKED:
        page = tl.load(pages + (j >> v.page_shift), mask=(j >= low) & (j < high), other=0)
    else:
        page = tl.load(pages + (j >> v.page_shift))
    return existing(page, c).to(tl.int64) * x[1][0] + (j & (v.page_size - 1)) * x[1][1]


@triton.jit
def load_paged_rows(
    base,
    rows,
    start,
    low,
    high,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
):
    """Like `load_rows` at the offsets of `paged_rows`; without MASKED every key exists."""
    cols = tl.arange(0, COLS)
    ptrs = base + rows[:, None] + cols[None, :]
    j = start + tl.arange(0, ROWS)
    if MASKED and DIM != COLS:
        tile = tl.load(ptrs, ((j >= low) & (j < high))[:, None] & (cols < DIM)[None, :], 0.0)
    elif MASKED:
        tile = tl.load(ptrs, ((j >= low) & (j < high))[:, None], 0.0)
    elif DIM != COLS:
        tile = tl.load(ptrs, (cols < DIM)[None, :], 0.0)
    else:
        tile = tl.load(ptrs)
    return tile


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
