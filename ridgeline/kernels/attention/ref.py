"""Attention in plain PyTorch, with every option: the only reference.

    S = score_mod(softcap(scale * Q K^T) + bias - slope * |i + T - S - j|) ; mask
    O = dropout(softmax([S, sink])) V

Bytes moved: the S x T matrix several times; bound by memory. Any device. Meaning: problem.py.
`compute_dtype` is float32 for the reference, float64 for gradients on small shapes, the input's
dtype for the error that a plain PyTorch program would make.

Backward is written out, because an operator's kernel runs where autograd records nothing:
    P = exp(S - LSE), dV = dropout(P)^T dO, dP = dropout(dO V^T), dS = P (dP - rowsum(dO O) + dLSE)
with the O and LSE that it is given: they may be those of more keys than the call has (a ring adds
up such shares), so a softmax over these keys alone would be another one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ridgeline.kernels.attention.layout import Sequence, keys_of, sequences
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionGrads, AttentionOptions
from ridgeline.kernels.attention.rng import keep_mask

NEG_INF = float("-inf")


def attention_ref(q, k, v, options, extras, compute_dtype=torch.float32):
    """Differentiable attention -> (out, lse_ln), both in compute_dtype.

    Shapes: dense q_BSHD k_BTGD v_BTGV -> out_BSHV, lse [B, H, S]; varlen q_PHD k_PGD v_PGV ->
    out_PHV, lse [H, P]. Numerics: every operation in compute_dtype.
    """
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=compute_dtype)
    lse = torch.full_like(out[..., 0].transpose(-1, -2), NEG_INF)
    for sequence in sequences(q, k, extras):
        k_TGD, v_TGV = (keys_of(sequence, kv, extras).to(compute_dtype) for kv in (k, v))
        q_SHD = q[sequence.q_rows].to(compute_dtype)
        out[sequence.q_rows], lse[sequence.lse_rows] = _one_sequence(
            q_SHD, k_TGD, v_TGV, sequence, options, extras
        )
    return out, lse


class _Softmax(NamedTuple):
    """One sequence's softmax, and what backward needs of how it came about; None: not there."""

    p_HST: torch.Tensor
    sink_HS: torch.Tensor | None  # the sink's share
    share_HST: torch.Tensor | None  # what dropout multiplies P by
    slope_HST: torch.Tensor | None  # of the softcap
    lse_HS: torch.Tensor
    raw_HST: torch.Tensor | None  # the scores before a user's score_mod
    places: tuple[torch.Tensor, ...]  # b, h, i, j of the scores


def _one_sequence(q_SHD, k_TGD, v_TGV, sequence: Sequence, options, extras):
    k_THD, v_THV = _by_head(q_SHD, k_TGD, v_TGV, sequence)
    soft = _softmax(q_SHD, k_THD, sequence, options, extras)
    p_HST = soft.p_HST if soft.share_HST is None else soft.p_HST * soft.share_HST
    return torch.einsum("hst,thv->shv", p_HST, v_THV), soft.lse_HS


def _by_head(q_SHD, k_TGD, v_TGV, sequence: Sequence):
    ratio = q_SHD.shape[1] // k_TGD.shape[1]
    return (kv[sequence.leftpad :].repeat_interleave(ratio, dim=1) for kv in (k_TGD, v_TGV))


def _softmax(q_SHD, k_THD, sequence: Sequence, options, extras, lse_HS=None) -> _Softmax:
    """Of the scores; with lse_HS, the part of that softmax which falls on these keys."""
    S, H, T, dtype = sequence.seqlen_q, q_SHD.shape[1], sequence.seqlen_k, q_SHD.dtype
    pad = sequence.leftpad
    row = torch.arange(S, device=q_SHD.device)[:, None]
    col = torch.arange(pad, T, device=q_SHD.device)[None, :]
    distance = row + (T - S) - col  # 0 on the bottom-right diagonal, positive for past keys

    score_HST = torch.einsum("shd,thd->hst", q_SHD, k_THD) * options.softmax_scale
    slope_HST = share_HST = None
    if options.softcap:
        tanh_HST = torch.tanh(score_HST / options.softcap)
        score_HST, slope_HST = options.softcap * tanh_HST, 1 - tanh_HST.square()
    if (bias := extras.bias) is not None:
        score_HST = score_HST + bias[sequence.index if bias.shape[0] > 1 else 0, :, :S, pad:T]
    if (slopes := extras.alibi_slopes) is not None:
        slopes_H = slopes[sequence.index] if slopes.dim() == 2 else slopes
        score_HST = score_HST - slopes_H.to(dtype)[:, None, None] * distance.abs()

    b, h = (torch.tensor(sequence.index, device=row.device), torch.arange(H, device=row.device))
    places, raw_HST = (b.view(1, 1, 1), h[:, None, None], row, col), None
    if extras.mods is not None:
        raw_HST, score_HST = score_HST, extras.mods.scored(score_HST, places)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    right = 0 if options.causal else options.window_right
    if options.causal and options.window_right is not None:
        right = min(0, options.window_right)
    if right is not None:
        hidden = hidden | (distance < -right)
    if options.window_left is not None:
        hidden = hidden | (distance > options.window_left)
    score_HST = score_HST.masked_fill(hidden, NEG_INF).to(dtype)
    if extras.sinks_H is not None:
        sink_HS1 = extras.sinks_H.to(dtype)[:, None, None].expand(-1, S, 1)
        score_HST = torch.cat([score_HST, sink_HS1], dim=-1)

    empty_HS1 = (score_HST == NEG_INF).all(dim=-1, keepdim=True)
    score_HST = score_HST.masked_fill(empty_HS1, 0.0)
    if lse_HS is None:
        lse_HS = torch.logsumexp(score_HST, dim=-1)
    lse_HS1 = lse_HS.to(dtype)[..., None]
    p_HST = torch.exp(score_HST - lse_HS1).masked_fill(empty_HS1, 0.0)
    sink_HS = None if extras.sinks_H is None else p_HST[..., -1]
    if options.dropout_p:
        seed_offset = (extras.dropout_seed, extras.dropout_offset)
        keep = keep_mask(options.dropout_p, seed_offset, b, h[:, None, None], row, col)
        share_HST = keep.to(dtype) / (1 - options.dropout_p)
    lse_HS = lse_HS1.masked_fill(empty_HS1, NEG_INF)[..., 0]
    p_HST = p_HST[..., : T - pad]
    return _Softmax(p_HST, sink_HS, share_HST, slope_HST, lse_HS, raw_HST, places)


def forward(q, k, v, options: AttentionOptions, extras: AttentionExtras):
    """The reference in fp32 (fp64 inputs: fp64) -> (out in q's dtype, lse_ln fp32)."""
    out, lse = attention_ref(q, k, v, options, extras, _compute_dtype(q))
    return out.to(q.dtype), lse


def backward(dout, dlse, q, k, v, out, lse_ln, options, extras) -> AttentionGrads:
    """Gradients by the formulas above, the scores computed again; bitwise repeatable."""
    dtype = _compute_dtype(q)
    inputs = dict(q=q, k=k, v=v, sinks=extras.sinks_H, bias=extras.bias)
    grads = {n: torch.zeros_like(t, dtype=dtype) for n, t in inputs.items() if t is not None}
    for sequence in sequences(q, k, extras):
        one_dout = dout[sequence.q_rows].to(dtype)
        row_HS = -(one_dout * out[sequence.q_rows].to(dtype)).sum(-1).T
        if dlse is not None:
            row_HS = row_HS + dlse[sequence.lse_rows].to(dtype)
        given = (one_dout, row_HS, lse_ln[sequence.lse_rows])
        _add_sequence(grads, given, (q, k, v), sequence, options, extras)
    dq, dk, dv = (grads[n].to(inputs[n].dtype) for n in "qkv")
    dbias = None if extras.bias is None else grads["bias"].to(extras.bias.dtype)
    return AttentionGrads(dq, dk, dv, grads.get("sinks"), dbias)


def _add_sequence(grads, given, qkv, sequence: Sequence, options, extras):
    """given: dO, dLSE - rowsum(dO O), LSE."""
    dout_SHV, row_HS, lse_HS = given
    assert sequence.k_rows is not None, "pages take no gradients"
    keys, pad = sequence.k_rows, sequence.leftpad
    rows = (sequence.q_rows, keys, keys)
    q_SHD, k_TGD, v_TGV = (x[at].to(dout_SHV.dtype) for x, at in zip(qkv, rows, strict=True))
    k_THD, v_THV = _by_head(q_SHD, k_TGD, v_TGV, sequence)
    soft = _softmax(q_SHD, k_THD, sequence, options, extras, lse_HS)
    dp_HST = torch.einsum("shv,thv->hst", dout_SHV, v_THV)
    dropped_HST = soft.p_HST
    if soft.share_HST is not None:
        dropped_HST, dp_HST = dropped_HST * soft.share_HST, dp_HST * soft.share_HST
    row_HS = row_HS.masked_fill(soft.lse_HS == NEG_INF, 0.0)
    ds_HST = soft.p_HST * (dp_HST + row_HS[..., None])
    if soft.sink_HS is not None:
        grads["sinks"] += (soft.sink_HS * row_HS).sum(-1)
    if soft.raw_HST is not None:
        ds_HST = extras.mods.pulled_back(ds_HST, soft.raw_HST, soft.places)
    if (bias := extras.bias) is not None:
        b = sequence.index if bias.shape[0] > 1 else 0
        target = grads["bias"][b, :, : sequence.seqlen_q, pad : sequence.seqlen_k]
        target += ds_HST.sum_to_size(target.shape)
    if soft.slope_HST is not None:
        ds_HST = ds_HST * soft.slope_HST
    ds_HST = ds_HST * options.softmax_scale
    grads["q"][sequence.q_rows] += torch.einsum("hst,thd->shd", ds_HST, k_THD)
    found = dict(
        k=torch.einsum("hst,shd->thd", ds_HST, q_SHD),
        v=torch.einsum("hst,shv->thv", dropped_HST, dout_SHV),
    )
    for name, grad_THD in found.items():
        G = grads[name].shape[-2]
        grads[name][keys][pad:] += grad_THD.unflatten(1, (G, -1)).sum(2)


def gradients(results, leaves, dout, dlse) -> dict[str, torch.Tensor]:
    """Gradient of each leaf given those of (out, lse); zeros for one without influence."""
    recorded = leaves["q"].view_as(leaves["q"]).requires_grad
    assert recorded, "autograd records nothing here: zeros would be a lie"
    if not results[0].requires_grad:  # no sequences
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    dlse = torch.zeros_like(results[1]) if dlse is None else dlse.to(results[1].dtype)
    given = (dout.to(results[0].dtype), dlse)
    found = torch.autograd.grad(results, list(leaves.values()), given, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def _compute_dtype(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32
