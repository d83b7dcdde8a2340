"""Attention's public functions: FlashAttention's names, parameters, order and defaults.

What ours take beyond FlashAttention's, by keyword only:
    sinks [H]                one logit a head in the softmax's denominator, differentiable
    bias [B|1, H|1, S, T]    added to the scores, differentiable
    seqused_q, seqused_k     int32 [B], used prefix of each sequence
    leftpad_k                int32 [B], first key of each sequence (dense)
    dropout_seed, _offset    the dropout mask is a function of these (rng.py); drawn from torch's
                             generator where None
    impl                     an implementation's name; None lets the registry choose
    return_lse               return (out, lse)
Every function is differentiable (but for the KV cache's), the LSE too. Everything is checked once,
on the host, before anything runs. Meaning of masks and empty rows: problem.py.
Source: https://github.com/Dao-AILab/flash-attention (interface; nothing of its code).
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from ridgeline.core.errors import bad_value, unsupported
from ridgeline.kernels.attention.append_op import append_checked, append_op, rotate_checked
from ridgeline.kernels.attention.arguments import Arguments, check_static, window_bounds
from ridgeline.kernels.attention.calls import attention, kind_of, known
from ridgeline.kernels.attention.dispatch import eager
from ridgeline.kernels.attention.kvcache import (
    Where,
    check_append,
    check_rotary,
    rotate_queries,
)

_TENSORS = tuple(field.name for field in fields(Arguments))[:14]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, None]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    impl: str | None = None,
    return_lse: bool = False,
) -> Result:
    """Exact attention of dense sequences.

    Shapes: q [B, S, H, D], k [B, T, G, D], v [B, T, G, V], H a multiple of G; bf16, fp16, fp32, any
    strides -> out [B, S, H, V] in q's dtype; lse fp32 [B, H, S], natural log, -inf for empty rows.
    Numerics: softmax and sums in fp32. return_attn_probs gives (out, lse, None): P is never formed.
    Raises: ValueError, TypeError, NotImplementedError before anything runs, naming the argument.
    Source: FlashAttention-2 (Dao, 2023).
    """
    tensors = (sinks, bias, seqused_q, seqused_k, leftpad_k, alibi_slopes)
    numbers = (softmax_scale, causal, window_size, softcap, deterministic, impl)
    plain = _is_plain(tensors, window_size, dropout_p)
    if plain and (found := known(q, k, v, numbers)) is not None:
        if return_attn_probs:
            return (*found, None)
        return found if return_lse else found[0]
    left, right = window_bounds(window_size)
    a = Arguments(
        q=q,
        k=k,
        v=v,
        sinks=sinks,
        bias=bias,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        alibi_slopes=alibi_slopes,
        seed_offset=_seed_offset(dropout_p, dropout_seed, dropout_offset),
        softmax_scale=_scale(q, softmax_scale),
        causal=causal,
        window_left=left,
        window_right=right,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        needs_grad=_needs_grad(q, k, v, sinks, bias),
        impl=impl,
    )
    return _results(a, return_attn_probs, return_lse, numbers if plain else None)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` on one tensor. Shapes: qkv [B, S, 3, H, D] -> out [B, S, H, D]."""
    _check_packed("qkv", qkv, 3)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with k and v in one. Shapes: q [B, S, H, D], kv [B, T, 2, G, D]."""
    _check_packed("kv", kv, 2)
    k, v = kv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
    impl: str | None = None,
    return_lse: bool = False,
) -> Result:
    """Exact attention of packed sequences of different lengths (zero included).

    Shapes: q [P, H, D], k [P', G, D], v [P', G, V]; cu_seqlens int32 [B + 1], starts of sequences;
    with block_table int32 [B, U], k and v are pages [pages, W, G, D] (forward only). bias, if any,
    is [B|1, H|1, max_seqlen_q, max_seqlen_k] -> out [P, H, V]; lse fp32 [H, P].
    Numerics: as flash_attn_func. Rows of q in no sequence give O = 0, LSE = -inf.
    Raises: as flash_attn_func; cu_seqlens' values are checked where that is cheap (on a CPU).
    """
    left, right = window_bounds(window_size)
    a = Arguments(
        q=q,
        k=k,
        v=v,
        sinks=sinks,
        bias=bias,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        seed_offset=_seed_offset(dropout_p, dropout_seed, dropout_offset),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=_scale(q, softmax_scale),
        causal=causal,
        window_left=left,
        window_right=right,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        needs_grad=_needs_grad(q, k, v, sinks, bias),
        impl=impl,
    )
    return _results(a, return_attn_probs, return_lse)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: torch.Tensor | None = None,
    impl: str | None = None,
) -> Result:
    """Attention of new queries over a cache, to which new k and v are first appended in place.

    Shapes: q [B, S, H, D]; caches [B or more, T, G, D] (v: V), or pages [pages, W, G, D] with
    block_table int32 [B, U]; k, v [B, S', G, D] new tokens; cache_seqlens (int or int32 [B])
    counts the tokens before them, None is a full cache; cache_batch_idx int32 [B], row of each
    sequence; cache_leftpad int32 [B], first valid key; rotary_cos, rotary_sin [positions, R], 2 R
    <= D: k is rotated at cache_seqlens + i, q too where causal or windowed, else all at
    cache_seqlens. -> out [B, S, H, V], and lse fp32 [B, H, S] with return_softmax_lse. Not
    differentiable. num_splits: parts the keys are split into, 0 is automatic; changes speed, not
    meaning. Raises: as flash_attn_func; values of int tensors are checked where that is cheap (on
    a CPU).
    """
    left, right = window_bounds(window_size)
    _check_cache_call(q, k, v, cache_seqlens, rotary_cos, _needs_grad(q, k_cache, v_cache, k, v))
    host_length = None
    if isinstance(cache_seqlens, int):
        host_length = _checked_length(cache_seqlens, k_cache, block_table)
        length = (q.shape[0],)
        cache_seqlens = torch.full(length, host_length, dtype=torch.int32, device=q.device)
    new_tokens = 0 if k is None else k.shape[1]
    seqused = (
        cache_seqlens if new_tokens == 0 or cache_seqlens is None else cache_seqlens + new_tokens
    )
    plain = block_table is None and cache_batch_idx is None and cache_leftpad is None
    sliced = host_length is not None and plain and q.device.type == "cpu"
    k_used, v_used = k_cache, v_cache
    if sliced and host_length is not None:
        k_used, v_used = (x[:, : host_length + new_tokens] for x in (k_cache, v_cache))
    a = Arguments(
        q=q,
        k=k_used,
        v=v_used,
        sinks=sinks,
        seqused_k=None if sliced else seqused,
        leftpad_k=cache_leftpad,
        kv_batch_idx=cache_batch_idx,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        softmax_scale=_scale(q, softmax_scale),
        causal=causal,
        window_left=left,
        window_right=right,
        softcap=softcap,
        num_splits=num_splits,
        kv_cache=True,
        impl=impl,
    )
    if cache_seqlens is None or k is None or v is None:
        return _results(a, False, return_softmax_lse)
    where = Where(
        cache_seqlens, cache_batch_idx, block_table, rotary_cos, rotary_sin, rotary_interleaved
    )
    out, lse = _append_and_attend(a, (k_cache, v_cache, k, v), where)
    return (out, lse) if return_softmax_lse else out


def _append_and_attend(
    a: Arguments,
    caches_and_new: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    where: Where,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append and attend; the cache is written once nothing can refuse the call any more.

    Compiled, the values of tensors are looked at by the operators, one after the other: a call bad
    in them alone is then refused after the append.
    """
    _refuse_slope_gradients(a)
    advance = a.causal or a.window_left is not None or a.window_right is not None
    rotary = (where.rotary_cos, where.rotary_sin)
    if not eager((*(getattr(a, n) for n in _TENSORS), *caches_and_new, *rotary)):
        check_static(a)
        append_op(*caches_and_new, *(getattr(where, n) for n in Where.__slots__))
        if rotary[0] is not None:
            a = replace(a, q=_rotated(a.q, where, advance, fused=False))
        return attention(a)
    kind = kind_of(a, lambda: check_append(*caches_and_new, where))
    with torch.no_grad():
        if rotary[0] is not None:  # before the append: it checks the tables
            a = replace(a, q=_rotated(a.q, where, advance, fused=True))
        append_checked(*caches_and_new, where)
        return kind.run(a)


def _results(
    a: Arguments, attn_probs: bool, return_lse: bool, numbers: tuple[object, ...] | None = None
) -> Result:
    if attn_probs and a.dropout_p:
        raise unsupported(
            "attention", "return_attn_probs", "be False with dropout", True, "use return_lse"
        )
    _refuse_slope_gradients(a)
    out, lse = attention(a, numbers)
    if attn_probs:
        return out, lse, None
    return (out, lse) if return_lse else out


def _refuse_slope_gradients(a: Arguments) -> None:
    if a.alibi_slopes is not None and _needs_grad(a.alibi_slopes):
        raise unsupported(
            "attention",
            "alibi_slopes",
            "not need gradients",
            "requires_grad",
            "detach it, or give -slope * distance as bias",
        )


def _is_plain(tensors: tuple[torch.Tensor | None, ...], window_size: object, drop: float) -> bool:
    """Whether a call has nothing but q, k, v and numbers that can be part of a key."""
    if drop or type(window_size) is not tuple:
        return False
    for tensor in tensors:
        if tensor is not None:
            return False
    return True


def _scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def _needs_grad(*tensors: torch.Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    for tensor in tensors:  # noqa: SIM110 (a generator takes twice the time)
        if tensor is not None and tensor.requires_grad:
            return True
    return False


def _seed_offset(dropout_p: float, seed: int | None, offset: int) -> torch.Tensor | None:
    """int64 [2] on the CPU: a tensor, so that a compiled graph draws anew at each call."""
    if not dropout_p:
        return None
    if not 0 <= offset < 2**32:
        raise bad_value("attention", "dropout_offset", "be in [0, 2^32)", offset, "reduce it")
    if seed is None:
        drawn = torch.randint(0, 2**62, (1,), dtype=torch.int64)
        return torch.cat((drawn, torch.tensor([offset], dtype=torch.int64)))
    if not 0 <= seed < 2**63:
        raise bad_value("attention", "dropout_seed", "be in [0, 2^63)", seed, "reduce it")
    return torch.tensor([seed, offset], dtype=torch.int64)


def _rotated(q_BSHD: torch.Tensor, where: Where, advance: bool, fused: bool) -> torch.Tensor:
    """The queries rotated; fused: in one launch where there is a kernel for it."""
    check_rotary(where, q_BSHD.shape[-1], q_BSHD.shape[1] if advance else 1)
    return (rotate_checked if fused else rotate_queries)(q_BSHD, where, advance)


def _checked_length(
    cache_seqlens: int, k_cache: torch.Tensor, block_table: torch.Tensor | None
) -> int:
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if not 0 <= cache_seqlens <= capacity:
        raise bad_value(
            "attention",
            "cache_seqlens",
            f"be in [0, {capacity}], the cache's size",
            cache_seqlens,
            "allocate a longer cache",
        )
    return cache_seqlens


def _check_packed(name: str, packed: torch.Tensor, parts: int) -> None:
    if packed.dim() != 5 or packed.shape[2] != parts:
        raise bad_value(
            "attention",
            name,
            f"be [batch, seqlen, {parts}, heads, head_dim]",
            tuple(packed.shape),
            "stack along dim 2",
        )


def _check_cache_call(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_seqlens: int | torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    needs_grad: bool,
) -> None:
    if (k is None) != (v is None):
        raise bad_value("attention", "v", "be given with k", None, "give both or neither")
    if k is not None and cache_seqlens is None:
        raise bad_value(
            "attention", "cache_seqlens", "be given with k", None, "say how full the cache is"
        )
    if rotary_cos is not None and k is None:
        raise bad_value("attention", "k", "be given with rotary_cos", None, "rotate q beforehand")
    if needs_grad:
        raise unsupported(
            "attention",
            "q",
            "not need gradients in flash_attn_with_kvcache",
            "requires_grad",
            "call it under torch.no_grad(), or use flash_attn_func",
        )
    if q.dim() != 4:
        raise bad_value(
            "attention", "q", "be [batch, seqlen, heads, head_dim]", f"{q.dim()} dims", "reshape it"
        )
