"""Where a sequence lies and how long it is: the same for every tile, or read per sequence.

Dense calls: every sequence has S queries and T keys, in its own row of the batch. Packed calls:
sequence b is rows cu_seqlens[b] .. cu_seqlens[b + 1] of one long tensor. seqused shortens the
sequences of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class Extent:
    """One sequence: first rows in the packed tensors (0 when dense) and lengths."""

    offset_q: Any
    offset_k: Any
    seqlen_q: Any
    seqlen_k: Any


@dataclass(frozen=True)
class Lengths:
    """Reads extents; the optional tensors are None where the call has none."""

    seqlen_q: Any
    """S of a dense call."""
    seqlen_k: Any
    cu_seqlens_q: Any
    """int32 [B + 1] or None"""
    cu_seqlens_k: Any
    seqused_k: Any
    """int32 [B] or None"""
    seqused_q: Any = None
    """int32 [B] or None"""

    @cute.jit
    def extent(self, batch: Int32) -> Extent:
        offset_q, offset_k = Int32(0), Int32(0)
        seqlen_q, seqlen_k = Int32(self.seqlen_q), Int32(self.seqlen_k)
        if cutlass.const_expr(self.cu_seqlens_q is not None):
            offset_q = self.cu_seqlens_q[batch]
            seqlen_q = self.cu_seqlens_q[batch + 1] - offset_q
        if cutlass.const_expr(self.cu_seqlens_k is not None):
            offset_k = self.cu_seqlens_k[batch]
            seqlen_k = self.cu_seqlens_k[batch + 1] - offset_k
        if cutlass.const_expr(self.seqused_k is not None):
            seqlen_k = cutlass.min(seqlen_k, self.seqused_k[batch])
        if cutlass.const_expr(self.seqused_q is not None):
            seqlen_q = cutlass.min(seqlen_q, self.seqused_q[batch])
        return Extent(offset_q=offset_q, offset_k=offset_k, seqlen_q=seqlen_q, seqlen_k=seqlen_k)

    @cute.jit
    def num_blocks(self, batch: Int32, rows: cutlass.Constexpr[int]) -> Int32:
        """Tiles of `rows` queries that a packed sequence needs."""
        length = self.cu_seqlens_q[batch + 1] - self.cu_seqlens_q[batch]
        return (length + rows - 1) // rows


def tokens_of(tensor: cute.Tensor, head: Int32, batch: Int32, offset: Int32, packed: bool):
    """[tokens, dim] of one head and sequence, from [tokens, dim, heads(, batch)]."""
    if packed:
        return cute.domain_offset((offset, 0), tensor[None, None, head])
    return tensor[None, None, head, batch]


def columns_of(tensor: cute.Tensor, head: Int32, batch: Int32, offset: Int32, packed: bool):
    """[dim, tokens] of one head and sequence, from [dim, tokens, heads(, batch)]."""
    if packed:
        return cute.domain_offset((0, offset), tensor[None, None, head])
    return tensor[None, None, head, batch]
