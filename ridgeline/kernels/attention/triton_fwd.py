"""Attention forward: one program a query tile, online softmax over key tiles.

    m' = max(m, rowmax(S)) ; P = exp2(S - m') ; l = l e + rowsum(P) ; acc = acc e + P V ; e = exp2(m - m')

The division by l comes once, at the end. Key tiles that the mask excludes are never loaded, and tiles
that it leaves whole are not masked. Bytes a step: a K and a V tile, shared through L2 by the programs
of a head; bound by matrix units and exp2 (at head dim 64 by exp2). Ampere and later; on Hopper tiles
come through tensor descriptors (TMA) and products are wgmma.

Source: FlashAttention-2 (arXiv 2307.08691), section 3.1; the mask as a uniform branch of one
software-pipelined loop, in place of three loops, is our own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.attention.triton_common import (
    LN2,
    LOG2E,
    dropout_keep,
    key_spans,
    load_paged_rows,
    load_rows,
    score_log2,
    sequence,
    store_rows,
    visible,
)


@triton.jit
def load_keys(x, n, pad, T, c, MASKED: tl.constexpr, D: tl.constexpr, v: tl.constexpr):
    """A tile of K or V. x is (base, descriptor, strides, row, start, head, pages); D (DIM, COLS).

    A tile that may reach beyond its sequence comes by masked loads (what lies there could be NaN),
    except where the descriptor's own bounds are the sequence's.
    """
    base, desc, strides, row, start, head, pages = x
    if c.pages is not None:
        tile = load_paged_rows(base, strides, pages, c.page_size, n, pad, T, v.block_n, D)
    elif v.tma and (not MASKED or (c.cu_k is None and c.used_k is None and c.pad_k is None)):
        tile = desc.load([row.to(tl.int32), start.to(tl.int32) + n, head, 0])
        tile = tile.reshape(v.block_n, D[1])
    else:
        low, high = pad, T
        tile = load_rows(base, strides[1], n, low, high, v.block_n, D[0], D[1])
    return tile


@triton.jit
def online_softmax(s, m, SAFE: tl.constexpr, c, v: tl.constexpr):
    """(P, new running maximum, rescale of what was summed before), all in log2 units."""
    if v.fold:
        m_new = tl.maximum(m, tl.max(s, 1) * c.scale_log2)
    else:
        m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = m_new
    if SAFE:
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    if v.fold:
        p = tl.exp2(s * c.scale_log2 - m_safe[:, None])
    else:
        p = tl.exp2(s - m_safe[:, None])
    return p, m_new, tl.exp2(m - m_safe)


@triton.jit
def _step(state, q, k_x, v_x, place, rows, n, MASKED: tl.constexpr, c, v: tl.constexpr):
    """One key tile. MASKED: 0 no mask, 1 mask, 2 mask by a branch where the tile needs it."""
    acc, total, m = state
    b, h, S, T, pad, seed, offset = place
    i_m, full_first, full_end = rows
    k = load_keys(k_x, n, pad, T, c, MASKED == 1, (v.head_dim, v.block_d), v)
    qk = tl.dot(q, tl.trans(k), input_precision=v.precision)
    i, j = i_m[:, None], n + tl.arange(0, v.block_n)[None, :]
    s, _ = score_log2(qk, i, j, S, T, b, h, c, v)
    if MASKED == 1:
        s = tl.where(visible(i, j, S, T, pad, c, v), s, float("-inf"))
    elif MASKED == 2:
        if (n < full_first) | (n >= full_end):
            s = tl.where(visible(i, j, S, T, pad, c, v), s, float("-inf"))
    p, m, rescale = online_softmax(s, m, MASKED > 0 or c.bias is not None, c, v)
    total = total * rescale + tl.sum(p, 1)
    if v.dropout:
        p = tl.where(dropout_keep(i, j, b, h, seed, offset, c), p, 0.0)
    values = load_keys(v_x, n, pad, T, c, MASKED == 1, (v.head_dim_v, v.block_dv), v)
    acc = acc * rescale[:, None]
    acc = tl.dot(p.to(values.dtype), values, acc, input_precision=v.precision)
    return acc, total, m


@triton.jit(do_not_specialize=["seed", "offset"])
def attention_fwd(
    q_x,
    k_x,
    v_x,
    o_x,
    lse_x,
    c,
    seed: tl.int64,
    offset: tl.int64,
    v: tl.constexpr,
):
    """Grid (query tiles, heads, batch); *_x are (pointer, descriptor or None, strides).

    Writes out and lse_ln of every stored row; rows beyond the used length give 0 and -inf.
    """
    h, b = tl.program_id(1), tl.program_id(2)
    row_q, start_q, stored, S, row_k, start_k, T, pad = sequence(c, b)
    tile = tl.program_id(0)
    if v.right:
        tile = tl.num_programs(0) - 1 - tile  # longest first: the last wave is short ones
    m0 = tile * v.block_m
    if m0 < stored:
        g = h // v.group
        h_64, g_64 = h.to(tl.int64), g.to(tl.int64)
        q_ptr, q_desc, q_strides = q_x
        if v.tma and c.cu_q is None and c.used_q is None:
            q = q_desc.load([row_q.to(tl.int32), m0, h, 0]).reshape(v.block_m, v.block_d)
        else:
            base = q_ptr + row_q * q_strides[0] + start_q * q_strides[1] + h_64 * q_strides[2]
            q = load_rows(base, q_strides[1], m0, 0, S, v.block_m, v.head_dim, v.block_d)
        k_ptr, k_desc, k_strides = k_x
        v_ptr, v_desc, v_strides = v_x
        pages = c.pages
        if c.pages is not None:
            pages = c.pages + b.to(tl.int64) * c.stride_pages
            k_ptr += g_64 * k_strides[2]
            v_ptr += g_64 * v_strides[2]
        else:
            k_ptr += row_k * k_strides[0] + start_k * k_strides[1] + g_64 * k_strides[2]
            v_ptr += row_k * v_strides[0] + start_k * v_strides[1] + g_64 * v_strides[2]
        keys = (k_ptr, k_desc, k_strides, row_k, start_k, g, pages)
        values = (v_ptr, v_desc, v_strides, row_k, start_k, g, pages)

        i_m = m0 + tl.arange(0, v.block_m)
        acc = tl.zeros((v.block_m, v.block_dv), tl.float32)
        m = tl.full((v.block_m,), float("-inf"), tl.float32)
        total = tl.zeros((v.block_m,), tl.float32)
        if c.sinks is not None:
            m = tl.zeros((v.block_m,), tl.float32) + tl.load(c.sinks + h) * LOG2E
            total += 1.0
        first, full_first, full_end, end = key_spans(m0, S, T, pad, c, v)
        place = (b, h, S, T, pad, seed, offset)
        rows = (i_m, full_first, full_end)
        if v.branch:
            for n in tl.range(
                first, end, v.block_n, num_stages=v.num_stages, warp_specialize=v.specialize
            ):
                acc, total, m = _step((acc, total, m), q, keys, values, place, rows, n, 2, c, v)
        else:
            if v.left or c.pad_k is not None:
                for n in tl.range(first, full_first, v.block_n, num_stages=v.num_stages):
                    acc, total, m = _step((acc, total, m), q, keys, values, place, rows, n, 1, c, v)
            for n in tl.range(
                full_first,
                full_end,
                v.block_n,
                num_stages=v.num_stages,
                warp_specialize=v.specialize,
            ):
                acc, total, m = _step((acc, total, m), q, keys, values, place, rows, n, 0, c, v)
            if not v.even_n:
                for n in tl.range(full_end, end, v.block_n, num_stages=v.num_stages):
                    acc, total, m = _step((acc, total, m), q, keys, values, place, rows, n, 1, c, v)

        empty = (total == 0.0) | (m == float("-inf")) | (i_m >= S)
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
