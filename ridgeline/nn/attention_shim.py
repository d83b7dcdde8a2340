"""Temporary: FlashAttention's three functions on PyTorch's fused attention, until kernels/attention lands."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def flash_attn_func(q, k, v, *, causal=False, window_size=(-1, -1), softmax_scale=None):
    S, T = q.shape[1], k.shape[1]
    i = torch.arange(S, device=q.device)[:, None] + T - S
    j = torch.arange(T, device=q.device)[None]
    mask = torch.ones(S, T, dtype=torch.bool, device=q.device)
    if causal:
        mask &= j <= i
    if window_size[0] >= 0:
        mask &= j >= i - window_size[0]
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        scale=softmax_scale,
        enable_gqa=True,
    )
    return o.transpose(1, 2)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
):
    ends = cu_seqlens_q.tolist()
    parts = [
        flash_attn_func(q[None, a:b], k[None, a:b], v[None, a:b], **options)[0]
        for a, b in zip(ends, ends[1:], strict=False)
    ]
    return torch.cat(parts)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, *, cache_seqlens, **options):
    outs = []
    for b, start in enumerate(cache_seqlens.tolist()):
        end = start + k.shape[1]
        k_cache[b, start:end], v_cache[b, start:end] = k[b], v[b]
        outs.append(
            flash_attn_func(
                q[b : b + 1], k_cache[b : b + 1, :end], v_cache[b : b + 1, :end], **options
            )
        )
    return torch.cat(outs)
