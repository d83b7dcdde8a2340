"""Attention in plain PyTorch, with every option: the only reference.

    S = softcap(scale * Q K^T) + bias - slope * |i + T - S - j| ; mask ; O = dropout(softmax([S,
    sink])) V

Bytes moved: the S x T matrix several times; bound by memory. Any device. Meaning: problem.py.
`compute_dtype` is float32 for the reference, float64 for gradients on small shapes, the input's
dtype for the error that a plain PyTorch program would make.
"""

from __future__ import annotations

from dataclasses import replace

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


def _one_sequence(q_SHD, k_TGD, v_TGV, sequence: Sequence, options, extras):
    S, H, T, dtype = sequence.seqlen_q, q_SHD.shape[1], sequence.seqlen_k, q_SHD.dtype
    ratio = H // k_TGD.shape[1]
    pad = sequence.leftpad
    k_THD, v_THV = (kv[pad:].repeat_interleave(ratio, dim=1) for kv in (k_TGD, v_TGV))
    row = torch.arange(S, device=q_SHD.device)[:, None]
    col = torch.arange(pad, T, device=q_SHD.device)[None, :]
    distance = row + (T - S) - col  # 0 on the bottom-right diagonal, positive for past keys

    score_HST = torch.einsum("shd,thd->hst", q_SHD, k_THD) * options.softmax_scale
    if options.softcap:
        score_HST = options.softcap * torch.tanh(score_HST / options.softcap)
    if (bias := extras.bias) is not None:
        score_HST = score_HST + bias[sequence.index if bias.shape[0] > 1 else 0, :, :S, pad:T]
    if (slopes := extras.alibi_slopes) is not None:
        slopes_H = slopes[sequence.index] if slopes.dim() == 2 else slopes
        score_HST = score_HST - slopes_H.to(dtype)[:, None, None] * distance.abs()

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
    lse_HS1 = torch.logsumexp(score_HST, dim=-1, keepdim=True)
    p_HST = torch.exp(score_HST - lse_HS1).masked_fill(empty_HS1, 0.0)[..., : T - pad]
    if options.dropout_p:
        b, h = (torch.tensor(sequence.index, device=row.device), torch.arange(H, device=row.device))
        seed_offset = (extras.dropout_seed, extras.dropout_offset)
        keep = keep_mask(options.dropout_p, seed_offset, b, h[:, None, None], row, col)
        p_HST = p_HST * keep / (1 - options.dropout_p)
    out_SHV = torch.einsum("hst,thv->shv", p_HST, v_THV)
    return out_SHV, lse_HS1.masked_fill(empty_HS1, NEG_INF)[..., 0]


def forward(q, k, v, options: AttentionOptions, extras: AttentionExtras):
    """The reference in fp32 (fp64 inputs: fp64) -> (out in q's dtype, lse_ln fp32)."""
    out, lse = attention_ref(q, k, v, options, extras, _compute_dtype(q))
    return out.to(q.dtype), lse


def backward(dout, dlse, q, k, v, out, lse_ln, options, extras) -> AttentionGrads:
    """Gradients by autograd through the reference, which is computed again."""
    inputs = dict(q=q, k=k, v=v, sinks=extras.sinks_H, bias=extras.bias)
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items() if t is not None}
    extras = replace(extras, sinks_H=leaves.get("sinks"), bias=leaves.get("bias"))
    with torch.enable_grad(), _autograd_inside_an_operator():
        results = attention_ref(
            leaves["q"], leaves["k"], leaves["v"], options, extras, _compute_dtype(q)
        )
        given = gradients(results, leaves, dout, dlse)
    return AttentionGrads(given["q"], given["k"], given["v"], given.get("sinks"), given.get("bias"))


def _autograd_inside_an_operator():
    """PyTorch switches autograd off inside an operator: without this nothing is recorded."""
    keys, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def gradients(results, leaves, dout, dlse) -> dict[str, torch.Tensor]:
    """Gradient of each leaf given those of (out, lse); zeros for one without influence."""
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
