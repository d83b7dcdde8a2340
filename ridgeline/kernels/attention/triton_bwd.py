"""Attention backward: what the rows need, then gradients by recomputing P from the log-sum-exp.

    P = exp2(S log2(e) - LSE) ; dV = P^T dO ; dS = P (dO V^T - delta) ; dK = dS^T Q ; dQ = dS K
    delta = rowsum(dO * O) - dLSE

- `attention_rows`: delta and LSE in log2 units, a pass over O and dO;
- `attention_dkdv`: a program a key tile, K and V on chip, over the query tiles of all query heads
  that share it (so the sum over a GQA group stays in registers). Scores are kept transposed: P^T
  and dS^T leave the tensor cores in the very layout in which the products dV and dK read them;
- `attention_dq`: a program a query tile, over its key tiles;
- `attention_grads`: the two side by side in one launch, where their tiles agree: a last wave and
  not two, and a head's tensors read from L2 once;
- `attention_dbias`: a program a tile of the bias, over the batch and heads it is broadcast to.

Every sum has a fixed order: gradients are bitwise repeatable. Seven products a tile instead of the
five of one fused kernel whose dQ is summed in memory by TMA reduction: that form was built and
measured slower in Triton 3.6 on an H200 (docs/log/attention_triton.md). Bound by matrix units.

Source: FlashAttention-2 (arXiv 2307.08691), section 3.1, algorithm 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.attention.triton_common import (
    LOG2E,
    MASK_BLOCK,
    NOWHERE,
    before_mod,
    block_list,
    block_tile,
    dropout_keep,
    in_registers,
    key_spans,
    load_rows,
    load_tile,
    query_spans,
    score_log2,
    sequence,
    store_rows,
    stored_keys,
    visible,
)
from ridgeline.kernels.attention.triton_fwd import load_keys
from ridgeline.kernels.attention.triton_tiles import listed, tile_of

ROW_ALIGN: tl.constexpr = tl.constexpr(128)
"""What the kernels read of rows begins at a multiple of this for each sequence, whole tiles long,
so that tiles of 128 rows or less need neither masks nor narrow loads."""


@triton.jit
def row_start(c, b, start_q):
    """Where a sequence's delta and LSE begin, of a head's; start_q is 0 unless packed."""
    start = start_q
    if c.cu_q is not None:
        start = (start_q + b.to(tl.int64) * ROW_ALIGN) // ROW_ALIGN * ROW_ALIGN
    return tl.multiple_of(start, ROW_ALIGN)


@triton.jit
def rows_of(x, row, start):
    """Where a sequence's rows begin; x is (pointer, strides, ...)."""
    return x[0] + row * x[1][0] + start * x[1][1]


@triton.jit
def head_of(x, row, start, h_64):
    """Where they begin of a head."""
    return rows_of(x, row, start) + h_64 * x[1][2]


@triton.jit
def head_offset(x, row, start, h_64):
    """`head_of` from the pointer. (The sum's order is part of what the compiler makes of it.)"""
    return row * x[1][0] + start * x[1][1] + h_64 * x[1][2]


@triton.jit
def row_of(row_strides, row, h_64):
    """Where a head's delta and LSE begin, but for the sequence's `row_start`."""
    return row * row_strides[0] + h_64 * row_strides[1]


@triton.jit
def attention_rows(o_x, do_x, lse_x, dlse_x, rows_x, row_strides, c, v: tl.constexpr):
    """Grid (query tiles, heads, batch) or the list's: delta and lse_log2 of each row.

    A row that sees nothing, or does not exist, gets lse_log2 = +inf, so that its P is 0. rows_x is
    (delta, lse_log2), at `row_start`, and delta once more beside the LSE (None where not wanted).
    """
    tile, h, b = tile_of(c, False)
    h = h.to(tl.int64)
    row_q, start_q, stored, S, _, _, _, _ = sequence(c, tl.maximum(b, 0))
    m0 = tile * v.block_m
    if (m0 < stored) & (b >= 0):
        o_ptr = o_x[0] + head_offset(o_x, row_q, start_q, h)
        do_ptr = do_x[0] + head_offset(do_x, row_q, start_q, h)
        o = load_rows(o_ptr, o_x[1][1], m0, 0, S, v.block_m, v.head_dim_v, v.block_dv)
        do = load_rows(do_ptr, do_x[1][1], m0, 0, S, v.block_m, v.head_dim_v, v.block_dv)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        i = m0 + tl.arange(0, v.block_m)
        lse_ptr, stride_b, stride_h = lse_x
        at = row_q * stride_b + h * stride_h + start_q + i
        lse = tl.load(lse_ptr + at, mask=i < S, other=float("-inf"))
        if dlse_x[0] is not None:
            dlse_ptr, dlse_strides = dlse_x
            where = row_q * dlse_strides[0] + h * dlse_strides[1]
            where += (start_q + i) * dlse_strides[2]
            delta -= tl.load(dlse_ptr + where, mask=i < S, other=0.0).to(tl.float32)
        empty = lse == float("-inf")
        delta = tl.where(empty, 0.0, delta)
        if rows_x[2] is not None:
            tl.store(rows_x[2] + at, delta, mask=i < stored)
        row = row_of(row_strides, row_q, h) + row_start(c, b, start_q)
        tl.store(rows_x[0] + row + i, delta)
        tl.store(rows_x[1] + row + i, tl.where(empty, float("inf"), lse * LOG2E))
        if m0 + v.block_m >= stored:  # the rest of what larger tiles read
            more = m0 + v.block_m + tl.arange(0, ROW_ALIGN)
            inside = more < tl.cdiv(stored, ROW_ALIGN) * ROW_ALIGN
            tl.store(rows_x[0] + row + more, more * 0.0, mask=inside)
            tl.store(rows_x[1] + row + more, more * 0.0 + float("inf"), mask=inside)


@triton.jit
def load_queries(
    x,
    desc,
    place,
    m,
    S,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    v: tl.constexpr,
):
    """A tile of Q or dO; place is (base, row, start, head)."""
    base, row, start, head = place
    if v.tma:
        first = row.to(tl.int32) * x[2][0] + head * x[2][1] + start.to(tl.int32)
        tile = load_tile(desc, first, m, S, head * x[2][2], not v.whole_m, v.block_m, COLS)
    else:
        tile = load_rows(base, x[1][1], m, 0, S, v.block_m, DIM, COLS)
    return tile


@triton.jit
def probabilities(s, lse_log2, c, v: tl.constexpr):
    """P from the score and the rows' log-sum-exp (broadcast by the caller)."""
    if v.fold:
        p = tl.exp2(s * c.scale_log2 - lse_log2)
    else:
        p = tl.exp2(s - lse_log2)
    return p


@triton.jit
def _dkdv_step(
    grads,
    kv,
    queries,
    rows_x,
    place,
    n0,
    m,
    MASKED: tl.constexpr,
    c,
    v: tl.constexpr,
):
    """One query tile of `attention_dkdv`. MASKED as in `attention_step`."""
    dk, dv = grads
    k, values = kv
    q_x, do_x, q_desc, do_desc, q_at, do_at = queries
    b, h, S, T, pad, seed, offset, full_first, full_end = place
    i_m = m + tl.arange(0, v.block_m)
    q = load_queries(q_x, q_desc, q_at, m, S, v.head_dim, v.block_d, v)
    delta_ptr, lse_ptr = rows_x
    lse = tl.load(lse_ptr + i_m)
    qk = tl.dot(k, tl.trans(q), input_precision=v.precision)
    i, j = i_m[None, :], n0 + tl.arange(0, v.block_n)[:, None]
    s, damp, raw = score_log2(qk, i, j, S, T, b, h, c, v)
    p = probabilities(s, lse[None, :], c, v)
    if MASKED == 1:
        p = tl.where(visible(i, j, S, T, pad, b, h, c, v), p, 0.0)
    elif MASKED == 2:
        if (m < full_first) | (m >= full_end):
            p = tl.where(visible(i, j, S, T, pad, b, h, c, v), p, 0.0)
    do = load_queries(do_x, do_desc, do_at, m, S, v.head_dim_v, v.block_dv, v)
    delta = tl.load(delta_ptr + i_m)
    dp = tl.dot(values, tl.trans(do), input_precision=v.precision)
    used = p
    if v.dropout:
        keep = dropout_keep(i, j, b, h, seed, offset, c)
        used = tl.where(keep, p * c.keep_scale, 0.0)
        dp = tl.where(keep, dp * c.keep_scale, 0.0)
    dv = tl.dot(used.to(do.dtype), do, dv, input_precision=v.precision)
    ds = before_mod(p * (dp - delta[None, :]), raw, b, h, i, j, c, v)
    if v.softcap:
        ds = ds * damp
    ds = ds.to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=v.precision)
    return dk, dv


@triton.jit
def dkdv_tile(which, inputs, grads_x, c, v: tl.constexpr):
    """dK and dV of a key tile; which is (tile, kv head, sequence), inputs (tensors, descriptors,
    rows_x, row_strides, seeds), the rest as `attention_dkdv`."""
    BLOCK_N: tl.constexpr = v.block_n
    BLOCK_D: tl.constexpr = v.block_d
    BLOCK_DV: tl.constexpr = v.block_dv
    tile, g, b = which
    tensors, descriptors, rows_x, row_strides, seeds = inputs
    q_x, k_x, v_x, do_x = tensors
    q_desc, k_desc, v_desc, do_desc = descriptors
    seed, offset = seeds
    row_q, start_q, _, S, row_k, start_k, T, pad = sequence(c, tl.maximum(b, 0))
    _, _, stored = stored_keys(c, tl.maximum(b, 0))
    n0 = tile * v.block_n
    if (n0 < stored) & (b >= 0):
        g_64 = g.to(tl.int64)
        k_ptr, v_ptr = head_of(k_x, row_k, start_k, g_64), head_of(v_x, row_k, start_k, g_64)
        k_at = (k_ptr, row_k, start_k, g, k_ptr, k_ptr)
        v_at = (v_ptr, row_k, start_k, g, v_ptr, v_ptr)
        k = load_keys(k_x, k_desc, k_at, n0, pad, T, c, 1, v.head_dim, v.block_d, v)
        val = load_keys(v_x, v_desc, v_at, n0, pad, T, c, 1, v.head_dim_v, v.block_dv, v)
        q_ptr, do_ptr = rows_of(q_x, row_q, start_q), rows_of(do_x, row_q, start_q)
        dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
        first, full_first, full_end, end = query_spans(n0, S, T, pad, c, v)
        for member in range(v.group):
            h = g * v.group + member
            h_64 = h.to(tl.int64)
            q_at = (q_ptr + h_64 * q_x[1][2], row_q, start_q, h)
            do_at = (do_ptr + h_64 * do_x[1][2], row_q, start_q, h)
            at = row_of(row_strides, row_q, h_64) + row_start(c, b, start_q)
            rows = (rows_x[0] + at, rows_x[1] + at)
            place = (b, h, S, T, pad, seed, offset, full_first, full_end)
            kv, qs = (k, val), (q_x, do_x, q_desc, do_desc, q_at, do_at)
            if v.blocks:
                entries, count = block_list(n0 // MASK_BLOCK, b, h, c)
                TILES: tl.constexpr = MASK_BLOCK // v.block_m
                for index in tl.range(0, count * TILES, num_stages=v.num_stages):
                    m, full = block_tile(entries, index, full_first, v.block_m)
                    place = (b, h, S, T, pad, seed, offset, full, full_end)
                    dk, dv = _dkdv_step((dk, dv), kv, qs, rows, place, n0, m, 2, c, v)
            elif v.branch:
                if v.mods is not None and v.mods.masked:
                    place = (b, h, S, T, pad, seed, offset, NOWHERE, full_end)
                for m in tl.range(first, end, v.block_m, num_stages=v.num_stages):
                    dk, dv = _dkdv_step((dk, dv), kv, qs, rows, place, n0, m, 2, c, v)
            else:
                if v.right:
                    for m in tl.range(first, full_first, v.block_m, num_stages=v.num_stages):
                        dk, dv = _dkdv_step((dk, dv), kv, qs, rows, place, n0, m, 1, c, v)
                for m in tl.range(full_first, full_end, v.block_m, num_stages=v.num_stages):
                    dk, dv = _dkdv_step((dk, dv), kv, qs, rows, place, n0, m, 0, c, v)
                if v.left:
                    for m in tl.range(full_end, end, v.block_m, num_stages=v.num_stages):
                        dk, dv = _dkdv_step((dk, dv), kv, qs, rows, place, n0, m, 1, c, v)
        dk_x, dv_x = grads_x
        dk_ptr = dk_x[0] + head_offset(dk_x, row_k, start_k, g_64)
        dv_ptr = dv_x[0] + head_offset(dv_x, row_k, start_k, g_64)
        dk = dk * c.scale
        if not v.whole_n:
            j = n0 + tl.arange(0, v.block_n)
            exists = ((j >= pad) & (j < T))[:, None]
            dk, dv = tl.where(exists, dk, 0.0), tl.where(exists, dv, 0.0)
        store_rows(dk_ptr, dk_x[1][1], n0, stored, dk, v.block_n, v.head_dim, v.block_d)
        store_rows(dv_ptr, dv_x[1][1], n0, stored, dv, v.block_n, v.head_dim_v, v.block_dv)


@triton.jit(do_not_specialize=["seed", "offset"])
def attention_dkdv(
    q_x,
    k_x,
    v_x,
    do_x,
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    rows_x,
    grads_x,
    row_strides,
    c,
    seed: tl.int64,
    offset: tl.int64,
    v: tl.constexpr,
):
    """Grid (key tiles, kv heads, batch) or the list's. *_x are (pointer, strides, flat strides).

    grads_x is ((dk, strides), (dv, strides)).
    """
    tensors, descriptors = (q_x, k_x, v_x, do_x), (q_desc, k_desc, v_desc, do_desc)
    inputs = (tensors, descriptors, rows_x, row_strides, (seed, offset))
    dkdv_tile(tile_of(c, False), inputs, grads_x, c, v)


@triton.jit
def _dq_step(dq, queries, kv, rows, place, n, MASKED: tl.constexpr, c, v: tl.constexpr):
    """One key tile of `attention_dq`. MASKED as in `attention_step`."""
    q, do = queries
    k_x, v_x, k_desc, v_desc, k_at, v_at = kv
    b, h, S, T, pad, seed, offset, full_first, full_end = place
    i_m, lse, delta = rows
    i, j = i_m[:, None], n + tl.arange(0, v.block_n)[None, :]
    k = load_keys(k_x, k_desc, k_at, n, pad, T, c, MASKED, v.head_dim, v.block_d, v)
    qk = tl.dot(q, tl.trans(k), input_precision=v.precision)
    s, damp, raw = score_log2(qk, i, j, S, T, b, h, c, v)
    p = probabilities(s, lse[:, None], c, v)
    if MASKED == 1:
        p = tl.where(visible(i, j, S, T, pad, b, h, c, v), p, 0.0)
    elif MASKED == 2:
        if (n < full_first) | (n >= full_end):
            p = tl.where(visible(i, j, S, T, pad, b, h, c, v), p, 0.0)
    values = load_keys(v_x, v_desc, v_at, n, pad, T, c, MASKED, v.head_dim_v, v.block_dv, v)
    dp = tl.dot(do, tl.trans(values), input_precision=v.precision)
    if v.dropout:
        keep = dropout_keep(i, j, b, h, seed, offset, c)
        dp = tl.where(keep, dp * c.keep_scale, 0.0)
    ds = before_mod(p * (dp - delta[:, None]), raw, b, h, i, j, c, v)
    if v.softcap:
        ds = ds * damp
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=v.precision)


@triton.jit
def dq_tile(which, inputs, dq_x, c, v: tl.constexpr):
    """dQ of a query tile; which is (tile, head, sequence), inputs as in `dkdv_tile`, the rest as
    `attention_dq`."""
    BLOCK_M: tl.constexpr = v.block_m
    BLOCK_D: tl.constexpr = v.block_d
    tile, h, b = which
    tensors, descriptors, rows_x, row_strides, seeds = inputs
    q_x, k_x, v_x, do_x = tensors
    q_desc, k_desc, v_desc, do_desc = descriptors
    seed, offset = seeds
    row_q, start_q, stored, S, row_k, start_k, T, pad = sequence(c, tl.maximum(b, 0))
    m0 = tile * v.block_m
    if (m0 < stored) & (b >= 0):
        g = h // v.group
        h_64, g_64 = h.to(tl.int64), g.to(tl.int64)
        q_at = (head_of(q_x, row_q, start_q, h_64), row_q, start_q, h)
        do_at = (head_of(do_x, row_q, start_q, h_64), row_q, start_q, h)
        q = load_queries(q_x, q_desc, q_at, m0, S, v.head_dim, v.block_d, v)
        do = load_queries(do_x, do_desc, do_at, m0, S, v.head_dim_v, v.block_dv, v)
        if v.held:
            q, do = in_registers(q, v.block_d), in_registers(do, v.block_dv)
        k_ptr, v_ptr = head_of(k_x, row_k, start_k, g_64), head_of(v_x, row_k, start_k, g_64)
        k_at = (k_ptr, row_k, start_k, g, k_ptr, k_ptr)
        v_at = (v_ptr, row_k, start_k, g, v_ptr, v_ptr)
        i_m = m0 + tl.arange(0, v.block_m)
        at = row_of(row_strides, row_q, h_64) + row_start(c, b, start_q) + i_m
        delta, lse = tl.load(rows_x[0] + at), tl.load(rows_x[1] + at)
        rows = (i_m, lse, delta)
        dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        first, full_first, full_end, end = key_spans(m0, S, T, pad, c, v)
        place = (b, h, S, T, pad, seed, offset, full_first, full_end)
        qs, kv = (q, do), (k_x, v_x, k_desc, v_desc, k_at, v_at)
        if v.blocks:
            entries, count = block_list(m0 // MASK_BLOCK, b, h, c)
            for index in tl.range(0, count * (MASK_BLOCK // v.block_n), num_stages=v.num_stages):
                n, full = block_tile(entries, index, full_first, v.block_n)
                place = (b, h, S, T, pad, seed, offset, full, full_end)
                dq = _dq_step(dq, qs, kv, rows, place, n, 2, c, v)
        elif v.branch:
            if v.mods is not None and v.mods.masked:
                place = (b, h, S, T, pad, seed, offset, NOWHERE, full_end)
            for n in tl.range(first, end, v.block_n, num_stages=v.num_stages):
                dq = _dq_step(dq, qs, kv, rows, place, n, 2, c, v)
        else:
            if v.left or c.pad_k is not None:
                for n in tl.range(first, full_first, v.block_n, num_stages=v.num_stages):
                    dq = _dq_step(dq, qs, kv, rows, place, n, 1, c, v)
            for n in tl.range(full_first, full_end, v.block_n, num_stages=v.num_stages):
                dq = _dq_step(dq, qs, kv, rows, place, n, 0, c, v)
            if v.right or not v.whole_n:
                for n in tl.range(full_end, end, v.block_n, num_stages=v.num_stages):
                    dq = _dq_step(dq, qs, kv, rows, place, n, 1, c, v)
        dq_ptr = dq_x[0] + head_offset(dq_x, row_q, start_q, h_64)
        dq = dq * c.scale
        store_rows(dq_ptr, dq_x[1][1], m0, stored, dq, v.block_m, v.head_dim, v.block_d)


@triton.jit(do_not_specialize=["seed", "offset"])
def attention_dq(
    q_x,
    k_x,
    v_x,
    do_x,
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    rows_x,
    dq_x,
    row_strides,
    c,
    seed: tl.int64,
    offset: tl.int64,
    v: tl.constexpr,
):
    """Grid (query tiles, heads, batch) or the list's. *_x are (pointer, strides, flat strides)."""
    tensors, descriptors = (q_x, k_x, v_x, do_x), (q_desc, k_desc, v_desc, do_desc)
    inputs = (tensors, descriptors, rows_x, row_strides, (seed, offset))
    dq_tile(tile_of(c, v.right), inputs, dq_x, c, v)


@triton.jit(do_not_specialize=["seed", "offset"])
def attention_grads(
    q_x,
    k_x,
    v_x,
    do_x,
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    rows_x,
    grads_x,
    dq_x,
    row_strides,
    c,
    c_dq,
    tiles,
    seed: tl.int64,
    offset: tl.int64,
    v: tl.constexpr,
    v_dq: tl.constexpr,
):
    """Grid (key tiles + group x query tiles, kv heads, batch), tiles being (key, query tiles); or
    the list of c and then that of c_dq (None: not packed), tiles[0] being the first one's length.

    The programs of dK and dV, which take longer, come first; without a list those of a head are
    neighbours. Source: one launch for both is FlexAttention's (PyTorch 2.11,
    torch/_inductor/kernel/flex).
    """
    tensors, descriptors = (q_x, k_x, v_x, do_x), (q_desc, k_desc, v_desc, do_desc)
    inputs = (tensors, descriptors, rows_x, row_strides, (seed, offset))
    place, g, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if place < tiles[0]:
        which = (place, g, b)
        if c.tiles is not None:
            which = listed(c, place)
        dkdv_tile(which, inputs, grads_x, c, v)
    elif c.tiles is not None:
        dq_tile(listed(c_dq, place - tiles[0]), inputs, dq_x, c_dq, v_dq)
    else:
        place -= tiles[0]
        tile = place // v.group
        if v.right:  # longest first, as in `tile_of`
            tile = tiles[1] - 1 - tile
        dq_tile((tile, g * v.group + place % v.group, b), inputs, dq_x, c, v_dq)


@triton.jit
def _bias_tile(q_x, k_x, v_x, do_x, rows_x, row_strides, at, c, seeds, v: tl.constexpr):
    """dS of one tile of one head; at is (batch, head, m0, n0)."""
    b, h, m0, n0 = at
    row_q, start_q, _, S, row_k, start_k, T, pad = sequence(c, b)
    g = h // v.group
    h_64, g_64 = h.to(tl.int64), g.to(tl.int64)
    q_ptr, do_ptr = head_of(q_x, row_q, start_q, h_64), head_of(do_x, row_q, start_q, h_64)
    k_ptr, v_ptr = head_of(k_x, row_k, start_k, g_64), head_of(v_x, row_k, start_k, g_64)
    q = load_rows(q_ptr, q_x[1][1], m0, 0, S, v.block_m, v.head_dim, v.block_d)
    k = load_rows(k_ptr, k_x[1][1], n0, pad, T, v.block_n, v.head_dim, v.block_d)
    do = load_rows(do_ptr, do_x[1][1], m0, 0, S, v.block_m, v.head_dim_v, v.block_dv)
    values = load_rows(v_ptr, v_x[1][1], n0, pad, T, v.block_n, v.head_dim_v, v.block_dv)
    i_m = m0 + tl.arange(0, v.block_m)
    row = row_of(row_strides, row_q, h_64) + row_start(c, b, start_q) + i_m
    delta = tl.load(rows_x[0] + row, mask=i_m < S, other=0.0)
    lse = tl.load(rows_x[1] + row, mask=i_m < S, other=float("inf"))
    i, j = i_m[:, None], n0 + tl.arange(0, v.block_n)[None, :]
    qk = tl.dot(q, tl.trans(k), input_precision=v.precision)
    s, _, raw = score_log2(qk, i, j, S, T, b, h, c, v)
    p = tl.where(visible(i, j, S, T, pad, b, h, c, v), probabilities(s, lse[:, None], c, v), 0.0)
    dp = tl.dot(do, tl.trans(values), input_precision=v.precision)
    if v.dropout:
        keep = dropout_keep(i, j, b, h, seeds[0], seeds[1], c)
        dp = tl.where(keep, dp * c.keep_scale, 0.0)
    return before_mod(p * (dp - delta[:, None]), raw, b, h, i, j, c, v)


@triton.jit(do_not_specialize=["seed", "offset"])
def attention_dbias(
    q_x,
    k_x,
    v_x,
    do_x,
    rows_x,
    dbias_x,
    row_strides,
    batch,
    heads,
    c,
    seed: tl.int64,
    offset: tl.int64,
    v: tl.constexpr,
):
    """Grid (query tiles, key tiles, batch x heads of the bias): fixed order, no atomics.

    dbias_x is (pointer, batch, heads, strides) of the contiguous gradient.
    """
    BLOCK_M: tl.constexpr = v.block_m
    BLOCK_N: tl.constexpr = v.block_n
    m0, n0 = tl.program_id(0) * v.block_m, tl.program_id(1) * v.block_n
    dbias_ptr, bias_batch, bias_heads, strides = dbias_x
    bias_b, bias_h = tl.program_id(2) // bias_heads, tl.program_id(2) % bias_heads
    num_b, num_h = batch // bias_batch, heads // bias_heads
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for member in range(num_b * num_h):
        b, h = bias_b + member // num_h, bias_h + member % num_h
        total += _bias_tile(
            q_x, k_x, v_x, do_x, rows_x, row_strides, (b, h, m0, n0), c, (seed, offset), v
        )
    i = m0 + tl.arange(0, v.block_m)[:, None]
    j = n0 + tl.arange(0, v.block_n)[None, :]
    base = dbias_ptr + bias_b.to(tl.int64) * strides[0] + bias_h.to(tl.int64) * strides[1]
    ptrs = base + i.to(tl.int64) * strides[2] + j
    S, T = tl.cast(c.seqlen_q, tl.int32), tl.cast(c.seqlen_k, tl.int32)
    tl.store(ptrs, total.to(dbias_ptr.dtype.element_ty), mask=(i < S) & (j < T))
