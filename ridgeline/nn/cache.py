"""Contiguous key/value cache of a batch of sequences of one length.

A decoder asks its cache for three things: where the new tokens stand (`positions`), attention over
what is kept plus the new tokens (`attend`), and to move on (`advance`). Anything with the same
three (a paged cache) can take its place. It holds 2 L G D elements a token and sequence.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ridgeline.core.errors import bad_value
from ridgeline.kernels.attention import flash_attn_func, flash_attn_with_kvcache
from ridgeline.nn.config import DecoderConfig


class Cache(Protocol):
    """What the decoder needs of a cache."""

    def positions(self, num_tokens: int) -> torch.Tensor:
        """Positions of the next tokens, int64 [B or 1, S]; refuses what does not fit."""
        ...

    def attend(
        self,
        layer: int,
        q_BSHD: torch.Tensor,
        k_BSGD: torch.Tensor,
        v_BSGD: torch.Tensor,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        """Keep the new keys and values; causal attention over all kept ones, [B, S, H, D]."""
        ...

    def advance(self, num_tokens: int) -> None:
        """The tokens of this step are kept in every layer."""
        ...


class KVCache:
    """Keys and values of `batch` sequences that grow together, up to `capacity` tokens each.

    Raises: ValueError when capacity exceeds the model's context, or a step exceeds the capacity.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        batch: int = 1,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 1 <= capacity <= config.max_seqlen:
            raise bad_value(
                "cache",
                "capacity",
                f"lie in 1 .. {config.max_seqlen} tokens, the model's context",
                capacity,
                "shorten the prompt or generate fewer tokens",
            )
        self.capacity = capacity
        self.length = 0
        shape = (config.num_layers, batch, capacity, config.num_kv_heads, config.head_dim)
        self.k_LBTGD = torch.zeros(shape, dtype=dtype, device=device)
        self.v_LBTGD = torch.zeros(shape, dtype=dtype, device=device)
        self.seqlens_B = torch.zeros(batch, dtype=torch.int32, device=device)

    def positions(self, num_tokens: int) -> torch.Tensor:
        end = self.length + num_tokens
        if end > self.capacity:
            raise bad_value(
                "cache",
                "tokens",
                f"fit in the capacity of {self.capacity}",
                end,
                "shorten the prompt or generate fewer tokens",
            )
        return torch.arange(self.length, end, device=self.k_LBTGD.device).unsqueeze(0)

    def attend(
        self,
        layer: int,
        q_BSHD: torch.Tensor,
        k_BSGD: torch.Tensor,
        v_BSGD: torch.Tensor,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        k_BTGD, v_BTGD = self.k_LBTGD[layer], self.v_LBTGD[layer]
        if self.length == 0:  # a prompt needs no key of the cache: the plain op is the faster one
            num_tokens = k_BSGD.shape[1]
            k_BTGD[:, :num_tokens] = k_BSGD
            v_BTGD[:, :num_tokens] = v_BSGD
            o_BSHD = flash_attn_func(q_BSHD, k_BSGD, v_BSGD, causal=True, window_size=window_size)
            assert isinstance(o_BSHD, torch.Tensor)  # no LSE was asked for
            return o_BSHD
        # On a CPU a known length lets the op read only the used part; a GPU step stays free of it.
        on_cpu = k_BTGD.device.type == "cpu"
        o_BSHD = flash_attn_with_kvcache(
            q_BSHD,
            k_BTGD,
            v_BTGD,
            k=k_BSGD,
            v=v_BSGD,
            cache_seqlens=self.length if on_cpu else self.seqlens_B,
            causal=True,
            window_size=window_size,
        )
        assert isinstance(o_BSHD, torch.Tensor)
        return o_BSHD

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens
        self.seqlens_B += num_tokens

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        if not 0 <= length <= self.length:
            raise bad_value(
                "cache", "length", f"lie in 0 .. {self.length}", length, "keep what is there"
            )
        self.length = length
        self.seqlens_B.fill_(length)

    def num_bytes(self) -> int:
        """Bytes that the tensors take."""
        return 2 * self.k_LBTGD.numel() * self.k_LBTGD.element_size()
