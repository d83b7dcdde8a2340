"""Llama-3-8B's shape with random weights made on the GPU: speed does not depend on them."""

from __future__ import annotations

import torch

from ridgeline.engine.weights import Dense, LayerWeights, Packed, Shard, Weights
from ridgeline.formats.base import QuantizedWeight
from ridgeline.kernels.w4a16.op import prepare
from ridgeline.nn.config import DecoderConfig

GROUP = 128


def group_of(shape: DecoderConfig) -> int:
    """Inputs a scale: 128, or all of a tiny model's."""
    return min(GROUP, shape.hidden_size)


def random_weights(
    shape: DecoderConfig, impl: str | None, where: str = "cuda", shard: Shard | None = None
) -> Weights:
    """Weights of a shape on the GPU, normal, or (impl given) random 4-bit codes of one scale;
    shard: one rank's part of them."""
    shard = shard or Shard()
    packed, group = impl is not None, min(group_of(shape), shape.hidden_size // shard.ranks)
    device, dtype = torch.device(where), torch.bfloat16

    def dense(n: int, k: int) -> Dense:
        weight = torch.empty(n, k, device=device, dtype=dtype).normal_(0.0, shape.init_std)
        return Dense(weight, None, False)

    def linear(n: int, k: int, *, silu_mul: bool = False) -> Dense | Packed:
        if impl is None:
            return dense(n, k)
        weight = QuantizedWeight(
            code_NK=torch.randint(0, 16, (n, k), device=device, dtype=torch.uint8),
            scale_NR=torch.full((n, k // group), shape.init_std / 5, device=device, dtype=dtype),
            zero_NR=None,
            bits=4,
            group_size=group,
        )
        return Packed(prepare(weight, dtype, impl=impl, silu_mul=silu_mul), None, False)

    C, ranks = shape.hidden_size, shard.ranks
    F, H, G = (
        size // ranks for size in (shape.intermediate_size, shape.num_heads, shape.num_kv_heads)
    )
    D, ones = shape.head_dim, torch.ones(shape.hidden_size, device=device, dtype=dtype)
    layers = tuple(
        LayerWeights(
            input_norm=ones,
            qkv=linear((H + 2 * G) * D, C),
            q_norm=None,
            k_norm=None,
            out=linear(C, H * D),
            mlp_norm=ones,
            gate_up=linear(2 * F, C, silu_mul=True),
            gated=packed,
            down=linear(C, F),
            window=None,
        )
        for _ in range(shape.num_layers)
    )
    head = dense(-(-shape.vocab_size // ranks), C)
    whole = shape.tie_embeddings and ranks == 1
    table = head.weight_NK if whole else dense(shape.vocab_size, C).weight_NK
    return Weights(
        config=shape,
        shard=shard,
        embedding_VC=table,
        layers=layers,
        norm=ones,
        head=head,
        dtype=dtype,
        device=device,
    )
