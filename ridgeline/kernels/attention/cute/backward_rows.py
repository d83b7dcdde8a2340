"""The backward's two small kernels: what it needs of each query row, and dQ's last step.

    before: delta = rowsum(dO * O) - dLSE and -LSE log2(e), a tile of `block_q` rows together, so
            that one bulk copy brings both; fp32 dQ = 0
    after:  dQ = softmax_scale * fp32 dQ, rounded, from the order in which WGMMA's accumulators lie

Bound by bytes: O, dO and dQ once in 16 bits, dQ twice in 32.

A tile of fp32 dQ [block_q, D] is kept as its warpgroup's threads hold it: element e of thread t at
(e / 4) * 512 + 4 t + e % 4, so that each instruction of a warp adds 512 bytes in a row. The 16
words of four neighbouring lanes are then 8 columns of the rows r and r + 8.

Tiles of a dense call: batch * blocks + block. Packed: cu_seqlens[b] / block_q + b + block, which
keeps sequences apart, since floor(a) + floor(b) <= floor(a + b).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ridgeline.kernels.attention.cute.blocks import narrowed, sampled
from ridgeline.kernels.attention.cute.forward import DeviceInteger
from ridgeline.kernels.attention.cute.mainloop import DTYPES
from ridgeline.kernels.attention.cute.mask import MINUS_INFINITY
from ridgeline.kernels.attention.cute.seqlens import Extent, Lengths, tokens_of
from ridgeline.kernels.attention.cute.softmax import LOG2_E
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    BackwardConfig,
    BackwardTraits,
    is_overlapped,
    is_zeroing,
    keys_per_block,
)
from ridgeline.kernels.attention.cute_sm90_roles_config import RolesConfig

THREADS = 256
VECTOR = 8
"""16-bit elements of a 16-byte access."""


@dataclass(frozen=True)
class Tiles:
    """Where the rows of a call lie in its buffers of tiles."""

    lengths: Lengths
    num_blocks: Any
    """Blocks of queries of the longest sequence."""
    num_batches: Any
    """Of packed sequences."""
    order: Any = None
    """`blocks.KeyOrder` where blocks of keys are numbered by it."""

    def first(self, extent: Extent, batch: Any, block_q: int) -> Any:
        """The first tile of a sequence."""
        if self.lengths.cu_seqlens_q is not None:
            return extent.offset_q // block_q + batch
        return batch * self.num_blocks

    @cute.jit
    def place(self, block: Int32, batch: Int32, block_q: cutlass.Constexpr[int]):
        """(block, batch) of a block of threads: packed sequences have as many as they have tiles,
        and at most one more each, not as many as the longest."""
        if cutlass.const_expr(self.lengths.cu_seqlens_q is not None):
            starts = self.lengths.cu_seqlens_q
            batch = packed_sequence(starts, self.num_batches, block_q, block)
            block -= starts[batch] // block_q + batch
        return block, batch


class Rows:
    """Both kernels for one (traits, config)."""

    def __init__(self, traits: BackwardTraits, config: BackwardConfig | RolesConfig):
        self.traits = traits
        self.block_q = config.block_q
        self.dtype = DTYPES[traits.dtype]
        self.overlapped = is_overlapped(config)
        self.block_k, self.zeroing = keys_per_block(config), is_zeroing(config)

    @cute.kernel
    def before(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor,
        has_dlse: Int32,
        statistics: cute.Tensor,
        dq_sum: cute.Tensor,
        turns,
        tiles: Tiles,
        rest,
    ):
        """mO, mdO [S, V, H, B]; mLSE, mdLSE [S, H, B]; statistics [tiles, H, 2 block_q]; rest: dq,
        dk and dv of packed sequences, whose rows behind the last are cleared."""
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        block, batch = tiles.place(block, batch, self.block_q)
        if cutlass.const_expr(self.overlapped):
            cute.arch.griddepcontrol_launch_dependents()
        extent = tiles.lengths.extent(batch)
        if block * self.block_q < extent.seqlen_q:
            tile = tiles.first(extent, batch, self.block_q) + block
            packed = self.traits.varlen
            gO = tokens_of(mO, head, batch, extent.offset_q, packed)
            gdO = tokens_of(mdO, head, batch, extent.offset_q, packed)
            lanes = _lanes(self.traits.head_dim_v)
            lane, row_in_pass = thread % lanes, thread // lanes
            rows = THREADS // lanes
            for p in cutlass.range_constexpr((self.block_q + rows - 1) // rows):
                row = p * rows + row_in_pass
                query = block * self.block_q + row
                total = Float32(0.0)
                if (query < extent.seqlen_q) & (lane * VECTOR < mO.shape[1]):
                    total = _dot(gO, gdO, query, lane)
                for step in cutlass.range_constexpr(lanes.bit_length() - 1):
                    total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
                if (lane == 0) & (row < self.block_q):
                    minus_lse = Float32(MINUS_INFINITY)
                    if query < extent.seqlen_q:
                        token = _row_of(extent, query, packed)
                        lse = _row_value(mLSE, token, head, batch, packed)
                        dead = lse == MINUS_INFINITY
                        minus_lse = cutlass.select_(
                            dead, Float32(MINUS_INFINITY), -lse * Float32(LOG2_E)
                        )
                        if has_dlse != 0:
                            total -= _row_value(mdLSE, token, head, batch, packed)
                    statistics[tile, head, row] = minus_lse
                    statistics[tile, head, self.block_q + row] = total
            if cutlass.const_expr(turns is not None):
                if thread == 0:
                    turns[tile, head, 0] = Int32(0)
                    if (tile == 0) & (head == 0):  # the queue of persistent blocks
                        turns[turns.shape[0] - 1, 0, 0] = Int32(0)
            if cutlass.const_expr(self.zeroing):
                # What the main kernel does not zero.
                order, parts = tiles.order, self.block_k // self.block_q
                kv_head = head * order.num_heads // mO.shape[2]
                if order.zeroed_before(block // parts, kv_head, batch, DeviceInteger):
                    clear(dq_sum[tile, head, None], thread, THREADS)
            else:
                clear(dq_sum[tile, head, None], thread, THREADS)
        if cutlass.const_expr(rest is not None):
            # Last: what it reads would else be waited for before the rows are asked for.
            blocks, heads, _ = cute.arch.grid_dim()
            index, _, _ = cute.arch.block_idx()
            worker, workers = (index * heads + head) * THREADS + thread, blocks * heads * THREADS
            starts = tiles.lengths.cu_seqlens_q, tiles.lengths.cu_seqlens_k
            dq, dk, dv = rest
            for tensor, ends in ((dq, starts[0]), (dk, starts[1]), (dv, starts[1])):
                clear_rest(tensor, ends[tiles.num_batches], worker, workers)

    @cute.kernel
    def after(self, dq_sum: cute.Tensor, mdQ: cute.Tensor, scale: Float32, tiles: Tiles):
        """mdQ [S, D, H, B]; dq_sum [tiles, H, block_q * D]."""
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        blocks, heads, batches = cute.arch.grid_dim()
        # What was added last comes first: it is still in L2.
        block, head, batch = blocks - 1 - block, heads - 1 - head, batches - 1 - batch
        block, batch = tiles.place(block, batch, self.block_q)
        extent = tiles.lengths.extent(batch)
        if cutlass.const_expr(self.overlapped):
            cute.arch.griddepcontrol_wait()
        if block * self.block_q < extent.seqlen_q:
            tile = tiles.first(extent, batch, self.block_q) + block
            gdQ = tokens_of(mdQ, head, batch, extent.offset_q, self.traits.varlen)
            columns = self.traits.head_dim // VECTOR
            sums = dq_sum[tile, head, None]
            for chunk in cutlass.range(thread, self.block_q // 2 * columns, THREADS, unroll=1):
                quad, column = chunk // columns, chunk % columns
                atom, quad_in_atom = quad // 32, quad % 32
                words = cute.make_rmem_tensor(cute.make_layout(16), Float32)
                start = (atom * columns + column) * 512 + quad_in_atom * 16
                cute.autovec_copy(_run(sums, start, 16), words)
                row = atom * 64 + quad_in_atom // 8 * 16 + quad_in_atom % 8
                for half in cutlass.range_constexpr(2):
                    query = block * self.block_q + row + 8 * half
                    if (query < extent.seqlen_q) & (column * VECTOR < mdQ.shape[1]):
                        narrow = cute.make_rmem_tensor(cute.make_layout(VECTOR), self.dtype)
                        for e in cutlass.range_constexpr(VECTOR):
                            word = words[e // 2 * 4 + 2 * half + e % 2]
                            narrow[e] = (word * scale).to(self.dtype)
                        target = _run(gdQ[query, None], column * VECTOR, VECTOR)
                        cute.autovec_copy(narrow, target)


@cute.jit
def packed_sequence(starts: cute.Tensor, num_batches, rows: cutlass.Constexpr[int], number: Int32):
    """The sequence that a tile of `rows` rows belongs to. Sequence b has those from starts[b] //
    rows + b on, so at most one between two is nobody's. A whole warp calls it and looks at 32
    sequences at a time: to 32 that is one trip to memory, where bisection takes five."""
    low, high = Int32(0), Int32(num_batches)
    while high - low > 1:
        mine = sampled(low, high, cute.arch.lane_idx(), DeviceInteger)
        begun = cute.arch.vote_ballot_sync(starts[mine] // rows + mine <= number)
        low, high = narrowed(low, high, cute.arch.popc(begun), DeviceInteger)
    return low


@cute.jit
def clear_rest(tensor: cute.Tensor, begin: Int32, worker: Int32, workers: Int32):
    """Zeros from row `begin` on of a contiguous [rows, heads, dim], some by each worker."""
    rows, heads, dim = tensor.shape
    zeros = cute.make_rmem_tensor(cute.make_layout(VECTOR), tensor.element_type)
    zeros.fill(0.0)
    pieces = dim // VECTOR
    for i in cutlass.range(worker, (rows - begin) * heads * pieces, workers, unroll=1):
        line = i // pieces
        row = tensor[begin + line // heads, line % heads, None]
        cute.autovec_copy(zeros, _run(row, (i - line * pieces) * VECTOR, VECTOR))


def _lanes(head_dim: int) -> int:
    """Threads that share a row: a power of two."""
    lanes = 1
    while lanes * VECTOR < head_dim:
        lanes *= 2
    return lanes


def _run(tensor: cute.Tensor, start, length: int) -> cute.Tensor:
    """`length` neighbours of a contiguous tensor; start is a multiple of length."""
    return cute.local_tile(tensor, (length,), (start // length,))


@cute.jit
def _dot(gO: cute.Tensor, gdO: cute.Tensor, query: Int32, lane: Int32) -> Float32:
    """This lane's part of a row's product."""
    a = cute.make_rmem_tensor(cute.make_layout(VECTOR), gO.element_type)
    b = cute.make_rmem_tensor(cute.make_layout(VECTOR), gO.element_type)
    cute.autovec_copy(_run(gO[query, None], lane * VECTOR, VECTOR), a)
    cute.autovec_copy(_run(gdO[query, None], lane * VECTOR, VECTOR), b)
    total = Float32(0.0)
    for e in cutlass.range_constexpr(VECTOR):
        total += a[e].to(Float32) * b[e].to(Float32)
    return total


def _row_of(extent: Extent, query, packed: bool):
    return extent.offset_q + query if packed else query


def _row_value(tensor: cute.Tensor, token, head, batch, packed: bool):
    """A value of a row from [tokens, heads(, batch)]."""
    return tensor[token, head] if packed else tensor[token, head, batch]


@cute.jit
def clear(tensor: cute.Tensor, thread: Int32, threads: cutlass.Constexpr[int]):
    """Zeros by some threads, 16 bytes a store."""
    zeros = cute.make_rmem_tensor(cute.make_layout(4), Float32)
    zeros.fill(0.0)
    for i in cutlass.range(thread, cute.size(tensor) // 4, threads, unroll=1):
        cute.autovec_copy(zeros, _run(tensor, i * 4, 4))
