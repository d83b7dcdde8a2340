"""One token of one sequence on a CPU, with as few operations as will do.

At this size an operation's fixed cost (some microseconds, thirty layers deep) outweighs its
arithmetic. What is the same for all layers is made once a step (the rotation, as one small matrix;
the keys' place), the residual stays in fp32 so that norms convert nothing, checks that cannot fail
are left out. The result is the general forward's up to rounding.
    x' = x R, R = diag(cos) + the signed sines on the exchanged halves        rotation
    n(x) = x w sqrt(C) / sqrt(|x|^2 + C eps)                                  RMS norm
Bound by the weights' bytes: each is read once.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
import torch.nn.functional as F

from ridgeline.core import env
from ridgeline.engine.forward import RotaryTable
from ridgeline.engine.paged import PagedKV, Span
from ridgeline.engine.weights import Dense, Linear, Packed, Weights
from ridgeline.kernels.attention.cpu import decode_one
from ridgeline.kernels.w4a16.cpu import bags_of, has_fast_bf16
from ridgeline.kernels.w4a16.cpu import forward as packed_forward
from ridgeline.kernels.w4a16.cpu_bags import Scratch, has_bags, row_function
from ridgeline.kernels.w4a16.prepared import Prepared

Call = Callable[[torch.Tensor], torch.Tensor]


class HostDecoder:
    """The decode step of a batch of one."""

    def __init__(self, weights: Weights, rotary: RotaryTable, cache: PagedKV) -> None:
        self.weights, self.rotary, self.cache = weights, rotary, cache
        config = weights.config
        scratch: Scratch = {}
        self.calls = [
            tuple(_direct(linear, weights.dtype, scratch) for linear in layer.linears())
            for layer in weights.layers
        ]
        self.head = _head(weights.head) or _direct(weights.head, weights.dtype, scratch)
        self.norms = [
            (layer.input_norm.float()[None], layer.mlp_norm.float()[None])
            for layer in weights.layers
        ]
        self.last_norm = weights.norm.float()[None]
        self.width, self.eps = config.hidden_size, config.norm_eps
        self.scale = config.head_dim**-0.5
        D = config.head_dim
        self._diagonal = torch.arange(D)
        self._exchanged = (self._diagonal + D // 2) % D
        self.rotation_DD = torch.zeros(D, D)

    @staticmethod
    def takes(weights: Weights, cache: PagedKV, invariant: bool) -> bool:
        """Whether this path can run a model: no other implementation was asked for by name."""
        asked = env.impl_override("attention") or env.impl_override("w4a16")
        same = cache.dtype == weights.dtype
        return same and not invariant and asked is None and weights.shard.ranks == 1

    def run(self, token_id: int, span: Span) -> torch.Tensor:
        """Logits [1, V] after one new token."""
        weights, cache = self.weights, self.cache
        position = span.num_keys - 1
        slot = span.pages[position // cache.page_tokens] * cache.page_tokens
        slot += position % cache.page_tokens
        keys = cache.key_slots(span)
        self._turn_to(position)
        H, G, D = weights.heads, weights.kv_heads, weights.config.head_dim
        dtype = weights.dtype
        x_1C = weights.embedding_VC[token_id : token_id + 1].to(torch.float32, copy=True)
        for index, layer in enumerate(weights.layers):
            qkv, out, gate_up, down = self.calls[index]
            first_norm, second_norm = self.norms[index]
            qkv_HD = qkv(self._norm(x_1C, first_norm)).view(-1, D)
            qk_HD = qkv_HD[: H + G].float()
            if layer.q_norm is not None and layer.k_norm is not None:
                eps = self.eps
                q = F.rms_norm(qk_HD[:H], (D,), layer.q_norm.float(), eps)
                k = F.rms_norm(qk_HD[H:], (D,), layer.k_norm.float(), eps)
                qk_HD = torch.cat((q, k))
            turned_HD = torch.mm(qk_HD, self.rotation_DD)
            cache.flat_k[index][slot].copy_(turned_HD[H:])
            cache.flat_v[index][slot].copy_(qkv_HD[H + G :])
            k_TGD, v_TGD = cache.read(index, keys, dtype)
            if layer.window is not None and layer.window < span.num_keys:
                k_TGD, v_TGD = k_TGD[-layer.window :], v_TGD[-layer.window :]
            o_1K = decode_one(turned_HD[:H].to(dtype), k_TGD, v_TGD, self.scale)
            x_1C.add_(out(o_1K.float()))
            y_1F = gate_up(self._norm(x_1C, second_norm))
            if not layer.gated:
                gate, up = y_1F.chunk(2, dim=-1)
                y_1F = F.silu(gate).mul_(up)
            x_1C.add_(down(y_1F))
        return self.head(self._norm(x_1C, self.last_norm))

    def _norm(self, x_1C: torch.Tensor, weight_1C: torch.Tensor) -> torch.Tensor:
        x_C = x_1C[0]
        return weight_1C.mul(x_1C).mul_(
            1.0 / sqrt(float(torch.dot(x_C, x_C)) / self.width + self.eps)
        )

    def _turn_to(self, position: int) -> None:
        cos_D = self.rotary.cos_T1D[position, 0]
        sin_D = self.rotary.sin_T1D[position, 0]
        self.rotation_DD[self._diagonal, self._diagonal] = cos_D
        self.rotation_DD[self._exchanged, self._diagonal] = sin_D


HEAD_CHUNK = 96
"""Tokens side by side in the head's second layout, as in kernels/w4a16/cpu_bags."""


def head_in_bags(dtype: torch.dtype) -> bool:
    """Whether a row's logits are computed from a second, chunked copy of the head: FBGEMM's bf16
    embedding bag instead of PyTorch's bf16 matrix-vector product. Milliseconds for 576 x 49,152,
    one thread of a busy EPYC (AVX2), 2026-11-30: 10.4 against 18.9."""
    return dtype == torch.bfloat16 and has_bags() and not has_fast_bf16()


def _head(head: Dense) -> Call | None:
    """Logits of one row, sums in fp32, rounded once; None where F.linear serves as well."""
    V, C = head.weight_NK.shape
    if not head_in_bags(head.weight_NK.dtype) or head.bias_N is not None:
        return None
    chunks = -(-V // HEAD_CHUNK)
    padded = F.pad(head.weight_NK, (0, 0, 0, chunks * HEAD_CHUNK - V))
    table = padded.view(chunks, HEAD_CHUNK, C).transpose(1, 2).reshape(-1, HEAD_CHUNK)
    index = torch.arange(chunks * C, dtype=torch.int32)
    offsets = torch.arange(0, chunks * C + 1, C, dtype=torch.int32)

    def call(x_1C: torch.Tensor) -> torch.Tensor:
        weights = x_1C.to(torch.bfloat16).expand(chunks, -1).reshape(-1)
        logits = torch.embedding_bag(table, index, offsets, False, 0, False, weights, True)[0]
        return logits.view(1, -1)[:, :V]

    return call


def _direct(linear: Linear, dtype: torch.dtype, scratch: Scratch) -> Call:
    """A linear's function of an fp32 row, without the checks of a public call."""
    if isinstance(linear, Dense):
        weight_NK, bias_N = linear.weight_NK, linear.bias_N
        return lambda x_1K: F.linear(x_1K.to(dtype), weight_NK, bias_N)
    if isinstance(linear, Packed) and linear.prepared.impl == "cpu":
        prepared, bias = linear.prepared, linear.bias_N
        bags = bags_of(prepared)
        if bags is not None:
            return _bagged(row_function(bags, prepared.n, scratch), prepared, bias)
        return lambda x_1K: packed_forward(x_1K.to(dtype), prepared, bias)
    return lambda x_1K: linear(x_1K.to(dtype))


def _bagged(multiply: Call, prepared: Prepared, bias_N: torch.Tensor | None) -> Call:
    """A packed linear in fp32 from end to end."""
    gated = prepared.silu_mul
    wide_N = None if bias_N is None else bias_N.float()

    def call(x_1K: torch.Tensor) -> torch.Tensor:
        out_1N = multiply(x_1K)
        if wide_N is not None:
            out_1N.add_(wide_N)
        if not gated:
            return out_1N
        gate, up = out_1N.chunk(2, dim=-1)
        return F.silu(gate, inplace=True).mul_(up)

    return multiply if wide_N is None and not gated else call
