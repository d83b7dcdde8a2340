"""The forward on a GPU with the small operations fused: nine kernels a layer around the attention
and the matmuls instead of two dozen, each of them launch-bound at decode sizes.

    y = norm(x += delta) ; q, cache = rotate(qkv) ; o = attention ; delta = out o
    y = norm(x += delta) ; delta = down(silu(gate) up)

The same numbers as forward.py's, rounded at the same places (kernels/step).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ridgeline.engine.forward import Attend, Forward
from ridgeline.engine.paged import FP8, DeviceAttention
from ridgeline.engine.weights import LayerWeights
from ridgeline.kernels.step.op import for_tensor


class DeviceForward(Forward):
    """Forward, fused where the step's attention is over pages in place."""

    def hidden(
        self, token_ids_P: torch.Tensor, positions_P: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Hidden states before the final norm, [P, C]."""
        if not isinstance(attend, DeviceAttention) or attend.cache.dtype == FP8:
            return super().hidden(token_ids_P, positions_P, attend)
        weights, eps = self.weights, self.weights.config.norm_eps
        x_PC = F.embedding(token_ids_P, weights.embedding_VC)
        step = for_tensor(x_PC)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(weights.layers):
            y_PC = step.add_rms_norm(x_PC, delta, layer.input_norm, eps)
            q_PHD = self._rotated(index, layer, y_PC, positions_P, attend)
            o_PHD = attend.read(index, q_PHD, layer.window)
            delta = self._summed(layer.out(o_PHD.flatten(1)))
            y_PC = step.add_rms_norm(x_PC, delta, layer.mlp_norm, eps)
            both = layer.gate_up(y_PC)
            delta = self._summed(layer.down(both if layer.gated else step.silu_mul(both)))
        return x_PC if delta is None else x_PC + delta

    def _rotated(
        self,
        index: int,
        layer: LayerWeights,
        y_PC: torch.Tensor,
        positions_P: torch.Tensor,
        attend: DeviceAttention,
    ) -> torch.Tensor:
        """Rotated queries; keys and values go to the cache."""
        weights, cache = self.weights, attend.cache
        H, G, D = weights.heads, weights.kv_heads, weights.config.head_dim
        qkv_PHD = layer.qkv(y_PC).view(-1, H + 2 * G, D)
        if layer.q_norm is not None and layer.k_norm is not None:
            eps = weights.config.norm_eps
            q = F.rms_norm(qkv_PHD[:, :H], (D,), layer.q_norm, eps)
            k = F.rms_norm(qkv_PHD[:, H : H + G], (D,), layer.k_norm, eps)
            qkv_PHD = torch.cat((q, k, qkv_PHD[:, H + G :]), dim=1)
        return for_tensor(qkv_PHD).rope_append(
            qkv_PHD,
            H,
            (self.rotary.cos_T1D, self.rotary.sin_T1D),
            positions_P,
            attend.batch.slots_P,
            (cache.flat_k[index], cache.flat_v[index]),
        )
