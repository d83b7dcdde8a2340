"""Results of a token that do not depend on what is computed beside it, to the last bit.

A matmul of another height adds in another order, and in 16 bits that flips roundings: the same
tokens in other company get other log-probabilities. Here every product has the same number of rows
(padded), and every query attends alone over its own keys, with the keys never split:

    y = [W x_tile] over tiles of R rows          R = 1 on a CPU, 64 on a GPU
    o_t = attention(q_t, k_<=t, v_<=t)           on a GPU 64 queries a call, over pages of keys

What the engine does in batch-invariant mode, done to a trainer's model, so that both round at the
same places. It reads the weights once for each tile: for checking and for scores, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ridgeline.core.dtypes import dtype_name
from ridgeline.kernels.attention import flash_attn_func, flash_attn_with_kvcache
from ridgeline.kernels.attention.dispatch import arch_of, keys_of_tile
from ridgeline.kernels.attention.problem import AttentionProblem
from ridgeline.nn.config import DecoderConfig

ROWS = {"cpu": 1, "cuda": 64}
"""Rows of a matmul, and queries of a call on a GPU: always so many, so always the same kernel."""
CPU_PAGE_TOKENS = 16
LEAST_PAGE_TOKENS = 16


def in_tiles(x_PK: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """product(x) of [P, K], so many rows at a time, the last tile padded with zeros."""
    rows, count = ROWS[x_PK.device.type], x_PK.shape[0]
    padded = F.pad(x_PK, (0, 0, 0, -count % rows))
    return torch.cat([product(tile) for tile in padded.split(rows)])[:count]


class FixedRows(TorchFunctionMode):
    """While it is entered, every linear is computed in tiles."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        x, *rest = args
        flat = in_tiles(x.flatten(0, -2), lambda tile: F.linear(tile, *rest, **(kwargs or {})))
        return flat.unflatten(0, x.shape[:-1])


class LoneQueries:
    """Causal attention of one sequence (nn.layers.Attend), each query by itself."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, max_len: int) -> None:
        self._config, self._dtype, self._max_len = config, dtype, max_len

    def __call__(
        self,
        q_BSHD: torch.Tensor,
        k_BSGD: torch.Tensor,
        v_BSGD: torch.Tensor,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        attend = self._on_gpu if q_BSHD.is_cuda else self._on_cpu
        return attend(q_BSHD[0], k_BSGD[0], v_BSGD[0], window_size)[None]

    def _on_cpu(
        self, q_SHD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, window: tuple[int, int]
    ) -> torch.Tensor:
        rows: list[torch.Tensor] = []
        for t in range(len(q_SHD)):
            keys, values = k_SGD[None, : t + 1], v_SGD[None, : t + 1]
            out = flash_attn_func(
                q_SHD[None, t : t + 1], keys, values, causal=True, window_size=window
            )
            assert isinstance(out, torch.Tensor)
            rows.append(out[0])
        return torch.cat(rows)

    def _on_gpu(
        self, q_SHD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, window: tuple[int, int]
    ) -> torch.Tensor:
        count, device = len(q_SHD), q_SHD.device
        size = page_tokens_of(self._config, self._dtype, device)
        width = -(-self._max_len // size)
        k_pages, v_pages = (_paged(x, size, width) for x in (k_SGD, v_SGD))
        rows = ROWS[device.type]
        table_BU = torch.arange(width, dtype=torch.int32, device=device).expand(rows, width)
        padded = F.pad(q_SHD, (0, 0, 0, 0, 0, -count % rows))
        lengths = torch.arange(1, len(padded) + 1, dtype=torch.int32, device=device)
        lengths[count:] = 1
        parts: list[torch.Tensor] = []
        for q, ends in zip(padded.split(rows), lengths.split(rows), strict=True):
            out = flash_attn_with_kvcache(
                q[:, None],
                k_pages,
                v_pages,
                cache_seqlens=ends,
                block_table=table_BU.contiguous(),
                causal=True,
                window_size=window,
                num_splits=1,
            )
            assert isinstance(out, torch.Tensor)
            parts.append(out[:, 0])
        return torch.cat(parts)[:count]


def _paged(x_SGD: torch.Tensor, page_tokens: int, width: int) -> torch.Tensor:
    """[U, W, G, D], zeros behind the last token."""
    missing = width * page_tokens - len(x_SGD)
    return F.pad(x_SGD, (0, 0, 0, 0, 0, missing)).unflatten(0, (width, page_tokens))


def page_tokens_of(shape: DecoderConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Page size that the attention implementation of a decode step likes: its tile of keys, so that
    a tile never leaves its page; on a CPU small pages, which share more."""
    if device.type == "cpu":
        return CPU_PAGE_TOKENS
    problem = AttentionProblem(
        batch=1,
        seqlen_q=1,
        seqlen_k=shape.max_seqlen,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim,
        dtype=dtype_name(dtype),
        causal=True,
        seqused=True,
        page_size=128,
        kv_cache=True,
    )
    return max(LEAST_PAGE_TOKENS, keys_of_tile(problem, arch_of(device)) or 0)
