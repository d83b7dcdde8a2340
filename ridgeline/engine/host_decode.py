"""One token of one sequence on a CPU, with as few operations as will do.

At this size an operation's fixed cost (some microseconds, thirty layers deep) outweighs its
arithmetic. What is the same for all layers is made once a step (the angles, the keys' places),
activations stay in kept buffers of fp32, so that views of them are made once and norms convert
nothing, checks that cannot fail are left out. The result is the general forward's up to rounding.
    x' = x cos + swap(x) sin                                                  rotation
    n(x) = x w / sqrt(|x|^2 / C + eps)                                        RMS norm
The softmax's scale is in the queries' cosines and sines.
Bound by the weights' bytes: each is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.core import env
from ridgeline.engine.forward import RotaryTable
from ridgeline.engine.host_products import Head, Kept, Normed, Product
from ridgeline.engine.paged import PagedKV, Span
from ridgeline.engine.weights import LayerWeights, Weights
from ridgeline.kernels.attention.cpu import decode_one, decode_wide
from ridgeline.kernels.w4a16.cpu_bags import Scratch


class HostDecoder:
    """The decode step of a batch of one."""

    def __init__(self, weights: Weights, rotary: RotaryTable, cache: PagedKV) -> None:
        self.weights, self.rotary, self.cache = weights, rotary, cache
        config, H, G = weights.config, weights.heads, weights.kv_heads
        C, D = config.hidden_size, config.head_dim
        self.eps, self.scale = config.norm_eps, D**-0.5
        self.x_1C, self.added_1C = torch.empty(1, C), torch.empty(1, C)
        self.x_C = self.x_1C[0]
        self.qkv_1N = torch.empty(1, (H + 2 * G) * D)
        self.o_1N = torch.empty(1, H * D)
        qkv_HD = self.qkv_1N.view(-1, D)
        self.qk_HD, self.v_GD = qkv_HD[: H + G], qkv_HD[H + G :]
        self.turned_HD = torch.empty(H + G, D)
        self.q_HD, self.k_GD = self.turned_HD[:H], self.turned_HD[H:]
        self.q_GRD, self.o_GRD = self.q_HD.view(G, -1, D), self.o_1N.view(G, -1, D)
        self.cos_HD, self.sin_HD = torch.empty(H + G, D), torch.empty(H + G, D)
        self.halves = [
            tuple(x.split(D // 2, dim=1)) for x in (self.turned_HD, self.qk_HD, self.sin_HD)
        ]
        scratch: Scratch = {}
        self.products = [self._products(layer, scratch) for layer in weights.layers]
        self.head = Head(weights.head, Normed(self.x_1C, weights.norm))

    @staticmethod
    def takes(weights: Weights, cache: PagedKV, invariant: bool) -> bool:
        """Whether this path can run a model: no other implementation was asked for by name."""
        asked = env.impl_override("attention") or env.impl_override("w4a16")
        fits = cache.dtype in (weights.dtype, torch.float32)
        return fits and not invariant and asked is None and weights.shard.ranks == 1

    def _products(self, layer: LayerWeights, scratch: Scratch) -> tuple[Product, ...]:
        config, dtype = self.weights.config, self.weights.dtype
        x_1C, added_1C = self.x_1C, self.added_1C
        y_1F = torch.empty(1, config.intermediate_size)
        normed, mlp_normed = Normed(x_1C, layer.input_norm), Normed(x_1C, layer.mlp_norm)
        gate = not layer.gated
        return (
            Product(layer.qkv, normed, self.qkv_1N, scratch, dtype=dtype),
            Product(layer.out, Kept(self.o_1N), added_1C, scratch, dtype=dtype),
            Product(layer.gate_up, mlp_normed, y_1F, scratch, dtype=dtype, gate=gate),
            Product(layer.down, Kept(y_1F), added_1C, scratch, dtype=dtype),
        )

    def run(self, token_id: int, span: Span) -> torch.Tensor:
        """Logits [1, V] after one new token, in fp32."""
        x_1C, added_1C = self.x_1C, self.added_1C
        position = span.num_keys - 1
        x_1C.copy_(self.weights.embedding_VC[token_id : token_id + 1])
        self._turn_to(position)
        new_k, new_v, keys, values = self._places(span, position)
        for index, layer in enumerate(self.weights.layers):
            qkv, out, gate_up, down = self.products[index]
            qkv(self._norm_factor())
            self._turn(layer)
            new_k[index].copy_(self.k_GD)
            new_v[index].copy_(self.v_GD)
            k_GDT, v_GTD = keys[index], values[index]
            if layer.window is not None and layer.window < span.num_keys:
                k_GDT, v_GTD = k_GDT[..., -layer.window :], v_GTD[:, -layer.window :]
            self._attend(k_GDT, v_GTD)
            out()
            x_1C.add_(added_1C)
            gate_up(self._norm_factor())
            down()
            x_1C.add_(added_1C)
        return self.head(self._norm_factor())

    def _norm_factor(self) -> float:
        x_C = self.x_C
        return 1.0 / sqrt(torch.dot(x_C, x_C).item() / x_C.shape[0] + self.eps)

    def _turn_to(self, position: int) -> None:
        """The angles of a position for all heads."""
        H = self.weights.heads
        self.cos_HD.copy_(self.rotary.cos_T1D[position])
        self.sin_HD.copy_(self.rotary.sin_T1D[position])
        self.cos_HD[:H].mul_(self.scale)
        self.sin_HD[:H].mul_(self.scale)

    def _turn(self, layer: LayerWeights) -> None:
        """Queries and keys to their position."""
        qk_HD, H, D = self.qk_HD, self.weights.heads, self.weights.config.head_dim
        if layer.q_norm is not None and layer.k_norm is not None:
            q_HD, k_GD = qk_HD[:H], qk_HD[H:]
            q_HD.copy_(F.rms_norm(q_HD, (D,), layer.q_norm.float(), self.eps))
            k_GD.copy_(F.rms_norm(k_GD, (D,), layer.k_norm.float(), self.eps))
        (turned_low, turned_high), (low, high), (sin_low, sin_high) = self.halves
        torch.mul(qk_HD, self.cos_HD, out=self.turned_HD)
        turned_low.addcmul_(high, sin_low)
        turned_high.addcmul_(low, sin_high)

    def _attend(self, k_GDT: torch.Tensor, v_GTD: torch.Tensor) -> None:
        if k_GDT.dtype == torch.float32:
            decode_wide(self.q_GRD, k_GDT, v_GTD, self.o_GRD)
            return
        k_TGD, v_TGD = k_GDT.permute(2, 0, 1), v_GTD.transpose(0, 1)
        self.o_1N.copy_(decode_one(self.q_HD.to(k_TGD.dtype), k_TGD, v_TGD, 1.0))

    def _places(self, span: Span, position: int) -> tuple[Sequence[torch.Tensor], ...]:
        """For every layer: where the new key [G, D] and value go, keys [G, D, T] and values
        [G, T, D] with the new ones (views, to be read when those are written)."""
        cache = self.cache
        k_LSGD, v_LSGD = cache.k.flatten(1, 2), cache.v.flatten(1, 2)
        slot = span.pages[position // cache.page_tokens] * cache.page_tokens
        slot += position % cache.page_tokens
        new = k_LSGD[:, slot].unbind(), v_LSGD[:, slot].unbind()
        slots = cache.key_slots(span)
        if isinstance(slots, slice):
            keys = k_LSGD[:, slots].permute(0, 2, 3, 1).unbind()
            return *new, keys, v_LSGD[:, slots].transpose(1, 2).unbind()
        keys = _Gathered(cache.flat_k, slots, (1, 2, 0))
        return *new, keys, _Gathered(cache.flat_v, slots, (1, 0, 2))


class _Gathered(Sequence[torch.Tensor]):
    """Keys or values of pages that are no neighbours: copies, made when they are asked for."""

    def __init__(
        self, layers: list[torch.Tensor], slots_T: torch.Tensor, order: tuple[int, ...]
    ) -> None:
        self.layers, self.slots_T, self.order = layers, slots_T, order

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: Any) -> Any:
        return self.layers[index][self.slots_T].permute(self.order)
