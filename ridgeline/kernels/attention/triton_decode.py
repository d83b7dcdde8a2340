"""Attention of few queries on many keys: split-KV, then a merge in a fixed order.

    O = sum_s w_s O_s / sum_s w_s ; w_s = exp2(LSE_s - m) ; m = max_s LSE_s

The query heads that share a key/value head, times the queries, are the rows of one tile, so each
key and value is read once. The keys of a sequence are cut into `num_splits` ranges of whole tiles,
by its own length (the first range carries the sink). A program takes a range and writes a
normalized partial O and its log-sum-exp in fp32; `attention_merge` joins them. With one split the
result is written directly.

Bytes: every key and value once; bound by memory. Source: Flash-Decoding (Dao et al., 2023); packing
the heads of a group into rows is FlashAttention-3's PackGQA.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.attention.triton_common import LN2, LOG2E, key_spans, sequence
from ridgeline.kernels.attention.triton_fwd import attention_step, is_empty


@triton.jit
def attention_split(
    q_x,
    k_x,
    v_x,
    k_desc,
    v_desc,
    o_x,
    lse_x,
    num_splits,
    row_tiles,
    c,
    v: tl.constexpr,
):
    """Grid (splits, kv heads x row tiles, batch); *_x are (pointer, strides, flat strides).

    o_x is (pointer, (batch, row, head, split) strides), lse_x the same of the log-sum-exp: partial
    results in log2 units, or with one split the results.
    """
    BLOCK_M: tl.constexpr = v.block_m
    BLOCK_DV: tl.constexpr = v.block_dv
    b, split = tl.program_id(2), tl.program_id(0)
    g = tl.program_id(1) // row_tiles
    row_q, start_q, stored, S, row_k, start_k, T, pad = sequence(c, b)
    packed = (tl.program_id(1) % row_tiles) * v.block_m + tl.arange(0, BLOCK_M)
    i_m, h_m = packed // v.group, g * v.group + packed % v.group
    first_i = (tl.program_id(1) % row_tiles) * v.block_m // v.group
    if first_i < stored:
        exists = i_m < S
        cols = tl.arange(0, v.block_d)
        h_64, g_64 = h_m.to(tl.int64), g.to(tl.int64)
        rows = (start_q + i_m) * q_x[1][1] + h_64 * q_x[1][2]
        ptrs = q_x[0] + row_q * q_x[1][0] + rows[:, None] + cols[None, :]
        mask = exists[:, None] & (cols < v.head_dim)[None, :]
        q = tl.load(ptrs, mask=mask, other=0.0)
        k_ptr, v_ptr, pages = k_x[0] + g_64 * k_x[1][2], v_x[0] + g_64 * v_x[1][2], k_x[0]
        if c.pages is not None:
            pages = c.pages + b.to(tl.int64) * c.stride_pages
        else:
            k_ptr += row_k * k_x[1][0] + start_k * k_x[1][1]
            v_ptr += row_k * v_x[1][0] + start_k * v_x[1][1]
        k_at = (k_ptr, row_k, start_k, g, pages)
        v_at = (v_ptr, row_k, start_k, g, pages)

        first, full_first, full_end, end = key_spans(first_i, S, T, pad, c, v)
        tiles = tl.cdiv(tl.maximum(end - first, 0), v.block_n)
        begin = first + tiles * split // num_splits * v.block_n
        stop = tl.minimum(first + tiles * (split + 1) // num_splits * v.block_n, end)
        full_first = tl.minimum(tl.maximum(full_first, begin), stop)
        full_end = tl.maximum(tl.minimum(full_end, stop // v.block_n * v.block_n), full_first)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        if c.sinks is not None:  # the first split carries the sink
            sink = tl.load(c.sinks + h_m, mask=exists, other=float("-inf")) * LOG2E
            m = tl.where(split == 0, sink, m)
            total += tl.where(split == 0, 1.0, 0.0)
        at = (b, h_m[:, None], S, T, pad, b.to(tl.int64), b.to(tl.int64))
        span = (i_m, full_first, full_end)
        kv = (k_x, v_x, k_desc, v_desc, k_at, v_at)
        if v.left or c.pad_k is not None:
            for n in tl.range(begin, full_first, v.block_n, num_stages=v.num_stages):
                acc, total, m = attention_step((acc, total, m), q, kv, at, span, n, 1, c, v)
        if v.branch:  # keys that exist, the diagonal among them
            masked_from = tl.maximum(tl.minimum(stop, T) // v.block_n * v.block_n, full_end)
            for n in tl.range(full_first, masked_from, v.block_n, num_stages=v.num_stages):
                acc, total, m = attention_step((acc, total, m), q, kv, at, span, n, 3, c, v)
            full_end = masked_from
        else:
            for n in tl.range(full_first, full_end, v.block_n, num_stages=v.num_stages):
                acc, total, m = attention_step((acc, total, m), q, kv, at, span, n, 0, c, v)
        for n in tl.range(full_end, stop, v.block_n, num_stages=1):
            acc, total, m = attention_step((acc, total, m), q, kv, at, span, n, 1, c, v)
        empty = is_empty(total, m) | (i_m >= S)
        total = tl.where(empty, 1.0, total)
        lse = tl.where(empty, float("-inf"), m + tl.log2(total))
        if v.direct:
            lse = lse * LN2
        lse_ptr, lse_strides = lse_x
        at = row_q * lse_strides[0] + (start_q + i_m) * lse_strides[1] + h_64 * lse_strides[2]
        at += split.to(tl.int64) * lse_strides[3]
        inside = i_m < stored
        tl.store(lse_ptr + at, lse, mask=inside)
        o_ptr, o_strides = o_x
        at = row_q * o_strides[0] + (start_q + i_m) * o_strides[1] + h_64 * o_strides[2]
        at += split.to(tl.int64) * o_strides[3]
        dims = tl.arange(0, v.block_dv)
        acc = tl.where(empty[:, None], 0.0, acc / total[:, None])
        mask = inside[:, None] & (dims < v.head_dim_v)[None, :]
        ptrs = o_ptr + at[:, None] + dims[None, :]
        tl.store(ptrs, acc.to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit
def attention_merge(
    part_x,
    part_lse_x,
    o_x,
    lse_x,
    num_splits,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
):
    """Grid (rows, heads, batch): joins the splits of one query and head, in a fixed order."""
    i, h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    b = b.to(tl.int64)
    splits, cols = tl.arange(0, SPLITS), tl.arange(0, COLS)
    ptr, strides = part_lse_x
    at = b * strides[0] + i * strides[1] + h * strides[2] + splits * strides[3]
    lse = tl.load(ptr + at, mask=splits < num_splits, other=float("-inf"))
    top = tl.max(lse, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(lse - safe)
    total = tl.sum(weight, 0)
    ptr, strides = part_x
    at = b * strides[0] + i * strides[1] + h * strides[2] + splits * strides[3]
    mask = (lse > float("-inf"))[:, None] & (cols < DIM)[None, :]
    part = tl.load(ptr + at[:, None] + cols[None, :], mask=mask, other=0.0)
    o = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    ptr, strides = o_x
    at = b * strides[0] + i * strides[1] + h * strides[2]
    tl.store(ptr + at + cols, o.to(ptr.dtype.element_ty), mask=cols < DIM)
    ptr, strides = lse_x
    log_total = tl.log2(tl.where(total == 0.0, 1.0, total))
    value = tl.where(total == 0.0, float("-inf"), (safe + log_total) * LN2)
    tl.store(ptr + b * strides[0] + i * strides[1] + h * strides[2], value)
