"""The general path of the `cpu` implementation: every option, in blocks of query rows.

A block of rows meets the slice of keys that it can see: fp32 matmuls, the block's scores (about
2 M elements) are the only thing of quadratic kind and their size does not grow with the length.
Backward computes P of a block again from the LSE:
    P = exp(S - LSE), dP = mask(dO V^T), dS = P (dP - rowsum(dO O) + dLSE), dQ = dS K, dK = dS^T Q.
Grouped heads: the query heads of a group are rows of one matmul, so K and V are never repeated.
Moves K and V once a block; bound by arithmetic. Source: FlashAttention-2 (Dao, 2023), algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ridgeline.kernels.attention.layout import Given, Part, bounds
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionGrads, AttentionOptions
from ridgeline.kernels.attention.rng import keep_mask

NEG_INF = float("-inf")
_BLOCK_SCORES = 2**21
_LEAST_ROWS = 16


@dataclass(slots=True)
class Grads:
    """Sums of gradients over the parts of a call, in fp32 (fp64 for fp64 inputs; dsinks: fp64)."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None
    dbias: torch.Tensor | None

    @staticmethod
    def zeros(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: AttentionExtras) -> Grads:
        """Start at zero."""
        dq, dk, dv = (torch.zeros(t.shape, dtype=wide(q)) for t in (q, k, v))
        dsinks, dbias = (
            None if t is None else torch.zeros(t.shape, dtype=dtype)
            for t, dtype in ((extras.sinks_H, torch.float64), (extras.bias, wide(q)))
        )
        return Grads(dq, dk, dv, dsinks, dbias)

    def add(
        self,
        part: Part,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        dsinks: torch.Tensor | None,
    ) -> None:
        """Add a part's gradients where its rows and keys lie."""
        if part.rows is None:
            self.dq += dq
        else:
            self.dq[part.rows] += dq[0]
        keys = part.keys if part.keys is not None else (slice(None),)
        one_sequence = part.rows is not None
        self.dk[keys] += dk[0] if one_sequence else dk
        self.dv[keys] += dv[0] if one_sequence else dv
        if dsinks is not None and self.dsinks is not None:
            self.dsinks += dsinks

    def result(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extras: AttentionExtras
    ) -> AttentionGrads:
        """The sums in the dtypes that an implementation returns."""
        return AttentionGrads(
            dq=self.dq.to(q.dtype),
            dk=self.dk.to(k.dtype),
            dv=self.dv.to(v.dtype),
            dsinks=None if self.dsinks is None else self.dsinks.to(wide(q)),
            dbias=None if self.dbias is None or extras.bias is None else self.dbias.to(extras.bias),
        )


def wide(x: torch.Tensor) -> torch.dtype:
    """The dtype to compute in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows [i0, i1) of queries against keys [lo, hi)."""

    i0: int
    i1: int
    lo: int
    hi: int


def _blocks(part: Part, options: AttentionOptions) -> Iterator[_Block]:
    S, T = part.seqlen_q, part.seqlen_k
    B, H = part.q_BSHD.shape[0], part.q_BSHD.shape[2]
    left, right = bounds(options, S, T)
    budget = _BLOCK_SCORES // max(1, B * H)
    rows = budget // max(1, T)
    if left is not None and right is not None:  # a block sees rows + left + right keys, not T
        width = left + right
        rows = max(rows, (math.isqrt(width * width + 4 * budget) - width) // 2)
    rows = max(_LEAST_ROWS, rows)
    for i0 in range(0, S, rows):
        i1 = min(S, i0 + rows)
        lo = 0 if left is None else min(T, max(0, i0 + T - S - left))
        hi = T if right is None else max(lo, min(T, i1 + T - S + right))
        if lo < hi:
            yield _Block(i0, i1, lo, hi)


@dataclass(frozen=True, slots=True)
class _Scores:
    """A block's masked scores, and what backward needs of how they came about."""

    score_BHst: torch.Tensor
    tanh_BHst: torch.Tensor | None
    keep_BHst: torch.Tensor | None
    raw_BHst: torch.Tensor | None
    """The scores before a user's score_mod."""
    places: tuple[torch.Tensor, ...]
    """b, h, i, j of the scores."""


@dataclass(frozen=True, slots=True)
class _Wide:
    """A part's inputs in fp32, heads first."""

    q_BHSD: torch.Tensor
    k_BGTD: torch.Tensor
    v_BGTV: torch.Tensor

    @staticmethod
    def of(part: Part) -> _Wide:
        """Convert once: linear in length."""
        given = (part.q_BSHD, part.k_BTGD, part.v_BTGV)
        return _Wide(*(x.to(wide(x)).transpose(1, 2) for x in given))


def _grouped(x_BHst: torch.Tensor, G: int) -> torch.Tensor:
    """[B, H, s, n] -> [B, G, R * s, n]: the heads of a group as rows of one matmul."""
    B, H, s, n = x_BHst.shape
    return x_BHst.reshape(B, G, H // G * s, n)


def _by_head(x_BGrn: torch.Tensor, H: int) -> torch.Tensor:
    B, G, rows, n = x_BGrn.shape
    return x_BGrn.reshape(B, H, rows * G // H, n)


def _scores(
    x: _Wide, block: _Block, part: Part, options: AttentionOptions, extras: AttentionExtras
) -> _Scores:
    H, G, S, T = x.q_BHSD.shape[1], x.k_BGTD.shape[1], part.seqlen_q, part.seqlen_k
    q = _grouped(x.q_BHSD[:, :, block.i0 : block.i1], G)
    k = x.k_BGTD[:, :, block.lo : block.hi]
    score = _by_head(q @ k.transpose(-1, -2), H) * options.softmax_scale
    row = torch.arange(block.i0, block.i1)[:, None]
    col = torch.arange(block.lo, block.hi)[None, :]
    distance = row + (T - S) - col
    tanh = None
    if options.softcap:
        tanh = torch.tanh(score / options.softcap)
        score = options.softcap * tanh
    if extras.bias is not None:
        score = score + _bias_block(extras.bias, block, part)
    if extras.alibi_slopes is not None:
        score = score - part.slopes(extras.alibi_slopes) * distance.abs()
    batch = torch.arange(part.batch_start, part.batch_start + x.q_BHSD.shape[0])
    places = (batch[:, None, None, None], torch.arange(H)[:, None, None], row, col + part.leftpad)
    raw = None
    if extras.mods is not None:
        raw, score = score, extras.mods.scored(score, places)
    left, right = bounds(options, S, T)
    if right is not None:
        score = score.masked_fill(distance < -right, NEG_INF)
    if left is not None:
        score = score.masked_fill(distance > left, NEG_INF)
    keep = None
    if options.dropout_p:
        seed_offset = (extras.dropout_seed, extras.dropout_offset)
        keep = keep_mask(options.dropout_p, seed_offset, *places)
    return _Scores(score, tanh, keep, raw, places)


def _bias_block(bias: torch.Tensor, block: _Block, part: Part) -> torch.Tensor:
    """The bias of a block of a part: [B or 1, H or 1, s, t], a view."""
    batch = slice(None)
    if bias.shape[0] > 1:
        batch = slice(part.batch_start, part.batch_start + part.q_BSHD.shape[0])
    keys = slice(part.leftpad + block.lo, part.leftpad + block.hi)
    return bias[batch, :, block.i0 : block.i1, keys]


def forward(
    part: Part, options: AttentionOptions, extras: AttentionExtras
) -> tuple[torch.Tensor, torch.Tensor]:
    """One part -> (out_BSHV, lse_BHS)."""
    x = _Wide.of(part)
    out_BSHV, lse_BHS = part.empty_result()
    if extras.sinks_H is not None:
        lse_BHS[:] = extras.sinks_H[:, None]
    H, G = x.q_BHSD.shape[1], x.k_BGTD.shape[1]
    for block in _blocks(part, options):
        scores = _scores(x, block, part, options, extras)
        lse = torch.logsumexp(scores.score_BHst, dim=-1)
        if extras.sinks_H is not None:
            lse = torch.logaddexp(lse, extras.sinks_H.to(lse.dtype)[:, None])
        p = _probabilities(scores, lse)
        if scores.keep_BHst is not None:
            p = p * scores.keep_BHst / (1 - options.dropout_p)
        out = _by_head(_grouped(p, G) @ x.v_BGTV[:, :, block.lo : block.hi], H)
        out_BSHV[:, block.i0 : block.i1] = out.transpose(1, 2)
        lse_BHS[:, :, block.i0 : block.i1] = lse
    return out_BSHV, lse_BHS


def _probabilities(scores: _Scores, lse: torch.Tensor) -> torch.Tensor:
    """P of a block; a row without keys (LSE = -inf) gives zeros, not exp(-inf + inf)."""
    return torch.exp(scores.score_BHst - lse.masked_fill(lse == NEG_INF, 0.0)[..., None])


def backward(
    part: Part,
    given: Given,
    options: AttentionOptions,
    extras: AttentionExtras,
    grads: Grads,
) -> None:
    """Add one part's gradients to `grads`."""
    x = _Wide.of(part)
    dtype = x.q_BHSD.dtype
    H, G = x.q_BHSD.shape[1], x.k_BGTD.shape[1]
    dout_BHSV = given.dout_BSHV.to(dtype).transpose(1, 2)
    minus_delta_BHS = _minus_delta(given)
    dq, dk, dv = (torch.zeros_like(t) for t in (x.q_BHSD, x.k_BGTD, x.v_BGTV))
    for block in _blocks(part, options):
        rows, keys = slice(block.i0, block.i1), slice(block.lo, block.hi)
        scores = _scores(x, block, part, options, extras)
        p = _probabilities(scores, given.lse_BHS[:, :, rows])
        dout = _grouped(dout_BHSV[:, :, rows], G)
        dp = _by_head(dout @ x.v_BGTV[:, :, keys].transpose(-1, -2), H)
        dropped = p
        if scores.keep_BHst is not None:
            share = scores.keep_BHst / (1 - options.dropout_p)
            dropped, dp = p * share, dp * share
        dv[:, :, keys] += _grouped(dropped, G).transpose(-1, -2) @ dout
        ds = p * (dp + minus_delta_BHS[:, :, rows, None])
        if scores.raw_BHst is not None and extras.mods is not None:
            ds = extras.mods.pulled_back(ds, scores.raw_BHst, scores.places)
        if extras.bias is not None and grads.dbias is not None:
            target = _bias_block(grads.dbias, block, part)
            target += ds.sum_to_size(target.shape)
        if scores.tanh_BHst is not None:
            ds = ds * (1 - scores.tanh_BHst.square())
        ds = _grouped(ds * options.softmax_scale, G)
        dq[:, :, rows] = _by_head(ds @ x.k_BGTD[:, :, keys], H)
        dk[:, :, keys] += ds.transpose(-1, -2) @ _grouped(x.q_BHSD[:, :, rows], G)
    dsinks = None if extras.sinks_H is None else sink_gradient(given, extras.sinks_H)
    dq_BSHD, dk_BTGD, dv_BTGV = (t.transpose(1, 2) for t in (dq, dk, dv))
    grads.add(part, dq_BSHD, dk_BTGD, dv_BTGV, dsinks)


def _minus_delta(given: Given) -> torch.Tensor:
    """dLSE - rowsum(dO O), fp32 [B, H, S]: what dS has beside dP."""
    dtype = wide(given.out_BSHV)
    delta = (given.dout_BSHV.to(dtype) * given.out_BSHV.to(dtype)).sum(-1).transpose(1, 2)
    return -delta if given.dlse_BHS is None else given.dlse_BHS.to(dtype) - delta


def sink_gradient(given: Given, sinks_H: torch.Tensor) -> torch.Tensor:
    """Gradient of the sinks [H]: the sink is a key with a score but no value.

    fp64 from delta on. The sum runs over all rows of a head and its terms have both signs: in fp32
    it erred by 2e-6 of 2 on 126 rows, by 0.6e-6 so (the rest is the rounding of LSE, O and delta).
    """
    lse = given.lse_BHS.double()
    p_sink = torch.exp(sinks_H.double()[:, None] - lse).masked_fill(lse == NEG_INF, 0.0)
    return (p_sink * _minus_delta(given)).sum(dim=(0, 2))
