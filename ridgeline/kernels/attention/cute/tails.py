"""Rows behind the end of a sequence that does not fill its tile.

TMA knows only the tensor's end: behind a packed or shortened sequence's it brings what follows in
memory, perhaps NaN, and it would store there. So such rows are zeroed before a product reads them,
as 0 * NaN is NaN, and the last rows go out one by one.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ridgeline.kernels.attention.cute.mask import accumulator_column, accumulator_row
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS


@cute.jit
def clear_rows(tile: cute.Tensor, first_row: Int32, length: Int32, barrier: Any):
    """Zero the rows of a tile [rows, D] from `length` on; first_row is the tile's first. Every
    warpgroup that reads the tile writes the same zeros first; barrier: the one of its threads."""
    rows, dim = cute.size(tile, mode=[0]), cute.size(tile, mode=[1])
    if first_row + rows > length:
        kept = cutlass.max(length - first_row, 0)
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        for i in cutlass.range(thread, (rows - kept) * dim, WARPGROUP_THREADS, unroll=1):
            tile[kept + i // dim, i % dim] = tile.element_type(0.0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def store_rows(output: cute.Tensor, rows: cute.Tensor, first_row: Int32, length: Int32):
    """A warpgroup's accumulator [64, D], flat, to the rows [T, D] below `length`, from registers;
    first_row is the accumulator's first."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    first = first_row + thread // 32 * 16 + thread % 32 // 4
    for e in cutlass.range_constexpr(cute.size(output)):
        row = first + 8 * accumulator_row(e)
        column = 2 * (thread % 4) + accumulator_column(e)
        if (row < length) & (column < rows.shape[1]):
            rows[row, column] = output[e].to(rows.element_type)
