"""What the forward over caches is given, where a sequence lies in it, and what it hides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ridgeline.kernels.attention.cute.blocks import BlockRange
from ridgeline.kernels.attention.cute.mask import (
    MINUS_INFINITY,
    accumulator_column,
    accumulator_row,
)
from ridgeline.kernels.attention.cute.pipeline import Ring


@dataclass(frozen=True)
class Scalars:
    """Arguments of a launch that are numbers."""

    softmax_scale: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    num_splits: Int32
    row_tiles: Int32
    """Tiles of packed rows of the longest sequence."""


@dataclass(frozen=True)
class Sequence:
    """One sequence: where its rows begin, and its lengths."""

    offset_q: Any
    offset_k: Any
    stored_q: Any
    """Query rows it has in memory."""
    seqlen_q: Any
    """Query rows that are used, the first of those."""
    seqlen_k: Any
    leftpad: Any
    """First key that exists, or None."""
    kv_row: Any
    """Row of a dense K and V."""


@dataclass(frozen=True)
class Places:
    """Reads sequences; the optional tensors (int32, one entry a sequence) are None where the call
    has none."""

    capacity_q: Any
    """Rows of a dense call's queries."""
    capacity_k: Any
    """Keys that a sequence of a dense call, or its pages, can have."""
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    """None also where keys are in pages: seqused_k has their lengths."""
    seqused_q: Any
    seqused_k: Any
    leftpad_k: Any
    kv_rows: Any

    @cute.jit
    def sequence(self, batch: Int32) -> Sequence:
        offset_q, offset_k, kv_row = Int32(0), Int32(0), batch
        stored_q, seqlen_k = Int32(self.capacity_q), Int32(self.capacity_k)
        if cutlass.const_expr(self.cu_seqlens_q is not None):
            offset_q = self.cu_seqlens_q[batch]
            stored_q = self.cu_seqlens_q[batch + 1] - offset_q
        if cutlass.const_expr(self.cu_seqlens_k is not None):
            offset_k = self.cu_seqlens_k[batch]
            seqlen_k = self.cu_seqlens_k[batch + 1] - offset_k
        seqlen_q = stored_q
        if cutlass.const_expr(self.seqused_q is not None):
            seqlen_q = cutlass.min(stored_q, self.seqused_q[batch])
            seqlen_k = cutlass.min(seqlen_k, self.seqused_k[batch])
        leftpad = None
        if cutlass.const_expr(self.leftpad_k is not None):
            leftpad = cutlass.min(cutlass.max(self.leftpad_k[batch], 0), seqlen_k)
        if cutlass.const_expr(self.kv_rows is not None):
            kv_row = self.kv_rows[batch]
        return Sequence(offset_q, offset_k, stored_q, seqlen_q, seqlen_k, leftpad, kv_row)


@dataclass(frozen=True)
class Globals:
    """Tensors of a launch, as TMA coordinates where TMA moves them; packed q, o and LSE (and k and
    v without pages) have no B mode."""

    mQ: cute.Tensor
    """[S, D, H, B], an ordinary tensor"""
    mK: cute.Tensor
    """[T, D, G, rows], or [W, D, G, pages]"""
    mV: cute.Tensor
    """[V, T, G, rows], or [V, W, G, pages]"""
    mO: cute.Tensor
    """[S, V, H, B], an ordinary tensor"""
    mLSE: cute.Tensor
    """[S, H, B]"""
    mPart: Any
    """fp32 [B * S, H, splits, V] or None"""
    mPartLSE: Any
    """fp32 [B * S, H, splits] or None"""
    mSinks: Any
    """fp32 [H] or None"""
    mPages: Any
    """int32 [B, U] or None"""
    places: Places
    num_batches: Int32
    tma_k: cute.CopyAtom
    tma_v: cute.CopyAtom


@dataclass(frozen=True)
class Shared:
    """Shared memory of a block of threads."""

    sQ: cute.Tensor
    """[64, D, warpgroups]"""
    sK: cute.Tensor
    """[N, D, stages]"""
    sV: cute.Tensor
    """[V, N, stages]"""
    k_ring: Ring
    v_ring: Ring


@dataclass(frozen=True)
class Tile:
    """What a block of threads works on: packed rows of one key/value head, one part of its keys."""

    first: Any
    """The first packed row."""
    kv_head: Any
    batch: Any
    split: Any
    group: Any
    """Query heads that share a key/value head."""
    sequence: Sequence
    blocks: BlockRange
    """Of keys; must not be read where nothing is to be computed."""
    computes: Any
    """Whether any row is used and the part has blocks."""


@dataclass(frozen=True)
class PackedMask:
    """The limits of one tile for one thread, as mask.Mask's; its two rows are any two queries."""

    queries: tuple[Any, Any]
    """Of the thread's two rows."""
    lane_column: Int32
    """2 * (lane % 4)."""
    seqlen_k: Int32
    first_key: Any
    """leftpad, or None."""
    shift: Int32
    """T - S."""
    left: Any
    right: Any

    @cute.jit
    def apply(self, scores: cute.Tensor, block_start: Int32):
        """Set hidden scores to -inf. scores: flat accumulator of one thread."""
        first_column = block_start + self.lane_column
        for r in cutlass.range_constexpr(2):
            diagonal = self.queries[r] + self.shift - first_column
            end = self.seqlen_k - first_column
            if cutlass.const_expr(self.right is not None):
                end = cutlass.min(end, diagonal + self.right + 1)
            begin = Int32(0)
            if cutlass.const_expr(self.left is not None):
                begin = diagonal - self.left
            if cutlass.const_expr(self.first_key is not None):
                begin = cutlass.max(begin, self.first_key - first_column)
            for e in cutlass.range_constexpr(cute.size(scores)):
                if cutlass.const_expr(accumulator_row(e) == r):
                    column = accumulator_column(e)
                    hidden = end <= column
                    if cutlass.const_expr(self.left is not None):
                        hidden = hidden | (begin > column)
                    scores[e] = cutlass.select_(hidden, Float32(MINUS_INFINITY), scores[e])
