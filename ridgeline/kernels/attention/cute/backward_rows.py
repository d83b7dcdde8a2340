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
    is_finishing,
    is_measuring,
    is_overlapped,
    is_zeroing,
    keys_per_block,
)
from ridgeline.kernels.attention.cute_sm90_roles_config import RolesConfig

THREADS = 256
VECTOR = 8
"""16-bit elements of a 16-byte access."""
WORDS = 16
"""fp32 words of dQ that a thread rounds at a time: 8 columns of two rows."""


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


@dataclass(frozen=True)
class RowTensors:
    """What the rows' statistics are worked out from, and where dQ goes."""

    mO: cute.Tensor
    """[S, V, H, B]; packed calls have no B mode."""
    mdO: cute.Tensor
    mLSE: cute.Tensor
    """[S, H, B]"""
    mdLSE: cute.Tensor
    has_dlse: Int32
    """Whether mdLSE is read."""
    mdQ: cute.Tensor
    """[S, D, H, B]"""


class Rows:
    """Both kernels for one (traits, config)."""

    def __init__(self, traits: BackwardTraits, config: BackwardConfig | RolesConfig):
        self.traits = traits
        self.block_q = config.block_q
        self.dtype = DTYPES[traits.dtype]
        self.overlapped = is_overlapped(config)
        self.parts = keys_per_block(config) // config.block_q
        self.zeroing = is_zeroing(config)
        self.measuring, self.finishing = is_measuring(config), is_finishing(config)

    @cute.kernel
    def before(
        self, rows: RowTensors, statistics: cute.Tensor, dq_sum: cute.Tensor, turns, tiles: Tiles,
        rest,
    ):  # fmt: skip
        """statistics [tiles, H, 2 block_q]; rest: dq, dk and dv of packed sequences, whose rows
        behind the last are cleared."""
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        block, batch = tiles.place(block, batch, self.block_q)
        if cutlass.const_expr(self.overlapped):
            cute.arch.griddepcontrol_launch_dependents()
        extent = tiles.lengths.extent(batch)
        if block * self.block_q < extent.seqlen_q:
            tile = tiles.first(extent, batch, self.block_q) + block
            mine = Int32(1) == 1
            if cutlass.const_expr(self.zeroing):
                # What the main kernel does not prepare.
                kv_head = head * tiles.order.num_heads // rows.mO.shape[2]
                place = block // self.parts, kv_head, batch
                mine = tiles.order.prepared_before(*place, DeviceInteger)
            if cutlass.const_expr(self.measuring):
                if mine:
                    self._statistics(
                        rows, (head, batch, extent), block, statistics[tile, head, None]
                    )
            else:
                self._statistics(rows, (head, batch, extent), block, statistics[tile, head, None])
            if cutlass.const_expr(turns is not None):
                self._reset_counters(turns, (tile, head), thread)
            if cutlass.const_expr(self.zeroing):
                if mine:
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

    @cute.jit
    def _statistics(self, rows: RowTensors, place: tuple, block: Int32, statistics: cute.Tensor):
        """Of a block's rows, by all threads; place: head, batch, extent."""
        thread, _, _ = cute.arch.thread_idx()
        lanes = row_lanes(self.traits.head_dim_v)
        lane, row_in_pass = thread % lanes, thread // lanes
        at_once = THREADS // lanes
        for p in cutlass.range_constexpr((self.block_q + at_once - 1) // at_once):
            row = p * at_once + row_in_pass
            query = block * self.block_q + row
            row_statistics(
                rows, (*place, self.traits.varlen), query, row < self.block_q, (lane, lanes),
                (statistics, row, self.block_q),
            )  # fmt: skip

    @cute.jit
    def _reset_counters(self, turns: cute.Tensor, place: tuple, thread: Int32):
        """Those of a tile; with the first tile's the queue of persistent blocks, and the words
        between, as a call of one tile has more counters than tiles."""
        tile, head = place
        if thread == 0:
            turns[tile, head, 0] = Int32(0)
            if cutlass.const_expr(self.finishing):
                if tile == 0:
                    turns[turns.shape[0] - 2, head, 0] = Int32(0)
            if (tile == 0) & (head == 0):
                turns[turns.shape[0] - 1, 0, 0] = Int32(0)

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
        mine = block * self.block_q < extent.seqlen_q
        if cutlass.const_expr(self.finishing):
            kv_head = head * tiles.order.num_heads // mdQ.shape[2]
            place = block // self.parts, kv_head, batch
            mine = mine & tiles.order.finished_after(*place, DeviceInteger)
        if mine:
            tile = tiles.first(extent, batch, self.block_q) + block
            gdQ = tokens_of(mdQ, head, batch, extent.offset_q, self.traits.varlen)
            columns = self.traits.head_dim // VECTOR
            sums = dq_sum[tile, head, None]
            for chunk in cutlass.range(thread, self.block_q // 2 * columns, THREADS, unroll=1):
                quad, column = chunk // columns, chunk % columns
                atom, quad_in_atom = quad // 32, quad % 32
                words = cute.make_rmem_tensor(cute.make_layout(WORDS), Float32)
                start = (atom * columns + column) * 512 + quad_in_atom * WORDS
                cute.autovec_copy(run(sums, start, WORDS), words)
                row = atom * 64 + quad_in_atom // 8 * 16 + quad_in_atom % 8
                for half in cutlass.range_constexpr(2):
                    query = block * self.block_q + row + 8 * half
                    if (query < extent.seqlen_q) & (column * VECTOR < mdQ.shape[1]):
                        rounded(words, gdQ[query, None], half, column, scale)


@cute.jit
def row_statistics(
    rows: RowTensors, place: tuple, query: Int32, inside, lanes: tuple, target: tuple
):
    """-LSE log2(e) and delta of a row, by `lanes` neighbouring threads of a warp, all of whose
    threads are here; nothing is written where not inside. place: head, batch, extent, packed;
    lanes: this one, how many; target: the tile's statistics, the row in it, block_q."""
    head, batch, extent, packed = place
    lane, num_lanes = lanes
    statistics, row, block_q = target
    gO = tokens_of(rows.mO, head, batch, extent.offset_q, packed)
    gdO = tokens_of(rows.mdO, head, batch, extent.offset_q, packed)
    total, minus_lse = Float32(0.0), Float32(MINUS_INFINITY)
    if query < extent.seqlen_q:
        # First, so that it comes with the rows; every lane asks for the same word.
        lse = _row_value(rows.mLSE, _row_of(extent, query, packed), head, batch, packed)
        if lane * VECTOR < rows.mO.shape[1]:
            total = _dot(gO, gdO, query, lane)
        minus_lse = cutlass.select_(lse == MINUS_INFINITY, lse, -lse * Float32(LOG2_E))
    for step in cutlass.range_constexpr(num_lanes.bit_length() - 1):
        total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
    if (lane == 0) & inside:
        if (rows.has_dlse != 0) & (query < extent.seqlen_q):
            token = _row_of(extent, query, packed)
            total -= _row_value(rows.mdLSE, token, head, batch, packed)
        statistics[row] = minus_lse
        statistics[block_q + row] = total


@cute.jit
def rounded(words: cute.Tensor, row: cute.Tensor, half: cutlass.Constexpr[int], column, scale):
    """One row's 8 columns of a quad's 16 words, scaled and rounded, to dQ's row; half: 0 the upper
    row, 1 the one 8 further down; column: in pieces of 8."""
    narrow = cute.make_rmem_tensor(cute.make_layout(VECTOR), row.element_type)
    for e in cutlass.range_constexpr(VECTOR):
        word = words[e // 2 * 4 + 2 * half + e % 2]
        narrow[e] = (word * scale).to(row.element_type)
    cute.autovec_copy(narrow, run(row, column * VECTOR, VECTOR))


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
        cute.autovec_copy(zeros, run(row, (i - line * pieces) * VECTOR, VECTOR))


def row_lanes(head_dim: int) -> int:
    """Threads that share a row: a power of two."""
    lanes = 1
    while lanes * VECTOR < head_dim:
        lanes *= 2
    return lanes


def run(tensor: cute.Tensor, start, length: int) -> cute.Tensor:
    """`length` neighbours of a contiguous tensor; start is a multiple of length."""
    return cute.local_tile(tensor, (length,), (start // length,))


@cute.jit
def _dot(gO: cute.Tensor, gdO: cute.Tensor, query: Int32, lane: Int32) -> Float32:
    """This lane's part of a row's product."""
    a = cute.make_rmem_tensor(cute.make_layout(VECTOR), gO.element_type)
    b = cute.make_rmem_tensor(cute.make_layout(VECTOR), gO.element_type)
    cute.autovec_copy(run(gO[query, None], lane * VECTOR, VECTOR), a)
    cute.autovec_copy(run(gdO[query, None], lane * VECTOR, VECTOR), b)
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
        cute.autovec_copy(zeros, run(tensor, i * 4, 4))
