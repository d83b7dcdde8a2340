"""The parts of a decoder block, named as in Hugging Face's checkpoints.

    x <- x + o_proj(attention(rope(q), rope(k), v))        q, k, v = linears of input_layernorm(x)
    x <- x + down_proj(silu(gate_proj(y)) * up_proj(y))    y = post_attention_layernorm(x)

Head counts are read off the tensors, so a block whose linears were split over a tensor-parallel
axis, or replaced by quantized ones, runs unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.kernels.attention import flash_attn_func, flash_attn_varlen_func
from ridgeline.nn.cache import Cache
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.rope import rotate


def window_bounds(window: int | None) -> tuple[int, int]:
    """FlashAttention's inclusive (left, right) of a causal window of so many keys, own included."""
    return (-1, -1) if window is None else (window - 1, 0)


class Attend(Protocol):
    """Attention over more tokens than these (a sequence spread over ranks)."""

    def __call__(
        self,
        q_BSHD: torch.Tensor,
        k_BSGD: torch.Tensor,
        v_BSGD: torch.Tensor,
        window_size: tuple[int, int],
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What all blocks of one forward pass share. A dataclass, not tensors in the signature, so that
    FSDP's cast of a block's inputs to bf16 leaves the fp32 angles alone."""

    cos: torch.Tensor
    """fp32 [B or 1, S, 1, D / 2]."""
    sin: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    """int32, starts of the documents in the flattened B * S tokens; None: rows are sequences."""
    max_seqlen: int = 0
    """Tokens of the longest document, with cu_seqlens."""
    cache: Cache | None = None
    attend: Attend | None = None
    """What attends instead of this module, if anything."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(
        self, config: DecoderConfig, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        C, H, G, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.layer, self.head_dim = layer, D
        window = config.window(layer)
        self.window_size = window_bounds(window)
        self.q_proj = nn.Linear(C, H * D, config.qkv_bias, device, dtype)
        self.k_proj = nn.Linear(C, G * D, config.qkv_bias, device, dtype)
        self.v_proj = nn.Linear(C, G * D, config.qkv_bias, device, dtype)
        self.o_proj = nn.Linear(H * D, C, config.out_bias, device, dtype)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(D, config.norm_eps, device=device, dtype=dtype)
            self.k_norm = nn.RMSNorm(D, config.norm_eps, device=device, dtype=dtype)

    def forward(self, x_BSC: torch.Tensor, step: Step) -> torch.Tensor:
        q_BSHD = self.q_proj(x_BSC).unflatten(-1, (-1, self.head_dim))
        k_BSGD = self.k_proj(x_BSC).unflatten(-1, (-1, self.head_dim))
        v_BSGD = self.v_proj(x_BSC).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHD, k_BSGD = self.q_norm(q_BSHD), self.k_norm(k_BSGD)
        q_BSHD = rotate(q_BSHD, step.cos, step.sin)
        k_BSGD = rotate(k_BSGD, step.cos, step.sin)
        o_BSHD = self._attend(q_BSHD, k_BSGD, v_BSGD, step)
        return self.o_proj(o_BSHD.flatten(-2))

    def _attend(
        self, q_BSHD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor, step: Step
    ) -> torch.Tensor:
        if step.attend is not None:
            return step.attend(q_BSHD, k_BSGD, v_BSGD, self.window_size)
        if step.cache is not None:
            return step.cache.attend(self.layer, q_BSHD, k_BSGD, v_BSGD, self.window_size)
        if step.cu_seqlens is None:
            o_BSHD = flash_attn_func(
                q_BSHD, k_BSGD, v_BSGD, causal=True, window_size=self.window_size
            )
            assert isinstance(o_BSHD, torch.Tensor)  # no LSE was asked for
            return o_BSHD
        o_PHD = flash_attn_varlen_func(
            q_BSHD.flatten(0, 1),
            k_BSGD.flatten(0, 1),
            v_BSGD.flatten(0, 1),
            cu_seqlens_q=step.cu_seqlens,
            cu_seqlens_k=step.cu_seqlens,
            max_seqlen_q=step.max_seqlen,
            max_seqlen_k=step.max_seqlen,
            causal=True,
            window_size=self.window_size,
        )
        assert isinstance(o_PHD, torch.Tensor)
        return o_PHD.unflatten(0, q_BSHD.shape[:2])


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        C, F_, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(C, F_, bias, device, dtype)
        self.up_proj = nn.Linear(C, F_, bias, device, dtype)
        self.down_proj = nn.Linear(F_, C, bias, device, dtype)

    def forward(self, x_BSC: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSC)) * self.up_proj(x_BSC))


class Block(nn.Module):
    """One decoder layer: attention and MLP, each behind an RMSNorm and with a residual."""

    def __init__(
        self, config: DecoderConfig, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        C, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = nn.RMSNorm(C, eps, device=device, dtype=dtype)
        self.self_attn = Attention(config, layer, device, dtype)
        self.post_attention_layernorm = nn.RMSNorm(C, eps, device=device, dtype=dtype)
        self.mlp = MLP(config, device, dtype)

    def forward(self, x_BSC: torch.Tensor, step: Step) -> torch.Tensor:
        x_BSC = x_BSC + self.self_attn(self.input_layernorm(x_BSC), step)
        return x_BSC + self.mlp(self.post_attention_layernorm(x_BSC))


class LayerList(nn.ModuleList):
    """Blocks under their global layer index: a pipeline stage with layers 4 to 7 keeps the names
    layers.4 to layers.7, and `stack[5]` is layer 5 on every stage."""

    def __init__(self, layers: dict[int, nn.Module]) -> None:
        super().__init__()
        for index, layer in layers.items():
            self.add_module(str(index), layer)

    @property
    def indices(self) -> list[int]:
        """Global indices of the layers held here."""
        return [int(name) for name in self._modules]

    def __getitem__(self, idx: int) -> nn.Module:  # pyright: ignore[reportIncompatibleMethodOverride]
        module = self._modules[str(idx)]
        assert module is not None
        return module

    def __setitem__(self, idx: int, module: nn.Module) -> None:
        assert str(idx) in self._modules, f"no layer {idx} here"
        self._modules[str(idx)] = module

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(module for module in self._modules.values() if module is not None)

    def __len__(self) -> int:
        return len(self._modules)
