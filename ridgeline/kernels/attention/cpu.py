"""Attention on a CPU: PyTorch's fused CPU kernel where it can, blocks of rows for the rest.

The fused kernel (flash tiling, memory linear in length, forward and backward) knows no bottom-right
causal mask, window, sinks or grouped heads; they are put around it:
- causal with T > S: the first T - S keys unmasked, the last S as a square causal call, joined by
  LSE;
- window and ALiBi: blocks of queries against the slice of keys they can see, with an additive mask;
- sinks: O and LSE corrected afterwards, O' = O exp(LSE - LSE'), LSE' = logaddexp(LSE, sink);
- grouped heads: the H / G query heads of a group are folded into rows (one decode token of a group
  reads its K and V once), or K and V repeated where a mask forbids that.
Backward passes the final O and LSE to the kernel's backward call by call: P = exp(S - LSE) is then
the whole softmax's P (the property ring attention uses; Liu et al., "Ring Attention", 2023).
Softcap, dropout, bias, a user's functions and a gradient of LSE take the general path: blocks of
rows in fp32 matmuls.
Numerics: softmax and accumulation in fp32. Decode moves K and V once: bound by memory bandwidth.
Source: FlashAttention-2 (Dao, 2023), section 3.1, for the recomputation in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ridgeline.kernels.attention import cpu_blocks
from ridgeline.kernels.attention.layout import Given, Part, bounds, joined, parts
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionGrads, AttentionOptions

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_MASKED_ROWS = 128
"""Query rows of a masked call: its mask has this many rows."""


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    extras: AttentionExtras,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a validated call -> (out, lse_ln); layouts in problem.py."""
    fused = _fused_takes(options, extras)

    def one(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        if fused:
            return _fused_forward(part, options, extras)
        return cpu_blocks.forward(part, options, extras)

    return joined(parts(q, k, v, extras), q, v, one)


def decode_one(
    q_HD: torch.Tensor, k_TGD: torch.Tensor, v_TGV: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """One query over all keys of one sequence, [1, H * V]: what `forward` does for it, without the
    general call's fixed cost, for a decoding loop that has checked its shapes (V = D)."""
    G, D = k_TGD.shape[1:]
    out_1GRV = _flash(
        q_HD.view(1, G, -1, D),
        k_TGD.transpose(0, 1)[None],
        v_TGV.transpose(0, 1)[None],
        0.0,
        False,
        scale=softmax_scale,
    )[0]
    return out_1GRV.reshape(1, -1)


def decode_wide(
    q_GRD: torch.Tensor, k_GDT: torch.Tensor, v_GTV: torch.Tensor, out_GRV: torch.Tensor
) -> None:
    """`decode_one` in fp32 into kept memory; queries scaled, heads by group. Two matrix products
    and a softmax, as the fused kernel's fixed cost is as large as they: 28 us against 46 (57 in
    bf16) for 150 keys, 9 heads of 64 in 3 groups, two threads of an EPYC (AVX2), 2026-11-30."""
    p_GRT = torch.softmax(torch.bmm(q_GRD, k_GDT), -1)
    torch.bmm(p_GRT, v_GTV, out=out_GRV)


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse_ln: torch.Tensor,
    options: AttentionOptions,
    extras: AttentionExtras,
) -> AttentionGrads:
    """Gradients of a validated call; bitwise repeatable."""
    fused = dlse is None and _fused_takes(options, extras)
    grads = cpu_blocks.Grads.zeros(q, k, v, extras)
    for part in parts(q, k, v, extras):
        given = part.given(dout, dlse, out, lse_ln)
        if not fused:
            cpu_blocks.backward(part, given, options, extras, grads)
            continue
        dq, dk, dv, dsinks = _fused_backward(*_widened(part, given), options, extras)
        if part.whole:
            dsinks = None if dsinks is None else dsinks.to(cpu_blocks.wide(q))
            return AttentionGrads(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks)
        grads.add(part, dq, dk, dv, dsinks)
    return grads.result(q, k, v, extras)


def _widened(part: Part, given: Given) -> tuple[Part, Given]:
    """16-bit inputs of backward in fp32: the fused kernel's 16-bit backward is five times slower.

    Measured on two cores of an AMD EPYC, 2026-11-29, PyTorch 2.13, 1,024 tokens, 9 heads of 64, one
    thread: 716 ms in bf16, 132 ms in fp32.
    """
    to = cpu_blocks.wide(part.q_BSHD)
    part = replace(
        part, q_BSHD=part.q_BSHD.to(to), k_BTGD=part.k_BTGD.to(to), v_BTGV=part.v_BTGV.to(to)
    )
    return part, replace(given, dout_BSHV=given.dout_BSHV.to(to), out_BSHV=given.out_BSHV.to(to))


def _fused_takes(options: AttentionOptions, extras: AttentionExtras) -> bool:
    general = options.softcap or options.dropout_p or extras.bias is not None
    return not general and extras.mods is None


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the fused kernel: rows [i0, i1) of queries against keys [lo, hi)."""

    i0: int
    i1: int
    lo: int
    hi: int
    causal: bool = False
    masked: bool = False
    joins: bool = False
    """The rows already have a result of other keys, to be joined by LSE."""

    def covers(self, part: Part) -> bool:
        """Whether the call is the whole of a part."""
        rows, keys = (self.i0, self.i1), (self.lo, self.hi)
        return rows == (0, part.seqlen_q) and keys == (0, part.seqlen_k)


def _plan(part: Part, options: AttentionOptions, alibi: bool) -> Iterator[_Call]:
    S, T = part.seqlen_q, part.seqlen_k
    left, right = bounds(options, S, T)
    first = 0 if right is None else max(0, S - T - right)  # rows before it see nothing
    if T == 0 or first >= S:
        return
    if left is None and right is None and not alibi:
        yield _Call(0, S, 0, T)
    elif left is None and right == 0 and not alibi:
        prefix = max(0, T - S)
        if prefix:
            yield _Call(0, S, 0, prefix)
        yield _Call(first, S, prefix, T, causal=S > 1, joins=prefix > 0)
    else:
        for i0 in range(first, S, _MASKED_ROWS):
            i1 = min(S, i0 + _MASKED_ROWS)
            lo = 0 if left is None else max(0, i0 + T - S - left)
            hi = T if right is None else min(T, i1 + T - S + right)
            yield _Call(i0, i1, lo, hi, masked=alibi or i1 - i0 > 1)


def _mask(
    call: _Call, part: Part, options: AttentionOptions, extras: AttentionExtras
) -> torch.Tensor | None:
    """The additive fp32 mask [B or 1, H or 1, rows, keys] of a masked call."""
    if not call.masked:
        return None
    S, T = part.seqlen_q, part.seqlen_k
    row = torch.arange(call.i0, call.i1)[:, None]
    distance = row + (T - S) - torch.arange(call.lo, call.hi)[None, :]
    left, right = bounds(options, S, T)
    mask = torch.zeros(distance.shape)
    if right is not None:
        mask.masked_fill_(distance < -right, float("-inf"))
    if left is not None:
        mask.masked_fill_(distance > left, float("-inf"))
    mask = mask[None, None]
    if extras.alibi_slopes is not None:
        mask = mask - part.slopes(extras.alibi_slopes) * distance.abs()
    return mask.to(torch.float64) if part.q_BSHD.dtype == torch.float64 else mask


def _fused_forward(
    part: Part, options: AttentionOptions, extras: AttentionExtras
) -> tuple[torch.Tensor, torch.Tensor]:
    calls = list(_plan(part, options, extras.alibi_slopes is not None))
    if len(calls) == 1 and (calls[0].i0, calls[0].i1) == (0, part.seqlen_q):
        mask = _mask(calls[0], part, options, extras)
        out_BSHV, lse_BHS = _one_call(part, calls[0], mask, options.softmax_scale)
    else:
        out_BSHV, lse_BHS = part.empty_result()
        for call in calls:
            mask = _mask(call, part, options, extras)
            o, lse = _one_call(part, call, mask, options.softmax_scale)
            rows = slice(call.i0, call.i1)
            if call.joins:
                o, lse = join(out_BSHV[:, rows], lse_BHS[:, :, rows], o, lse)
            out_BSHV[:, rows], lse_BHS[:, :, rows] = o, lse
    if extras.sinks_H is not None:
        before, sink_H1 = lse_BHS, extras.sinks_H.to(lse_BHS.dtype)[:, None]
        lse_BHS = torch.logaddexp(before, sink_H1)
        out_BSHV = (out_BSHV * _weight(before, lse_BHS)).to(out_BSHV.dtype)
    return out_BSHV, lse_BHS


def _weight(lse_part_BHS: torch.Tensor, lse_BHS: torch.Tensor) -> torch.Tensor:
    """Share of a part in the whole softmax, as a factor of out: [B, S, H, 1]."""
    share = torch.exp(lse_part_BHS - lse_BHS)
    return share.masked_fill(lse_part_BHS == float("-inf"), 0.0).transpose(1, 2)[..., None]


def join(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys from the attention over each.

    Shapes: out_BSHV, lse fp32 [B, H, S]. Source: FlashAttention, appendix (merging by log-sum-exp).
    """
    lse = torch.logaddexp(lse_a, lse_b)
    out = out_a * _weight(lse_a, lse) + out_b * _weight(lse_b, lse)
    return out.to(out_a.dtype), lse


def _kernel_form(x_BSHD: torch.Tensor, dim: int) -> torch.Tensor:
    """[B, heads, rows, dim] as the fused kernel takes it: last stride 1, padded to `dim`."""
    x = x_BSHD.transpose(1, 2)
    if x.shape[-1] < dim:
        return F.pad(x, (0, dim - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _fold(x_BSHD: torch.Tensor, G: int) -> torch.Tensor:
    """Query heads of a group become rows: [B, S, H, D] -> [B, R * S, G, D]."""
    B, S, H, D = x_BSHD.shape
    if H == G:
        return x_BSHD
    return x_BSHD.view(B, S, G, H // G, D).permute(0, 3, 1, 2, 4).reshape(B, -1, G, D)


def _unfold(x_BSGD: torch.Tensor, S: int) -> torch.Tensor:
    """[B, R * S, G, D] -> [B, S, H, D]."""
    B, rows, G, D = x_BSGD.shape
    if rows == S:
        return x_BSGD
    return x_BSGD.view(B, rows // S, S, G, D).permute(0, 2, 3, 1, 4).reshape(B, S, -1, D)


def _one_call(
    part: Part, call: _Call, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    q = part.q_BSHD[:, call.i0 : call.i1]
    k, v = part.k_BTGD[:, call.lo : call.hi], part.v_BTGV[:, call.lo : call.hi]
    rows, H, G, V = q.shape[1], q.shape[2], k.shape[2], v.shape[3]
    dim = max(q.shape[3], V)
    if call.causal or call.masked:
        k, v = (kv.repeat_interleave(H // G, dim=2) if H > G else kv for kv in (k, v))
    else:
        q = _fold(q, G)
    out, lse = _flash(
        *(_kernel_form(x, dim) for x in (q, k, v)), 0.0, call.causal, attn_mask=mask, scale=scale
    )
    out, lse = out.transpose(1, 2)[..., :V], lse.transpose(1, 2)
    return _unfold(out, rows), _unfold(lse[..., None], rows)[..., 0].transpose(1, 2)


def _fused_backward(
    part: Part, given: Given, options: AttentionOptions, extras: AttentionExtras
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    calls = list(_plan(part, options, extras.alibi_slopes is not None))
    scale = options.softmax_scale
    dsinks = None
    if extras.sinks_H is not None:
        dsinks = cpu_blocks.sink_gradient(given, extras.sinks_H)
    if len(calls) == 1 and calls[0].covers(part):
        mask = _mask(calls[0], part, options, extras)
        return (*_one_backward(part, calls[0], given, mask, scale), dsinks)
    wide = cpu_blocks.wide(part.q_BSHD)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (part.q_BSHD, part.k_BTGD, part.v_BTGV))
    for call in calls:  # added at once: kept to the end they would be of quadratic size
        mask = _mask(call, part, options, extras)
        one_dq, one_dk, one_dv = _one_backward(part, call, given, mask, scale)
        dq[:, call.i0 : call.i1] += one_dq
        dk[:, call.lo : call.hi] += one_dk
        dv[:, call.lo : call.hi] += one_dv
    return dq, dk, dv, dsinks


def _one_backward(
    part: Part, call: _Call, given: Given, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = slice(call.i0, call.i1)
    q, out, dout = (x[:, rows] for x in (part.q_BSHD, given.out_BSHV, given.dout_BSHV))
    k, v = part.k_BTGD[:, call.lo : call.hi], part.v_BTGV[:, call.lo : call.hi]
    lse = given.lse_BHS[:, :, rows].transpose(1, 2)[..., None]
    S, H, G, D, V = q.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    dim = max(D, V)
    repeated = (call.causal or call.masked) and H > G
    if repeated:
        k, v = (kv.repeat_interleave(H // G, dim=2) for kv in (k, v))
    elif H > G:
        q, out, dout, lse = (_fold(x.contiguous(), G) for x in (q, out, dout, lse))
    dq, dk, dv = _flash_backward(
        *(_kernel_form(x, dim) for x in (dout, q, k, v, out)),
        lse[..., 0].transpose(1, 2).contiguous(),
        0.0,
        call.causal,
        attn_mask=mask,
        scale=scale,
    )
    dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
    if repeated:
        summed = (x.to(cpu_blocks.wide(x)).unflatten(2, (G, H // G)).sum(3) for x in (dk, dv))
        dk, dv = (x.to(q.dtype) for x in summed)
    return _unfold(dq[..., :D], S), dk[..., :D], dv[..., :V]
