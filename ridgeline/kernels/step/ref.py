"""The fused operations of a step in plain PyTorch: their meaning, and what a CPU runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
