"""Joins the parts of split keys, in the order of the splits, so that results are repeatable.

    O = sum_s w_s O_s / sum_s w_s ; w_s = exp(LSE_s - m) ; m = max_s LSE_s

A warp a query row and head. Bytes: the parts once, in fp32. Source: Flash-Decoding.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ridgeline.kernels.attention.cute import ptx
from ridgeline.kernels.attention.cute.mainloop import DTYPES
from ridgeline.kernels.attention.cute.mask import MINUS_INFINITY
from ridgeline.kernels.attention.cute.softmax import LN2, LOG2_E
from ridgeline.kernels.attention.cute_sm90_cached_config import CachedTraits

WARPS = 4
LANES = 32
VECTOR = 4
"""fp32 of a 16-byte access."""


class Merge:
    """The kernel for one set of traits."""

    def __init__(self, traits: CachedTraits):
        self.traits = traits
        self.dtype = DTYPES[traits.dtype]
        self.chunks = (traits.head_dim_v + LANES * VECTOR - 1) // (LANES * VECTOR)

    @cute.kernel
    def kernel(
        self,
        mPart: cute.Tensor,
        mPartLSE: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        cu_seqlens_q: Any,
        num_batches: Int32,
        num_splits: Int32,
    ):
        """mPart [rows, H, splits, V], mPartLSE [rows, H, splits], mO [S, V, H, B], mLSE [S, H, B];
        rows = B S. Grid: one block for each WARPS of rows times heads."""
        block, _, _ = cute.arch.block_idx()
        heads = mPart.shape[1]
        index = block * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if index < mPart.shape[0] * heads:
            row = index // heads
            head = index - row * heads
            batch = Int32(0)
            used = num_splits
            if cutlass.const_expr(self.traits.varlen):
                # Rows behind the last sequence were written by nobody.
                used = cutlass.select_(row < cu_seqlens_q[num_batches], num_splits, Int32(0))
                gO, gLSE = mO[row, None, head], mLSE[None, head]
            else:
                batch = row // mO.shape[0]
                gO = mO[row - batch * mO.shape[0], None, head, batch]
                gLSE = mLSE[None, head, batch]
            total, top, sums = self._sum(
                mPart[row, head, None, None], mPartLSE[row, head, None], used
            )
            inverse = cutlass.select_(total == 0.0, Float32(0.0), ptx.reciprocal(total))
            lane = cute.arch.lane_idx()
            for c in cutlass.range_constexpr(self.chunks):
                column = (c * LANES + lane) * VECTOR
                if column < mO.shape[1]:
                    narrow = cute.make_rmem_tensor(cute.make_layout(VECTOR), self.dtype)
                    for e in cutlass.range_constexpr(VECTOR):
                        narrow[e] = (sums[c * VECTOR + e] * inverse).to(self.dtype)
                    target = cute.local_tile(gO, (VECTOR,), (c * LANES + lane,))
                    cute.autovec_copy(narrow, target)
            if lane == 0:
                lse = (top * LOG2_E + ptx.log2(total)) * LN2
                lse = cutlass.select_(total == 0.0, Float32(MINUS_INFINITY), lse)
                gLSE[row - batch * mLSE.shape[0]] = lse

    @cute.jit
    def _sum(self, gPart: cute.Tensor, gLSE: cute.Tensor, num_splits: Int32):
        """(sum of weights, largest LSE or 0, weighted sums of this lane's columns)."""
        lane = cute.arch.lane_idx()
        top = Float32(MINUS_INFINITY)
        for s in cutlass.range(lane, num_splits, LANES, unroll=1):
            top = cute.arch.fmax(top, gLSE[s])
        for step in cutlass.range_constexpr(5):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << step))
        top = cutlass.select_(top == MINUS_INFINITY, Float32(0.0), top)
        sums = cute.make_rmem_tensor(cute.make_layout(self.chunks * VECTOR), Float32)
        sums.fill(0.0)
        total = Float32(0.0)
        for s in cutlass.range(num_splits, unroll=1):
            lse = gLSE[s]
            # A part that saw no key has written no O.
            if lse != MINUS_INFINITY:
                weight = ptx.exp2((lse - top) * LOG2_E)
                total += weight
                for c in cutlass.range_constexpr(self.chunks):
                    if (c * LANES + lane) * VECTOR < gPart.shape[1]:
                        part = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
                        run = cute.local_tile(gPart[s, None], (VECTOR,), (c * LANES + lane,))
                        cute.autovec_copy(run, part)
                        for e in cutlass.range_constexpr(VECTOR):
                            sums[c * VECTOR + e] = ptx.fma(part[e], weight, sums[c * VECTOR + e])
        return total, top, sums
