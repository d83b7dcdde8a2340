"""The KV cache's write side: rotary embedding and appending new keys and values in place.

    x' = x cos + rotate(x) sin on the first 2 * R of D dims, pairs (d, d + R) halved or (2d, 2d + 1)
    interleaved; k' and v go to row cache_seqlens + i of their sequence, or to its page and slot.

Plain PyTorch on any device: reads k, v once and writes them once; no copy of the cache. An
implementation may bring fused kernels in its module: `append_kv(k_cache, v_cache, k, v, where)` and
`rotate_queries(q, where, advance)` (triton_append.py).
Source: Su et al., "RoFormer", 2021 (rotary); FlashAttention's flash_attn_with_kvcache (semantics).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.core.errors import bad_type, bad_value


@dataclass(frozen=True, slots=True)
class Where:
    """Where new tokens go and how they are rotated."""

    cache_seqlens: torch.Tensor
    """int32 [B], tokens in the cache before the new ones."""
    kv_batch_idx: torch.Tensor | None
    """int32 [B], row of the cache of each sequence."""
    block_table: torch.Tensor | None
    """int32 [B, U], pages of each sequence."""
    rotary_cos: torch.Tensor | None
    """[positions, R]."""
    rotary_sin: torch.Tensor | None
    rotary_interleaved: bool


_FEW = 4
"""Sequences up to which slices are copied one by one."""


def positions_of(cache_seqlens: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Positions of new tokens: int64 [B, S]."""
    steps = torch.arange(new_tokens, device=cache_seqlens.device)
    return cache_seqlens.long()[:, None] + steps


def rotate(
    x_BSHD: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions_BS: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """Rotary embedding at given positions -> a new tensor in x's dtype.

    Shapes: cos and sin [positions, R], 2 R <= D; positions int64 [B, S].
    Numerics: products and sums in fp32.
    """
    rotary_dim = 2 * cos.shape[-1]
    c, s = (table[positions_BS].float()[:, :, None, :] for table in (cos, sin))
    turned = x_BSHD[..., :rotary_dim].float()
    if interleaved:
        even, odd = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat((first * c - second * s, first * s + second * c), dim=-1)
    if rotary_dim == x_BSHD.shape[-1]:
        return turned.to(x_BSHD.dtype)
    return torch.cat((turned.to(x_BSHD.dtype), x_BSHD[..., rotary_dim:]), dim=-1)


def rotate_queries(q_BSHD: torch.Tensor, where: Where, advance: bool) -> torch.Tensor:
    """Queries rotated at cache_seqlens + i, or all at cache_seqlens where they do not advance."""
    cos, sin = where.rotary_cos, where.rotary_sin
    assert cos is not None and sin is not None
    positions_BS = positions_of(where.cache_seqlens, q_BSHD.shape[1])
    if not advance:
        positions_BS = positions_BS[:, :1].expand_as(positions_BS)
    return rotate(q_BSHD, cos, sin, positions_BS, where.rotary_interleaved)


def append(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: Where
) -> None:
    """Write new keys (rotated) and values into the cache, in place.

    Shapes: k_BSGD, v_BSGV; caches [rows, T, G, D] or, with block_table, [pages, W, G, D].
    """
    if _few_on_host(k, where):
        rows = range(k.shape[0]) if where.kv_batch_idx is None else where.kv_batch_idx.tolist()
        for b, (row, start) in enumerate(zip(rows, where.cache_seqlens.tolist(), strict=True)):
            end = start + k.shape[1]
            k_cache[row, start:end].copy_(k[b])
            v_cache[row, start:end].copy_(v[b])
        return
    positions_BS = positions_of(where.cache_seqlens, k.shape[1])
    if where.rotary_cos is not None and where.rotary_sin is not None:
        cos, sin = where.rotary_cos, where.rotary_sin
        k = rotate(k, cos, sin, positions_BS, where.rotary_interleaved)
    if where.block_table is not None:
        page_tokens = k_cache.shape[1]
        pages = where.block_table.long().gather(1, positions_BS // page_tokens)
        index = (pages, positions_BS % page_tokens)
    else:
        rows = where.kv_batch_idx
        if rows is None:
            rows = torch.arange(k.shape[0], device=k.device)
        index = (rows.long()[:, None].expand_as(positions_BS), positions_BS)
    k_cache.index_put_(index, k)
    v_cache.index_put_(index, v)


def _few_on_host(k: torch.Tensor, where: Where) -> bool:
    """Whether plain slices do: no index tensors to build for a token of a few sequences."""
    plain = where.block_table is None and where.rotary_cos is None
    return plain and k.device.type == "cpu" and k.shape[0] <= _FEW


def check_append(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: Where
) -> None:
    """Refuse an append that does not fit. Raises: ValueError."""
    lengths = where.cache_seqlens
    batch = lengths.shape[0]
    if lengths.dtype != torch.int32:
        raise bad_type(
            "attention", "cache_seqlens", "be int32", lengths.dtype, "call .to(torch.int32)"
        )
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        want = (batch, k.shape[1], *cache.shape[2:])
        if tuple(new.shape) != want or new.dtype != cache.dtype:
            got = f"{tuple(new.shape)} {new.dtype}"
            raise bad_value(
                "attention", name, f"be {want} in {cache.dtype}", got, "match cache and batch"
            )
    if lengths.device.type == "cpu" and batch:
        _check_room(k_cache, k.shape[1], where)
    check_rotary(where, k_cache.shape[-1], k.shape[1])


def _check_room(k_cache: torch.Tensor, new_tokens: int, where: Where) -> None:
    """Values on the host, where looking at them is cheap."""
    lengths, table, rows = where.cache_seqlens, where.block_table, where.kv_batch_idx
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    values = lengths.tolist()
    least, most = min(values), max(values)
    if least < 0 or most + new_tokens > capacity:
        raise bad_value(
            "attention",
            "cache_seqlens",
            f"leave room for {new_tokens} new tokens in the cache's {capacity}",
            most if least >= 0 else least,
            "allocate a longer cache",
        )
    if table is not None and new_tokens:
        pages = table.long().gather(1, positions_of(lengths, new_tokens) // k_cache.shape[1])
        _check_index("block_table", pages, k_cache.shape[0])
    if rows is not None:
        _check_index("cache_batch_idx", rows, k_cache.shape[0])


def _check_index(name: str, index: torch.Tensor, size: int) -> None:
    if not index.numel():
        return
    values = index.flatten().tolist()
    least, most = min(values), max(values)
    if least < 0 or most >= size:
        got = least if least < 0 else most
        raise bad_value("attention", name, f"be from 0 to {size - 1}", got, "check how it was made")


def check_rotary(where: Where, head_dim: int, new_tokens: int) -> None:
    """Refuse rotary tables that do not fit. Raises: ValueError."""
    cos, sin = where.rotary_cos, where.rotary_sin
    if (cos is None) != (sin is None):
        raise bad_value(
            "attention", "rotary_sin", "be given with rotary_cos", None, "give both or neither"
        )
    if cos is None or sin is None:
        return
    if cos.dim() != 2 or cos.shape != sin.shape or not 0 < 2 * cos.shape[1] <= head_dim:
        raise bad_value(
            "attention",
            "rotary_cos",
            f"be [positions, at most {head_dim // 2}], as rotary_sin",
            tuple(cos.shape),
            "give cos and sin of half the rotary dim",
        )
    if where.cache_seqlens.device.type == "cpu" and where.cache_seqlens.numel():
        last = max(where.cache_seqlens.tolist()) + new_tokens
        if last > cos.shape[0]:
            raise bad_value(
                "attention", "rotary_cos", f"cover {last} positions", cos.shape[0], "extend it"
            )
