"""Appending to the KV cache with rotary embedding in one launch, and the queries' rotation in one.

    x' = x cos + rotate(x) sin on the first 2 R of D dims; k' and v go to row cache_seqlens + i of
    their sequence, or to its page and slot

A program holds some heads of one new token. Each element reads its partner of the rotation too, so
that halved and interleaved pairs are the same code. Bytes: k, v and two rows of the tables in, k'
and v out; bound by launch latency (in plain PyTorch, kvcache.py, it is some twenty launches).
Nothing is written outside of the cache and no table read beyond its end, whatever the values; in
debug mode a wrong one traps.

Source: FlashAttention's flash_attn_with_kvcache (semantics), RoFormer (Su et al., 2021).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.kernels.attention.arguments import dense
from ridgeline.kernels.attention.kvcache import Where
from ridgeline.kernels.attention.triton_plan import Launch, cdiv, debug_options

_TILE = 1024
"""Elements of a program's rows, at the most."""


@triton.jit
def rotated(
    row_ptr,
    stride_d,
    cols,
    mask,
    tables,
    position,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rows row_ptr [heads, 1] of columns cols [1, dims], rotated as `position` says; tables is
    (cos, sin, (row and column stride of cos, of sin), positions)."""
    x = tl.load(row_ptr + cols * stride_d, mask=mask, other=0.0)
    if R > 0:
        cos_ptr, sin_ptr, strides, positions = tables
        if INTERLEAVED:
            pair, first = cols // 2, cols % 2 == 0
            partner = tl.where(first, cols + 1, cols - 1)
        else:
            first = cols < R
            pair = tl.where(first, cols, cols - R)
            partner = tl.where(first, cols + R, cols - R)
        turned = cols < 2 * R
        known = turned & (position >= 0) & (position < positions)
        tl.device_assert(position < positions, "attention: rotary_cos must cover every position")
        cos = tl.load(cos_ptr + position * strides[0] + pair * strides[1], mask=known, other=1.0)
        sin = tl.load(sin_ptr + position * strides[2] + pair * strides[3], mask=known, other=0.0)
        other = tl.load(row_ptr + partner * stride_d, mask=mask & turned, other=0.0)
        other = tl.where(first, -other.to(tl.float32), other.to(tl.float32))
        new = x.to(tl.float32) * cos.to(tl.float32) + other * sin.to(tl.float32)
        x = tl.where(turned, new.to(x.dtype), x)
    return x


@triton.jit
def append_tokens(
    k_x,
    v_x,
    k_cache_x,
    v_cache_x,
    lengths_ptr,
    rows_ptr,
    pages_x,
    tables,
    sizes,
    new_tokens,
    D: tl.constexpr,
    DV: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Grid (sequences x new tokens, tiles of heads). *_x are (pointer, strides); pages_x is (table
    or None, its stride, pages of a sequence), sizes (rows or pages stored, tokens of each, heads).
    """
    which = tl.program_id(0)
    b, i = which // new_tokens, which % new_tokens
    stored, tokens, num_heads = sizes
    position = tl.load(lengths_ptr + b).to(tl.int64) + i
    row, slot, capacity = b.to(tl.int64), position, tokens
    table_ptr, table_stride, pages = pages_x
    if table_ptr is not None:
        capacity = tokens * pages
        inside = (position >= 0) & (position < capacity)
        page = table_ptr + b.to(tl.int64) * table_stride + position // tokens
        row, slot = tl.load(page, mask=inside, other=-1).to(tl.int64), position % tokens
    elif rows_ptr is not None:
        row = tl.load(rows_ptr + b).to(tl.int64)
    room = (position >= 0) & (position < capacity)
    exists = (row >= 0) & (row < stored)
    tl.device_assert(room, "attention: cache_seqlens must leave room for the new tokens")
    if table_ptr is not None:
        tl.device_assert(exists, "attention: block_table must hold ids of pages of the cache")
    else:
        tl.device_assert(exists, "attention: cache_batch_idx must name a row of the cache")
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    cols, cols_v = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    mask, mask_v = (heads < num_heads) & (cols < D), (heads < num_heads) & (cols_v < DV)
    k_ptr, k_s = k_x
    k_ptr += b.to(tl.int64) * k_s[0] + i.to(tl.int64) * k_s[1] + heads * k_s[2]
    k = rotated(k_ptr, k_s[3], cols, mask, tables, position, R, INTERLEAVED)
    v_ptr, v_s = v_x
    v_ptr += b.to(tl.int64) * v_s[0] + i.to(tl.int64) * v_s[1] + heads * v_s[2]
    v = tl.load(v_ptr + cols_v * v_s[3], mask=mask_v, other=0.0)
    written = room & exists
    k_cache, kc_s = k_cache_x
    v_cache, vc_s = v_cache_x
    k_cache += row * kc_s[0] + slot * kc_s[1] + heads * kc_s[2] + cols * kc_s[3]
    v_cache += row * vc_s[0] + slot * vc_s[1] + heads * vc_s[2] + cols_v * vc_s[3]
    tl.store(k_cache, k, mask=mask & written)
    tl.store(v_cache, v, mask=mask_v & written)


@triton.jit
def rotate_tokens(
    q_x,
    out_x,
    lengths_ptr,
    tables,
    num_heads,
    new_tokens,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ADVANCE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (sequences x queries, tiles of heads); out is q rotated at its position."""
    which = tl.program_id(0)
    b, i = which // new_tokens, which % new_tokens
    position = tl.load(lengths_ptr + b).to(tl.int64)
    if ADVANCE:
        position += i
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < num_heads) & (cols < D)
    q_ptr, q_s = q_x
    q_ptr += b.to(tl.int64) * q_s[0] + i.to(tl.int64) * q_s[1] + heads * q_s[2]
    out_ptr, out_s = out_x
    out_ptr += b.to(tl.int64) * out_s[0] + i.to(tl.int64) * out_s[1] + heads * out_s[2]
    q = rotated(q_ptr, q_s[3], cols, mask, tables, position, R, INTERLEAVED)
    tl.store(out_ptr + cols * out_s[3], q, mask=mask)


def _tables(where: Where):
    """(kernel's argument, R)"""
    cos, sin = where.rotary_cos, where.rotary_sin
    if cos is None or sin is None:
        return (None, None, (0, 0, 0, 0), 0), 0
    return (cos, sin, (*cos.stride(), *sin.stride()), cos.shape[0]), cos.shape[1]


def _heads(count: int, columns: int) -> int:
    """Heads of a program."""
    return min(triton.next_power_of_2(count), max(1, _TILE // columns))


def append_launch(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: Where
) -> Launch:
    """What `append_kv` launches."""
    batch, new_tokens, heads, dim = k.shape
    table = dense(where.block_table)
    tables, half = _tables(where)
    block_d, block_dv = (max(16, triton.next_power_of_2(x.shape[-1])) for x in (k, v))
    per_program = _heads(heads, max(block_d, block_dv))
    return Launch(
        kernel=append_tokens,
        grid=(batch * new_tokens, cdiv(heads, per_program), 1),
        args=(
            *((x, x.stride()) for x in (k, v, k_cache, v_cache)),
            dense(where.cache_seqlens),
            dense(where.kv_batch_idx),
            (
                table,
                0 if table is None else table.stride(0),
                0 if table is None else table.shape[1],
            ),
            tables,
            (k_cache.shape[0], k_cache.shape[1], heads),
            new_tokens,
            dim,
            v.shape[-1],
            half,
            where.rotary_interleaved,
            per_program,
            block_d,
            block_dv,
        ),
        options={"num_warps": 1, **debug_options()},
    )


def rotate_launch(q: torch.Tensor, out: torch.Tensor, where: Where, advance: bool) -> Launch:
    """What `rotate_queries` launches."""
    batch, new_tokens, heads, dim = q.shape
    tables, half = _tables(where)
    block_d = max(16, triton.next_power_of_2(dim))
    per_program = _heads(heads, block_d)
    return Launch(
        kernel=rotate_tokens,
        grid=(batch * new_tokens, cdiv(heads, per_program), 1),
        args=(
            (q, q.stride()),
            (out, out.stride()),
            dense(where.cache_seqlens),
            tables,
            heads,
            new_tokens,
            dim,
            half,
            where.rotary_interleaved,
            advance,
            per_program,
            block_d,
        ),
        options={"num_warps": 1, **debug_options()},
    )


def append_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: Where
) -> None:
    """kvcache.append in one launch."""
    append_launch(k_cache, v_cache, k, v, where).run()


def rotate_queries(q_BSHD: torch.Tensor, where: Where, advance: bool) -> torch.Tensor:
    """Queries rotated at cache_seqlens + i, or all at cache_seqlens, in one launch."""
    out = torch.empty_like(q_BSHD, memory_format=torch.contiguous_format)
    rotate_launch(q_BSHD, out, where, advance).run()
    return out
