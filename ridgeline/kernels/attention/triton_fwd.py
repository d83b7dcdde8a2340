"""Attention forward: one program a query tile, online softmax over key tiles.

    m' = max(m, rowmax(S)) ; e = exp2(m - m') ; P = exp2(S - m') ; l = l e + rowsum(P)
    acc = acc e + P V ; O = acc / l

The division comes once, at the end. Key tiles that the mask excludes are never loaded, and tiles
that it leaves whole are not masked. Bytes a step: a K and a V tile, shared through L2 by the
programs of a head; bound by matrix units and exp2 (at head dim 64 by exp2). Ampere and later; on
Hopper tiles come through tensor descriptors (TMA) and products are wgmma.

Source: FlashAttention-2 (arXiv 2307.08691), section 3.1; the mask as a uniform branch of one
software-pipelined loop, in place of three loops, is our own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.attention.triton_common import (
    LN2,
    LOG2E,
    MASK_BLOCK,
    NOWHERE,
    block_list,
    block_tile,
    dropout_keep,
    existing,
    in_registers,
    key_spans,
    load_paged_rows,
    load_rows,
    load_tile,
    paged_rows,
    score_log2,
    sequence,
    store_rows,
    visible,
)
from ridgeline.kernels.attention.triton_tiles import tile_of


@triton.jit
def load_keys(
    x,
    desc,
    place,
    n,
    pad,
    T,
    c,
    MASKED: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    v: tl.constexpr,
):
    """A tile of K or V. x is (pointer, strides, flat strides), place (base, row, start,
    head, pages, offsets of paged rows).

    MASKED 1 is a tile that may reach beyond its sequence: what lies there could be NaN and comes as
    zero. Paged tiles come by TMA where a tile never leaves its page.
    """
    base, row, start, head, pages, paged = place
    if v.page_size and v.tma and MASKED != 1:
        page = existing(tl.load(pages + (n >> v.page_shift)), c)
        slot = n & (v.page_size - 1)
        tile = desc.load([page * x[2][0] + head * x[2][1] + slot, head * x[2][2]])
    elif v.page_size:
        tile = load_paged_rows(base, paged, n, pad, T, MASKED > 0, v.block_n, DIM, COLS)
    elif v.tma and (MASKED != 1 or v.whole_n or v.ragged):
        first = row.to(tl.int32) * x[2][0] + head * x[2][1] + start.to(tl.int32)
        RAGGED: tl.constexpr = v.ragged and not v.whole_n
        tile = load_tile(desc, first, n, T, head * x[2][2], RAGGED, v.block_n, COLS)
    else:
        tile = load_rows(base, x[1][1], n, pad, T, v.block_n, DIM, COLS)
    return tile


@triton.jit
def online_softmax(s, m, c, v: tl.constexpr):
    """(P, new running maximum, rescale of what was summed before), all in log2 units.

    The maximum passes over NaN, the sum does not: a row of NaN alone has the maximum of an empty
    one, but a sum that is not 0.
    """
    if v.fold:
        m_new = tl.maximum(m, tl.max(s, 1) * c.scale_log2)
    else:
        m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    if v.fold:
        p = tl.exp2(s * c.scale_log2 - m_safe[:, None])
    else:
        p = tl.exp2(s - m_safe[:, None])
    return p, m_new, tl.exp2(m - m_safe)


@triton.jit
def is_empty(total, m):
    """Rows without a score but -inf, from their sum and maximum. With a sink of -inf and no tile
    the sum is still 1."""
    return (total == 0.0) | ((m == float("-inf")) & (total == total))


@triton.jit
def attention_step(
    state,
    q,
    kv,
    place,
    rows,
    n,
    MASKED: tl.constexpr,
    c,
    v: tl.constexpr,
):
    """One key tile. MASKED: 0 no mask, 1 mask, 2 mask by a branch where the tile needs it, 3 that,
    and every key exists."""
    LOADS: tl.constexpr = MASKED % 3
    acc, total, m = state
    k_x, v_x, k_desc, v_desc, k_at, v_at = kv
    b, h, S, T, pad, seed, offset = place
    i_m, full_first, full_end = rows
    k_rows, v_rows = k_at[4], v_at[4]
    if v.page_size and not (v.tma and LOADS != 1):
        k_rows = paged_rows(k_x, k_at[4], n, pad, T, LOADS > 0, c, v)
        v_rows = k_rows
        if not v.same_rows:
            v_rows = paged_rows(v_x, v_at[4], n, pad, T, LOADS > 0, c, v)
    k_at = (k_at[0], k_at[1], k_at[2], k_at[3], k_at[4], k_rows)
    v_at = (v_at[0], v_at[1], v_at[2], v_at[3], v_at[4], v_rows)
    k = load_keys(k_x, k_desc, k_at, n, pad, T, c, LOADS, v.head_dim, v.block_d, v)
    qk = tl.dot(q, tl.trans(k), input_precision=v.precision)
    i, j = i_m[:, None], n + tl.arange(0, v.block_n)[None, :]
    s, _, _ = score_log2(qk, i, j, S, T, b, h, c, v)
    if MASKED == 1:
        s = tl.where(visible(i, j, S, T, pad, b, h, c, v), s, float("-inf"))
    elif MASKED >= 2:
        if (n < full_first) | (n >= full_end):
            s = tl.where(visible(i, j, S, T, pad, b, h, c, v), s, float("-inf"))
    p, m, rescale = online_softmax(s, m, c, v)
    total = total * rescale + tl.sum(p, 1)
    if v.dropout:
        p = tl.where(dropout_keep(i, j, b, h, seed, offset, c), p, 0.0)
    values = load_keys(v_x, v_desc, v_at, n, pad, T, c, LOADS, v.head_dim_v, v.block_dv, v)
    acc = acc * rescale[:, None]
    acc = tl.dot(p.to(values.dtype), values, acc, input_precision=v.precision)
    return acc, total, m


@triton.jit(do_not_specialize=["seed", "offset"])
def attention_fwd(
    q_x,
    k_x,
    v_x,
    q_desc,
    k_desc,
    v_desc,
    o_x,
    lse_x,
    c,
    seed: tl.int64,
    offset: tl.int64,
    v: tl.constexpr,
):
    """Grid (query tiles, heads, batch), or the list's; *_x are (pointer, strides, flat
    strides).

    Writes out and lse_ln of every stored row; rows beyond the used length give 0 and -inf.
    """
    BLOCK_M: tl.constexpr = v.block_m
    BLOCK_DV: tl.constexpr = v.block_dv
    tile, h, b = tile_of(c, v.right)
    row_q, start_q, stored, S, row_k, start_k, T, pad = sequence(c, tl.maximum(b, 0))
    m0 = tile * v.block_m
    if (m0 < stored) & (b >= 0):
        g = h // v.group
        h_64, g_64 = h.to(tl.int64), g.to(tl.int64)
        if v.tma:
            at = row_q.to(tl.int32) * q_x[2][0] + h * q_x[2][1] + start_q.to(tl.int32)
            RAGGED: tl.constexpr = not v.whole_m
            q = load_tile(q_desc, at, m0, S, h * q_x[2][2], RAGGED, v.block_m, v.block_d)
        else:
            base = q_x[0] + row_q * q_x[1][0] + start_q * q_x[1][1] + h_64 * q_x[1][2]
            q = load_rows(base, q_x[1][1], m0, 0, S, v.block_m, v.head_dim, v.block_d)
        if v.held:
            q = in_registers(q, v.block_d)
        k_ptr, v_ptr, pages = k_x[0], v_x[0], k_x[0]
        k_ptr += g_64 * k_x[1][2]
        v_ptr += g_64 * v_x[1][2]
        if c.pages is not None:
            pages = c.pages + b.to(tl.int64) * c.stride_pages
        else:
            k_ptr += row_k * k_x[1][0] + start_k * k_x[1][1]
            v_ptr += row_k * v_x[1][0] + start_k * v_x[1][1]
        k_at = (k_ptr, row_k, start_k, g, pages)
        v_at = (v_ptr, row_k, start_k, g, pages)

        i_m = m0 + tl.arange(0, v.block_m)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        if c.sinks is not None:
            m = tl.zeros((BLOCK_M,), tl.float32) + tl.load(c.sinks + h) * LOG2E
            total += 1.0
        first, full_first, full_end, end = key_spans(m0, S, T, pad, c, v)
        place = (b, h, S, T, pad, seed, offset)
        rows = (i_m, full_first, full_end)
        kv = (k_x, v_x, k_desc, v_desc, k_at, v_at)
        if v.blocks:
            entries, count = block_list(m0 // MASK_BLOCK, b, h, c)
            for index in tl.range(0, count * (MASK_BLOCK // v.block_n), num_stages=v.num_stages):
                n, full = block_tile(entries, index, full_first, v.block_n)
                rows = (i_m, full, full_end)
                acc, total, m = attention_step((acc, total, m), q, kv, place, rows, n, 2, c, v)
        elif v.branch:
            if v.mods is not None and v.mods.masked:
                rows = (i_m, NOWHERE, full_end)
            for n in tl.range(first, end, v.block_n, num_stages=v.num_stages):
                acc, total, m = attention_step((acc, total, m), q, kv, place, rows, n, 2, c, v)
        else:
            if v.left or c.pad_k is not None:
                for n in tl.range(first, full_first, v.block_n, num_stages=v.num_stages):
                    acc, total, m = attention_step((acc, total, m), q, kv, place, rows, n, 1, c, v)
            for n in tl.range(full_first, full_end, v.block_n, num_stages=v.num_stages):
                acc, total, m = attention_step((acc, total, m), q, kv, place, rows, n, 0, c, v)
            if v.right or not v.whole_n:
                for n in tl.range(full_end, end, v.block_n, num_stages=v.num_stages):
                    acc, total, m = attention_step((acc, total, m), q, kv, place, rows, n, 1, c, v)

        empty = is_empty(total, m) | (i_m >= S)
        inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
        if v.dropout:
            inverse *= c.keep_scale
        lse = tl.where(empty, float("-inf"), m * LN2 + tl.log(tl.where(empty, 1.0, total)))
        lse_ptr, stride_lse_b, stride_lse_h = lse_x
        lse_ptr += row_q * stride_lse_b + h_64 * stride_lse_h + start_q
        tl.store(lse_ptr + i_m, lse, mask=i_m < stored)
        o_ptr, o_strides = o_x
        o_ptr += row_q * o_strides[0] + start_q * o_strides[1] + h_64 * o_strides[2]
        acc = tl.where(empty[:, None], 0.0, acc * inverse[:, None])
        store_rows(o_ptr, o_strides[1], m0, stored, acc, v.block_m, v.head_dim_v, v.block_dv)
