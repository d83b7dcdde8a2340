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
from cutlass.cute.nvgpu import warp

from ridgeline.kernels.attention.cute.mainloop import flat
from ridgeline.kernels.attention.cute.mask import accumulator_column, accumulator_row
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS
from ridgeline.kernels.attention.cute.softmax import pack_operand

STRIPE = 16
"""Rows of a warp in an accumulator."""
VECTOR = 8
"""16-bit elements of a 16-byte access."""


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
def store_stripe(mma, values: cute.Tensor, stage: cute.Tensor, target: tuple):
    """The same by each warp for its 16 rows, 16 bytes a lane: through its own rows of shared memory
    [64, D], transposed by stmatrix. target: rows [T, D], the accumulator's first, T."""
    rows, first_row, length = target
    dtype, dim = stage.element_type, cute.size(stage, mode=[1])
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
    copy = cute.make_tiled_copy_C(store, mma).get_slice(thread)
    narrow = cute.make_rmem_tensor(values.shape, dtype)
    pack_operand(flat(values), flat(cute.recast_tensor(narrow, Int32)), dtype)
    cute.copy(store, copy.retile(narrow), copy.partition_D(stage))
    cute.arch.sync_warp()
    lanes = 8 if dim % 64 == 0 else 4
    read = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128)
    by_row = cute.make_layout((32 // lanes, lanes), stride=(lanes, 1))
    pieces = cute.make_tiled_copy_tv(read, by_row, cute.make_layout((1, VECTOR)))
    stripe = cute.local_tile(stage, (STRIPE, dim), (thread // 32, 0))
    lane = cute.arch.lane_idx()
    source = pieces.get_slice(lane).partition_S(stripe)
    words = cute.make_rmem_tensor_like(source)
    cute.copy(read, source, words)
    for i in cutlass.range_constexpr(STRIPE * lanes // 32):
        row = first_row + thread // 32 * STRIPE + i * (32 // lanes) + lane // lanes
        for j in cutlass.range_constexpr(dim // (VECTOR * lanes)):
            column = j * lanes + lane % lanes
            if (row < length) & (column * VECTOR < rows.shape[1]):
                piece = cute.local_tile(rows[row, None], (VECTOR,), (column,))
                cute.autovec_copy(words[None, i, j], piece)
    cute.arch.sync_warp()
