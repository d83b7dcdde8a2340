"""The forward pass of packed tokens of many sequences, prompts and decode steps alike.

    x [P, C] -> L x ( attention over pages, MLP ) -> logits of the rows that were asked for [R, V]

The arithmetic is the decoder's (nn/layers.py), in the same order and dtypes, so that the engine and
the trainer give the same log-probabilities; the linears are joined (weights.py), keys and values go
to pages, and only rows that sample pass the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ridgeline.engine.weights import LayerWeights, Weights
from ridgeline.nn.rope import cos_sin

Reduce = Callable[[torch.Tensor], torch.Tensor]


class Attend(Protocol):
    """Where the tokens of a step keep and find keys and values."""

    def attend(
        self,
        layer: int,
        q_PHD: torch.Tensor,
        k_PGD: torch.Tensor,
        v_PGD: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """Keep the new keys and values; causal attention over all of each sequence, [P, H, D]."""
        ...


class RotaryTable:
    """Cosines and signed sines of every position, fp32, laid out for whole heads.

    x' = x * cos + swap(x) * sin with swap the two halves exchanged and sin negated in the first.
    """

    def __init__(self, weights: Weights, max_len: int) -> None:
        config = weights.config
        positions = torch.arange(max_len, device=weights.device)
        cos, sin = cos_sin(config.rope, config.head_dim, positions)
        self.cos_T1D = torch.cat((cos, cos), dim=-1)
        self.sin_T1D = torch.cat((-sin, sin), dim=-1)

    def at(self, positions_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[P, 1, D] each."""
        return self.cos_T1D[positions_P], self.sin_T1D[positions_P]


def rotate(x_PHD: torch.Tensor, cos_P1D: torch.Tensor, sin_P1D: torch.Tensor) -> torch.Tensor:
    """Turn all heads; products and sums in fp32, one rounding."""
    wide = x_PHD.float()
    low, high = wide.chunk(2, dim=-1)
    turned = wide * cos_P1D + torch.cat((high, low), dim=-1) * sin_P1D
    return turned.to(x_PHD.dtype)


class Forward:
    """A model's forward over pages."""

    joined: Any = None
    """Operations that take a step's numbers as they lie (device_forward.py), where it has those."""

    def __init__(self, weights: Weights, max_len: int, reduce: Reduce | None = None) -> None:
        self.weights = weights
        self.rotary = RotaryTable(weights, max_len)
        self.reduce = reduce

    def hidden(
        self, token_ids_P: torch.Tensor, positions_P: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Hidden states before the final norm, [P, C]."""
        weights = self.weights
        x_PC = F.embedding(token_ids_P, weights.embedding_VC)
        cos, sin = self.rotary.at(positions_P)
        eps = weights.config.norm_eps
        for index, layer in enumerate(weights.layers):
            y_PC = F.rms_norm(x_PC, x_PC.shape[-1:], layer.input_norm, eps)
            o_PHD = self._attention(index, layer, y_PC, (cos, sin), attend)
            x_PC = x_PC + self._summed(layer.out(o_PHD.flatten(1)))
            y_PC = F.rms_norm(x_PC, x_PC.shape[-1:], layer.mlp_norm, eps)
            x_PC = x_PC + self._summed(layer.down(_gated(layer, y_PC)))
        return x_PC

    def normed(self, x_RC: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        return F.rms_norm(x_RC, x_RC.shape[-1:], self.weights.norm, self.weights.config.norm_eps)

    def logits(self, x_RC: torch.Tensor, wide_rows: Sequence[int] = ()) -> torch.Tensor:
        """Logits of hidden states, [R, V] (this rank's slice of the vocabulary), not rounded to 16
        bits; on a CPU, where that costs time, only those of wide_rows are not."""
        head, y_RC = self.weights.head, self.normed(x_RC)
        if head.wide_is_free or len(wide_rows) == len(y_RC):
            return head.wide(y_RC)
        logits_RV = head(y_RC)
        if wide_rows:
            logits_RV, rows = logits_RV.float(), list(wide_rows)
            logits_RV[rows] = head.wide(y_RC[rows])
        return logits_RV

    def decode(
        self, token_ids_B: torch.Tensor, positions_B: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Logits of a step of single tokens, [B, V]."""
        return self.logits(self.hidden(token_ids_B, positions_B, attend))

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        y_PC: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        weights = self.weights
        H, G, D = weights.heads, weights.kv_heads, weights.config.head_dim
        qkv_PHD = layer.qkv(y_PC).view(-1, H + 2 * G, D)
        if layer.q_norm is None or layer.k_norm is None:
            turned = rotate(qkv_PHD[:, : H + G], *angles)
            q_PHD, k_PGD = turned[:, :H], turned[:, H:]
        else:
            eps = weights.config.norm_eps
            q_PHD = rotate(F.rms_norm(qkv_PHD[:, :H], (D,), layer.q_norm, eps), *angles)
            k_PGD = rotate(F.rms_norm(qkv_PHD[:, H : H + G], (D,), layer.k_norm, eps), *angles)
        return attend.attend(index, q_PHD, k_PGD, qkv_PHD[:, H + G :], layer.window)

    def _summed(self, x_PC: torch.Tensor) -> torch.Tensor:
        return x_PC if self.reduce is None else self.reduce(x_PC)


def _gated(layer: LayerWeights, y_PC: torch.Tensor) -> torch.Tensor:
    both = layer.gate_up(y_PC)
    if layer.gated:
        return both
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up
