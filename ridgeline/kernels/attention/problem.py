"""The attention problem: shapes, dtypes and options of one call.

    S = softcap(scale * Q K^T) + bias - alibi ; mask ; P = softmax([S, sink]) ; O = dropout(P) V

Meaning shared by every implementation:
- causal is bottom-right aligned: query i of S sees keys j <= i + T - S;
- a window (left, right) is inclusive: i + T - S - left <= j <= i + T - S + right; None: unbounded;
- a row with nothing to attend to gives O = 0 and LSE = -inf (with a sink: LSE = the sink);
- H / G query heads share a key/value head; head h reads key/value head h // (H / G);
- softmax_scale defaults to 1 / sqrt(D); LSE is natural-log, fp32, of the scaled, masked scores
  (the sink included);
- with seqused, S and T above are the used lengths; leftpad hides the first keys and moves nothing
  (i and j keep counting from the start of the stored sequence);
- a key that does not exist (beyond seqused_k, before leftpad, beyond cu_seqlens) has no influence
  whatever it holds, NaN included; a query beyond seqused_q gives O = 0, LSE = -inf, also with
  sinks;
- dropout acts on P after the softmax: kept entries are divided by 1 - p, LSE does not know of it.

What a module of an implementation has (op.py calls it, after validation):
    forward(q, k, v, options, extras) -> (out, lse_ln)
    backward(dout, dlse, q, k, v, out, lse_ln, options, extras) -> AttentionGrads
Layouts: dense q_BSHD k_BTGD v_BTGV -> out_BSHV, lse fp32 [B, H, S]; varlen q_PHD k_PGD v_PGV ->
out_PHV, lse fp32 [H, P]; paged k and v are [pages, W, G, D] (forward only). dlse is None or like
lse; the score's gradient is dS = P * (dP - rowsum(dO * O) + dlse). Any strides: an implementation
makes contiguous what it needs so. Outputs are new tensors in q's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ridgeline.core.dtypes import itemsize_bytes
from ridgeline.core.roofline import Cost

if TYPE_CHECKING:
    import torch

    from ridgeline.kernels.attention.mods import Mods


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """What `select` sees. For varlen, seqlen_q and seqlen_k are the longest of the batch."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    """0 is off."""
    dropout: bool = False
    alibi: bool = False
    sinks: bool = False
    bias: bool = False
    varlen: bool = False
    """Packed by cu_seqlens."""
    seqused: bool = False
    """Per-sequence used lengths."""
    page_size: int | None = None
    """Tokens of a page of the KV cache; None is contiguous."""
    kv_cache: bool = False
    """A call of flash_attn_with_kvcache."""
    leftpad: bool = False
    """Keys before a per-sequence start do not exist."""
    kv_batch_idx: bool = False
    """Sequence b reads row kv_batch_idx[b] of k and v."""
    needs_grad: bool = False
    deterministic: bool = False
    """Backward must be bitwise repeatable."""
    mods: bool = False
    """A user's score_mod or mask_mod."""
    direction: str = "fwd"
    """fwd or bwd, for cost and tile config."""

    @property
    def op(self) -> str:
        return "attention"

    def _seen(self) -> tuple[np.ndarray, np.ndarray]:
        """First and last key that each query row of a sequence sees (last < first: none)."""
        shift = self.seqlen_k - self.seqlen_q
        query = np.arange(self.seqlen_q, dtype=np.int64) + shift
        right = self.window_right
        if self.causal:
            right = 0 if right is None else min(0, right)
        last = np.full_like(query, self.seqlen_k - 1)
        if right is not None:
            last = np.minimum(last, query + right)
        left = self.window_left
        first = np.zeros_like(query) if left is None else np.maximum(0, query - left)
        return first, last

    def num_pairs(self) -> int:
        """Query-key pairs of one head and sequence that the mask leaves."""
        first, last = self._seen()
        return int(np.maximum(0, last - first + 1).sum())

    def num_keys(self) -> int:
        """Keys of one head and sequence that any row sees: only these must be read."""
        first, last = self._seen()
        rows = last >= first
        return int(last[rows].max() - first[rows].min() + 1) if rows.any() else 0

    def cost(self) -> Cost:
        """FLOPs on what the mask leaves and the least bytes.

        Forward: two products, 2 (D + D_v) a pair; backward: five, 2 (3 D + 2 D_v), which is the
        customary 2.5 times the forward where D_v = D.
        Source of the counting: FlashAttention-2 paper, section 4.1 (causal counted exactly here).
        """
        rows = self.seqlen_q
        pairs = float(self.batch * self.heads * self.num_pairs())
        size = itemsize_bytes(self.dtype)
        q = self.batch * self.heads * rows * self.head_dim
        o = self.batch * self.heads * rows * self.head_dim_v
        kv = self.batch * self.kv_heads * self.num_keys() * (self.head_dim + self.head_dim_v)
        lse = 4.0 * self.batch * self.heads * rows
        if self.direction == "bwd":
            flops = 2.0 * pairs * (3 * self.head_dim + 2 * self.head_dim_v)
            return Cost(flops=flops, bytes=size * (2.0 * q + 2.0 * o + 2.0 * kv) + lse)
        flops = 2.0 * pairs * (self.head_dim + self.head_dim_v)
        return Cost(flops=flops, bytes=size * float(q + o + kv) + lse)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """The options that change the meaning; scalars only (a compile key of a kernel)."""

    softmax_scale: float
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    num_splits: int = 0
    """Parts the keys are split into in decode; 0 lets the implementation choose. Never changes the
    meaning; an implementation without split-KV has one part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionExtras:
    """The optional tensors of a call, validated by op.py; None where not given.

    Dense calls have q_BSHD, k_BTGD, v_BTGD; varlen calls q_PHD, k_PGD, v_PGD with cu_seqlens.
    """

    cu_seqlens_q: torch.Tensor | None = None
    """int32 [B + 1], starts of sequences in the packed queries."""
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    """Longest query sequence of a varlen batch (host integer: no sync)."""
    max_seqlen_k: int | None = None
    seqused_q: torch.Tensor | None = None
    """int32 [B], used prefix of each query sequence; rows beyond give O = 0, LSE = -inf."""
    seqused_k: torch.Tensor | None = None
    """int32 [B], used prefix of each key sequence (cache_seqlens of a KV cache)."""
    leftpad_k: torch.Tensor | None = None
    """int32 [B], first valid key of each sequence; keys before it do not exist."""
    kv_batch_idx: torch.Tensor | None = None
    """int32 [B], row of k and v that each sequence reads (dense k and v with more rows than B)."""
    page_ids_BU: torch.Tensor | None = None
    """int32, pages of each sequence; k and v are then [pages, W, G, D]."""
    alibi_slopes: torch.Tensor | None = None
    """fp32 [H] or [B, H]; the score gets -slope * |i + T - S - j|."""
    sinks_H: torch.Tensor | None = None
    """fp32 [H], one logit a head in the softmax's denominator."""
    bias: torch.Tensor | None = None
    """[B or 1, H or 1, S, T], added to the scaled (and soft-capped) scores, as ALiBi is; in q's
    dtype or fp32. Varlen: S and T are the longest, entry (b, h, i, j) is in a sequence's own
    coordinates."""
    mods: Mods | None = None
    """A user's score_mod and mask_mod (flex.py)."""
    dropout_seed: int = 0
    dropout_offset: int = 0
    """Counter-based: the mask is a function of (seed, offset, batch, head, i, j); see rng.py."""


@dataclass(frozen=True, slots=True)
class AttentionGrads:
    """What an implementation's `backward` returns; dq, dk, dv in their input's shape and dtype."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None = None
    """fp32 [H], None without sinks."""
    dbias: torch.Tensor | None = None
    """bias's shape and dtype (summed over what is broadcast), None without bias."""
