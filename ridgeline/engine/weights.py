"""A decoder's weights as the engine runs them: linears that share an input joined, sharded over
tensor-parallel ranks.

    qkv = [q; k; v] x        gate_up = [gate; up] y        one matmul each instead of three and two

A plain joined weight takes the place of its parts (they become views of it), so nothing is stored
twice; a quantized one is laid out for its kernel once, joined. Over `ranks`, rank r has heads and
feed-forward columns r, the matching rows of the projections back, and a slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.core.errors import bad_value
from ridgeline.kernels.logits import wide_logits
from ridgeline.kernels.w4a16.op import decode_bytes, prepare, w4a16_linear
from ridgeline.kernels.w4a16.prepared import Prepared
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.invariant import in_tiles
from ridgeline.nn.layers import Attention, Block
from ridgeline.quant.linear import QuantizedLinear, concat_rows

STREAM_BYTES = 64 * 2**10
"""Of a packed linear's tensors, those from this size on are its codes and scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """This process's part of a tensor-parallel model."""

    rank: int = 0
    ranks: int = 1
    device: torch.device | None = None
    """Where its parts go; None: they stay where the model is."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on this rank's device."""
        return tensor if self.device is None else tensor.to(self.device)

    def split(self, name: str, size: int) -> slice:
        """This rank's equal part of a dimension. Raises: ValueError where it does not divide."""
        if size % self.ranks:
            raise bad_value(
                "engine", "ranks", f"divide {name} {size}", self.ranks, "use fewer processes"
            )
        part = size // self.ranks
        return slice(self.rank * part, (self.rank + 1) * part)


class Dense:
    """out = x W^T + b."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, invariant: bool):
        self.weight_NK, self.bias_N, self.invariant = weight_NK, bias_N, invariant
        self._wide_NK: torch.Tensor | None = None

    def __call__(self, x_PK: torch.Tensor) -> torch.Tensor:
        return self._tiled(x_PK, lambda tile: F.linear(tile, self.weight_NK, self.bias_N))

    @property
    def wide_is_free(self) -> bool:
        """Whether `wide` costs no more than a call."""
        return self.weight_NK.is_cuda or self.weight_NK.dtype.itemsize >= 4

    def wide(self, x_PK: torch.Tensor) -> torch.Tensor:
        """out in fp32, its sums never rounded (a head: no bias). A CPU widens the weight for it,
        once, when first asked."""
        if self.wide_is_free:
            return self._tiled(x_PK, lambda tile: wide_logits(tile, self.weight_NK))
        if self._wide_NK is None:
            self._wide_NK = self.weight_NK.float()
        wide_NK = self._wide_NK
        return self._tiled(x_PK.float(), lambda tile: F.linear(tile, wide_NK))

    def _tiled(
        self, x_PK: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        if not self.invariant:
            return product(x_PK)
        return in_tiles(x_PK, product)

    def streams(self) -> list[torch.Tensor]:
        """Tensors that a call reads once, from their beginning on."""
        return [self.weight_NK]

    def read_bytes(self) -> int:
        """Bytes that a call of one row reads."""
        return self.weight_NK.numel() * self.weight_NK.element_size()

    def resident_bytes(self) -> int:
        """Bytes kept in memory."""
        return self.read_bytes()


class Packed:
    """A quantized linear in its kernel's layout."""

    def __init__(self, prepared: Prepared, bias_N: torch.Tensor | None, invariant: bool):
        self.prepared, self.bias_N, self.invariant = prepared, bias_N, invariant

    def __call__(self, x_PK: torch.Tensor) -> torch.Tensor:
        return w4a16_linear(x_PK, self.prepared, self.bias_N, batch_invariant=self.invariant)

    def streams(self) -> list[torch.Tensor]:
        """Tensors that a call reads once, from their beginning on: codes and scales."""
        sizes = [t.numel() * t.element_size() for t in self.prepared.tensors]
        return [
            t
            for t, size in zip(self.prepared.tensors, sizes, strict=True)
            if size >= STREAM_BYTES and t.is_contiguous()
        ]

    def read_bytes(self) -> int:
        """Bytes that a call of one row reads."""
        return decode_bytes(self.prepared)

    def resident_bytes(self) -> int:
        """Bytes kept in memory."""
        return sum(t.numel() * t.element_size() for t in self.prepared.tensors)


class Joined:
    """Linears on one input that cannot be one matmul: their outputs side by side."""

    def __init__(self, parts: Sequence[Dense | Packed]):
        self.parts = parts

    def __call__(self, x_PK: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x_PK) for part in self.parts], dim=-1)

    def streams(self) -> list[torch.Tensor]:
        """Tensors that a call reads once, in their order."""
        return [tensor for part in self.parts for tensor in part.streams()]

    def read_bytes(self) -> int:
        """Bytes that a call of one row reads."""
        return sum(part.read_bytes() for part in self.parts)

    def resident_bytes(self) -> int:
        """Bytes kept in memory."""
        return sum(part.resident_bytes() for part in self.parts)


Linear = Dense | Packed | Joined


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder block."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    gated: bool
    """gate_up gives silu(gate) * up itself."""
    down: Linear
    window: int | None

    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A whole model, or one rank's part of it."""

    config: DecoderConfig
    shard: Shard
    embedding_VC: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Dense
    dtype: torch.dtype
    device: torch.device

    @property
    def heads(self) -> int:
        return self.config.num_heads // self.shard.ranks

    @property
    def kv_heads(self) -> int:
        return self.config.num_kv_heads // self.shard.ranks

    def read_bytes(self) -> int:
        """Bytes of weights that a decode step of this rank reads."""
        linears = [linear for layer in self.layers for linear in layer.linears()]
        norms = 2 * len(self.layers) * self.norm.numel() * self.norm.element_size()
        return sum(linear.read_bytes() for linear in [*linears, self.head]) + norms


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A matmul of a block; as text `KxN`, with `:silu` for silu(gate) * up."""

    k: int
    n: int
    silu_mul: bool = False

    def __str__(self) -> str:
        return f"{self.k}x{self.n}" + (":silu" if self.silu_mul else "")


def linear_shapes(config: DecoderConfig) -> tuple[LinearShape, ...]:
    """The matmuls of every block as `weights_of` joins them when all are quantized alike."""
    C, F, D = config.hidden_size, config.intermediate_size, config.head_dim
    H, G = config.num_heads, config.num_kv_heads
    return (
        LinearShape(k=C, n=(H + 2 * G) * D),
        LinearShape(k=H * D, n=C),
        LinearShape(k=C, n=2 * F, silu_mul=True),
        LinearShape(k=F, n=C),
    )


def weights_of(model: Decoder, shard: Shard | None = None, *, invariant: bool = False) -> Weights:
    """Take a loaded decoder's weights. The decoder still runs afterwards, on the same memory.

    Raises: ValueError where heads or feed-forward do not divide over the ranks.
    """
    shard = shard or Shard()
    config = model.config
    shard.split("num_kv_heads", config.num_kv_heads)
    assert model.model.embed_tokens is not None and model.model.norm is not None
    assert model.lm_head is not None
    table = shard.place(model.model.embed_tokens.weight.detach())
    head = shard.place(_vocabulary_slice(model.lm_head.weight.detach(), shard))
    return Weights(
        config=config,
        shard=shard,
        embedding_VC=table,
        layers=tuple(_layer(model, index, shard, invariant) for index in range(config.num_layers)),
        norm=shard.place(model.model.norm.weight.detach()),
        head=Dense(head, None, invariant),
        dtype=model.model.norm.weight.dtype,
        device=table.device,
    )


def _vocabulary_slice(head_VC: torch.Tensor, shard: Shard) -> torch.Tensor:
    """This rank's rows of the head, as many on every rank: the last one's are filled with zeros."""
    if shard.ranks == 1:
        return head_VC
    rows = -(-head_VC.shape[0] // shard.ranks)
    mine = head_VC[shard.rank * rows : (shard.rank + 1) * rows]
    return F.pad(mine, (0, 0, 0, rows - mine.shape[0]))


def _layer(model: Decoder, index: int, shard: Shard, invariant: bool) -> LayerWeights:
    block = model.blocks[index]
    assert isinstance(block, Block)
    attention, mlp = block.self_attn, block.mlp
    assert isinstance(attention, Attention)
    gate_up, gated = _joined([mlp.gate_proj, mlp.up_proj], shard, invariant, silu_mul=True)
    qkv, _ = _joined([attention.q_proj, attention.k_proj, attention.v_proj], shard, invariant)
    return LayerWeights(
        input_norm=shard.place(block.input_layernorm.weight.detach()),
        qkv=qkv,
        q_norm=_placed(attention.q_norm, shard),
        k_norm=_placed(attention.k_norm, shard),
        out=_row(attention.o_proj, shard, invariant),
        mlp_norm=shard.place(block.post_attention_layernorm.weight.detach()),
        gate_up=gate_up,
        gated=gated,
        down=_row(mlp.down_proj, shard, invariant),
        window=model.config.window(index),
    )


def _placed(norm: nn.RMSNorm | None, shard: Shard) -> torch.Tensor | None:
    return None if norm is None else shard.place(norm.weight.detach())


def _joined(
    modules: list[nn.Module], shard: Shard, invariant: bool, *, silu_mul: bool = False
) -> tuple[Linear, bool]:
    """Linears of one input as one, each split by columns; whether silu(gate) * up is in it."""
    if all(isinstance(module, QuantizedLinear) for module in modules):
        return _joined_packed(modules, shard, invariant, silu_mul)
    if all(isinstance(module, nn.Linear) for module in modules) and not invariant:
        # Not joined in batch-invariant mode: a product of another width is another kernel than
        # that of the trainer, with which it then would agree no more (nn/invariant.py).
        return _joined_dense(modules, shard, invariant), False
    return Joined([_column(module, shard, invariant) for module in modules]), False


def _joined_dense(modules: list[nn.Module], shard: Shard, invariant: bool) -> Dense:
    parts = [module for module in modules if isinstance(module, nn.Linear)]
    rows = [shard.split("its outputs", part.out_features) for part in parts]
    weights = [part.weight.detach()[row] for part, row in zip(parts, rows, strict=True)]
    joined_NK = shard.place(torch.cat(weights))
    held = [(part.bias, row) for part, row in zip(parts, rows, strict=True)]
    biases = [shard.place(bias.detach()[row]) for bias, row in held if bias is not None]
    if shard.ranks == 1:
        for part, view in zip(parts, joined_NK.split([len(w) for w in weights]), strict=True):
            part.weight = nn.Parameter(view, requires_grad=part.weight.requires_grad)
    return Dense(joined_NK, torch.cat(biases) if biases else None, invariant)


def _joined_packed(
    modules: list[nn.Module], shard: Shard, invariant: bool, silu_mul: bool
) -> tuple[Linear, bool]:
    parts = [_own(m, "column", shard) for m in modules if isinstance(m, QuantizedLinear)]
    dtype, impl = parts[0].dtype, parts[0].impl
    try:
        weight = concat_rows([part.weight_of() for part in parts])
    except ValueError:  # groups or act-orders differ
        return Joined([_packed(part, invariant) for part in parts]), False
    prepared = prepare(weight, dtype, impl=impl, silu_mul=silu_mul)
    bias = None if weight.bias_N is None else weight.bias_N.to(dtype)
    return Packed(prepared, bias, invariant), silu_mul


def _own(module: QuantizedLinear, axis: str, shard: Shard) -> QuantizedLinear:
    if shard.ranks == 1:
        return module
    mine = module.shard(axis, shard.rank, shard.ranks)
    return mine if shard.device is None else mine.to(shard.device)


def _packed(module: QuantizedLinear, invariant: bool) -> Packed:
    bias = None if module.bias is None else module.bias.to(module.dtype)
    return Packed(module.prepare(), bias, invariant)


def _column(module: nn.Module, shard: Shard, invariant: bool) -> Dense | Packed:
    if isinstance(module, QuantizedLinear):
        return _packed(_own(module, "column", shard), invariant)
    assert isinstance(module, nn.Linear)
    rows = shard.split("its outputs", module.out_features)
    bias = None if module.bias is None else shard.place(module.bias.detach()[rows])
    return Dense(shard.place(module.weight.detach()[rows]), bias, invariant)


def _row(module: nn.Module, shard: Shard, invariant: bool) -> Dense | Packed:
    """A projection back: its inputs split; the bias on rank 0 alone, the ranks' sum adds it."""
    if isinstance(module, QuantizedLinear):
        return _packed(_own(module, "row", shard), invariant)
    assert isinstance(module, nn.Linear)
    columns = shard.split("its inputs", module.in_features)
    bias = None if module.bias is None or shard.rank else shard.place(module.bias.detach())
    weight_NK = module.weight.detach()
    if shard.ranks > 1:
        weight_NK = shard.place(weight_NK[:, columns].contiguous())
    return Dense(weight_NK, bias, invariant)
