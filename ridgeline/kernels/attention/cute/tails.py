"""Rows behind the end of a sequence that does not fill its tile.

TMA knows only the tensor's end: behind a packed or shortened sequence's it brings what follows in
memory, perhaps NaN, and it would store there. So such rows are zeroed before a product reads them,
as 0 * NaN is NaN, and the last rows go out one by one, from registers.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ridgeline.kernels.attention.cute import ptx
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


@cute.jit
def store_quads(output: cute.Tensor, rows: cute.Tensor, first_row: Int32, length: Int32):
    """The same, 16 bytes a store: the four lanes that hold 32 columns of a row between them, two of
    each 8, transpose them first, so that each holds 8 neighbours. D is a multiple of 32."""
    lane = cute.arch.lane_idx() % 4
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    first = first_row + thread // 32 * 16 + thread % 32 // 4
    for half in cutlass.range_constexpr(2):
        row = first + 8 * half
        for group in cutlass.range_constexpr(cute.size(output) // 16):
            four = cute.make_rmem_tensor(cute.make_layout(4), Int32)
            for i in cutlass.range_constexpr(4):
                e = 16 * group + 4 * i + 2 * half
                four[i] = ptx.pack(output[e], output[e + 1], rows.element_type)
            transpose(four, lane)
            column = 8 * (4 * group + lane)
            if (row < length) & (column < rows.shape[1]):
                target = cute.local_tile(rows[row, None], (8,), (4 * group + lane,))
                cute.autovec_copy(cute.recast_tensor(four, rows.element_type), target)


@cute.jit
def transpose(four: cute.Tensor, lane: Int32):
    """Word i of lane j of four neighbouring lanes becomes word j of lane i; lane: 0 to 3."""
    for step in cutlass.range_constexpr(2):
        bit = 1 << step
        upper = (lane & bit) != 0
        for i in cutlass.range_constexpr(4):
            if cutlass.const_expr(i & bit == 0):
                low, high = four[i], four[i + bit]
                sent = cutlass.select_(upper, low, high)
                got = cute.arch.shuffle_sync_bfly(sent, offset=bit)
                four[i] = cutlass.select_(upper, got, low)
                four[i + bit] = cutlass.select_(upper, high, got)
