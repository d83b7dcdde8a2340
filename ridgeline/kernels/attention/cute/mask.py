"""Hiding keys beyond the sequence, the diagonal or the window, on a WGMMA accumulator.

Element e of a thread's accumulator [64, N] lies in row (lane // 4 + 8 * ((e // 2) % 2)) of its
warp's 16, and in column 2 * (lane % 4) + e % 2 + 8 * (e // 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS

MINUS_INFINITY = float("-inf")


def accumulator_row(element: int) -> int:
    """Which of a thread's two rows an accumulator element lies in."""
    return (element // 2) % 2


def accumulator_column(element: int) -> int:
    """Column of an accumulator element, before the lane's own offset."""
    return element % 2 + 8 * (element // 4)


@dataclass(frozen=True)
class Mask:
    """The limits of one tile for one thread; sides that are None are not compiled in."""

    row: Int32
    """The thread's first query row; its second is 8 further down."""
    lane_column: Int32
    """2 * (lane % 4)."""
    seqlen_k: Int32
    shift: Int32
    """T - S."""
    left: Any
    right: Any

    @cute.jit
    def apply(self, scores: cute.Tensor, block_start: Int32):
        """Set hidden scores to -inf. scores: flat accumulator of one thread."""
        first_column = block_start + self.lane_column
        for r in cutlass.range_constexpr(2):
            diagonal = self.row + 8 * r + self.shift - first_column
            end = self.seqlen_k - first_column
            if cutlass.const_expr(self.right is not None):
                end = cutlass.min(end, diagonal + self.right + 1)
            begin = Int32(0)
            if cutlass.const_expr(self.left is not None):
                begin = diagonal - self.left
            for e in cutlass.range_constexpr(cute.size(scores)):
                if cutlass.const_expr(accumulator_row(e) == r):
                    column = accumulator_column(e)
                    hidden = end <= column
                    if cutlass.const_expr(self.left is not None):
                        hidden = hidden | (begin > column)
                    scores[e] = cutlass.select_(hidden, Float32(MINUS_INFINITY), scores[e])


@dataclass(frozen=True)
class TransposedMask:
    """The same limits for S^T [64 keys, M queries]: a thread's rows are keys."""

    key: Int32
    """The thread's first key; its second is 8 further down."""
    lane_column: Int32
    """2 * (lane % 4)."""
    seqlen_k: Int32
    shift: Int32
    """T - S."""
    left: Any
    right: Any

    @cute.jit
    def apply(self, scores: cute.Tensor, block_start: Int32):
        """Set hidden scores to -inf. scores: flat accumulator of one thread. Keys behind the
        sequence too: their zeros times an overflowing P would be NaN."""
        first_column = block_start + self.lane_column
        for r in cutlass.range_constexpr(2):
            key = self.key + 8 * r
            diagonal = key - self.shift - first_column
            begin = Int32(0)
            if cutlass.const_expr(self.right is not None):
                begin = diagonal - self.right
            begin = cutlass.select_(key < self.seqlen_k, begin, Int32(1 << 30))
            for e in cutlass.range_constexpr(cute.size(scores)):
                if cutlass.const_expr(accumulator_row(e) == r):
                    column = accumulator_column(e)
                    hidden = begin > column
                    if cutlass.const_expr(self.left is not None):
                        hidden = hidden | (diagonal + self.left < column)
                    scores[e] = cutlass.select_(hidden, Float32(MINUS_INFINITY), scores[e])


@cute.jit
def transposed_mask(traits: Any, scalars: Any, first_key: Int32, extent: Any) -> TransposedMask:
    """A warpgroup's, of 64 keys from first_key on; scalars hold the window."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    return TransposedMask(
        key=first_key + thread // 32 * 16 + thread % 32 // 4,
        lane_column=2 * (thread % 4),
        seqlen_k=extent.seqlen_k,
        shift=extent.seqlen_k - extent.seqlen_q,
        left=scalars.window_left if traits.has_left else None,
        right=scalars.window_right if traits.has_right else None,
    )
