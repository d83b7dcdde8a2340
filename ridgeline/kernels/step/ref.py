"""The fused operations of a step in plain PyTorch: their meaning, and what a CPU runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class DecodeTable:
    """The sequences of a step of single tokens: keys with the new one, and pages; int32, the rows
    of each as far apart as they like."""

    keys_B: torch.Tensor
    pages_BU: torch.Tensor
    page_tokens: int

    def slots(self, row: int) -> torch.Tensor:
        """Where a row's keys lie in the cache, the new one last."""
        n = torch.arange(int(self.keys_B[row]), device=self.pages_BU.device)
        size = self.page_tokens
        return self.pages_BU[row].long()[n // size] * size + n % size


def add_rms_norm(
    x_PC: torch.Tensor, delta_PC: torch.Tensor | None, weight_C: torch.Tensor, eps: float
) -> torch.Tensor:
    """x += delta in place (rounded to x's dtype); the RMS norm of the new x."""
    if delta_PC is not None:
        x_PC.add_(delta_PC)
    return F.rms_norm(x_PC, x_PC.shape[-1:], weight_C, eps)


def silu_mul(both_PF: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [gate | up], silu rounded to the dtype first."""
    gate, up = both_PF.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_append(
    qkv_PHD: torch.Tensor,
    heads: int,
    angles: tuple[torch.Tensor, torch.Tensor],
    positions_P: torch.Tensor,
    slots_P: torch.Tensor,
    flat: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Rotated queries, new; rotated keys and values written to their slots of the cache.

    Shapes: qkv [P, H + 2 G, D]; angles: cos and signed sin, fp32 [T, 1, D]; flat: keys and values
    [slots, G, D]. Returns [P, H, D].
    """
    k_flat, v_flat = flat
    G = k_flat.shape[1]
    cos, sin = (table[positions_P] for table in angles)
    wide = qkv_PHD[:, : heads + G].float()
    low, high = wide.chunk(2, dim=-1)
    turned = (wide * cos + torch.cat((high, low), dim=-1) * sin).to(qkv_PHD.dtype)
    k_flat.index_copy_(0, slots_P.long(), turned[:, heads:])
    v_flat.index_copy_(0, slots_P.long(), qkv_PHD[:, heads + G :])
    return turned[:, :heads].contiguous()


def norm_linear(
    x_1C: torch.Tensor,
    delta_1C: torch.Tensor | None,
    norm_C: torch.Tensor,
    eps: float,
    weight_NC: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    gated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + delta in memory of its own, a linear of its RMS norm; gated: silu_mul of that)."""
    kept_1C = x_1C if delta_1C is None else x_1C + delta_1C
    y_1N = F.linear(F.rms_norm(kept_1C, kept_1C.shape[-1:], norm_C, eps), weight_NC, bias_N)
    return kept_1C, silu_mul(y_1N) if gated else y_1N


def row_linear(
    x_1C: torch.Tensor,
    weight_NC: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A linear; dtype: of the result, rounded once from the sum in fp32."""
    if dtype in (None, x_1C.dtype):
        return F.linear(x_1C, weight_NC, bias_N)
    bias = None if bias_N is None else bias_N.to(dtype)
    return F.linear(x_1C.to(dtype), weight_NC.to(dtype), bias)


def embed_norm(
    tokens_P: torch.Tensor, table_VC: torch.Tensor, weight_C: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of a table, their RMS norm); tokens may be a column of a wider tensor."""
    x_PC = F.embedding(tokens_P, table_VC)
    return x_PC, F.rms_norm(x_PC, x_PC.shape[-1:], weight_C, eps)


def decode_attention(
    qkv_BHD: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    flat: tuple[torch.Tensor, torch.Tensor],
    table: DecodeTable,
    *,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of one token a sequence over its pages, itself included: heads normed (with norms:
    weights of queries and keys, and epsilon) and rotated, the new key and value written.

    Shapes: qkv [B, H + 2 G, D]; angles and flat as rope_append. Returns [B, H, D].
    """
    G, D = flat[0].shape[1:]
    H = qkv_BHD.shape[1] - 2 * G
    if norms is not None:
        q = F.rms_norm(qkv_BHD[:, :H], (D,), norms[0], norms[2])
        k = F.rms_norm(qkv_BHD[:, H : H + G], (D,), norms[1], norms[2])
        qkv_BHD = torch.cat((q, k, qkv_BHD[:, H + G :]), dim=1)
    every = [table.slots(row) for row in range(len(qkv_BHD))]
    own = torch.stack([slots[-1] for slots in every])
    q_BHD = rope_append(qkv_BHD, H, angles, table.keys_B.long() - 1, own, flat)
    out_BHD = torch.empty_like(q_BHD)
    for row, slots in enumerate(every):
        k, v = (x[slots[-(window or 0) :]].float() for x in flat)
        k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
        score = torch.einsum("hd,thd->ht", q_BHD[row].float(), k) / math.sqrt(D)
        out_BHD[row] = torch.einsum("ht,thd->hd", score.softmax(-1), v)
    return out_BHD


def choose(logits_RV: torch.Tensor, numbers_RN: torch.Tensor) -> torch.Tensor:
    """The likeliest tokens, int64 [R]. Each row of numbers (int32: token, position, slot, keys,
    tokens a step, ..) gets its token and is moved on."""
    tokens_R = logits_RV.argmax(-1)
    numbers_RN[:, 0].copy_(tokens_R)
    numbers_RN[:, 1:4] += numbers_RN[:, 4:5]
    return tokens_R
