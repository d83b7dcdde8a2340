"""What idle warps of the persistent backward do for blocks of keys before and after their own.

The kernels before and after the main one are bound by bytes, the main one by products, and memory
has most of its time left there. So three warps that else only wait take their work over, block by
block in the numbering of `blocks.KeyOrder`:

    ahead:   the rows (queries) of block number + lag: zeros in fp32 dQ, and the statistics
    behind:  the rows of block number - delay, to which nobody adds any more: dQ out of fp32 dQ

Each counts what it has done in global memory, clusters of blocks together, and who needs it waits
for whole clusters; lag and delay are long enough that this hardly ever is a wait. What is left at
both ends is done by the kernels before and after (backward_rows.py), with the same functions.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ridgeline.kernels.attention.cute import ptx
from ridgeline.kernels.attention.cute.backward_rows import (
    VECTOR,
    WORDS,
    clear,
    row_lanes,
    row_statistics,
    run,
)
from ridgeline.kernels.attention.cute.backward_types import Globals, Scalars
from ridgeline.kernels.attention.cute.blocks import CLUSTER
from ridgeline.kernels.attention.cute.forward import DeviceInteger
from ridgeline.kernels.attention.cute.seqlens import tokens_of
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    BackwardConfig,
    BackwardTraits,
    ahead_warps,
    keys_per_block,
)

ADDING_WARPS = 4
"""Of the warpgroup that adds to dQ."""


class Ahead:
    """The work of the warps beside those of loads, dQ and keys."""

    def __init__(self, traits: BackwardTraits, config: BackwardConfig):
        self.traits = traits
        self.config = config
        self.parts = keys_per_block(config) // config.block_q
        self.preparing, self.finishing = ahead_warps(config)

    @cute.jit
    def prepare(self, tensors: Globals, number: Int32, worker: Int32):
        """One of the warps that prepare rows: its share at a number."""
        target = number + tensors.tiles.order.lag()
        if target < tensors.tiles.order.num_long():
            self._prepare(tensors, target, worker)
        self._count(tensors, number, False)

    @cute.jit
    def finish(self, tensors: Globals, scalars: Scalars, number: Int32, worker: Int32):
        """One of the warps that finish rows: its share at a number."""
        order = tensors.tiles.order
        target = number - order.delay()
        if (target >= 0) & (target < order.num_long()):
            self._await(tensors, order.adding(target, DeviceInteger), True)
            self._finish(tensors, scalars, target, worker)

    @cute.jit
    def await_prepared(self, tensors: Globals, number: Int32):
        """A warp: until the rows that a block adds to are prepared."""
        self._await(tensors, tensors.tiles.order.preparing(number, DeviceInteger), False)

    @cute.jit
    def tell_added(self, tensors: Globals, number: Int32):
        """A warp that adds to dQ: its last additions of a block are issued."""
        if cutlass.const_expr(self.config.results_behind):
            self._count(tensors, number, True)

    @cute.jit
    def _counter(self, tensors: Globals, cluster: Int32, ended: cutlass.Constexpr[bool]):
        """Of a cluster: blocks prepared; behind all of those, blocks ended."""
        if cutlass.const_expr(ended):
            cluster += tensors.tiles.order.num_clusters()
        return tensors.turns.iterator + cluster

    @cute.jit
    def _count(self, tensors: Globals, number: Int32, ended: cutlass.Constexpr[bool]):
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            # Cumulative: the other lanes' stores and additions come before it too.
            cute.arch.fence_acq_rel_gpu()
            counter = self._counter(tensors, number // CLUSTER, ended)
            cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        cute.arch.sync_warp()

    @cute.jit
    def _await(self, tensors: Globals, clusters: tuple, ended: cutlass.Constexpr[bool]):
        begin, end = clusters
        wanted = CLUSTER * (ADDING_WARPS if ended else self.preparing)
        cluster = begin + cute.arch.lane_idx()
        while cluster < end:
            counter = self._counter(tensors, cluster, ended)
            done = ptx.load_acquire(counter)
            while done != wanted:
                done = ptx.load_acquire(counter)
            cluster += cute.arch.WARP_SIZE
        cute.arch.sync_warp()

    @cute.jit
    def _prepare(self, tensors: Globals, target: Int32, worker: Int32):
        """A warp's share of a block's rows: zeros in dQ, and the statistics."""
        block, kv_head, batch = tensors.tiles.order.coordinates(target, DeviceInteger)
        group = tensors.mQ.shape[2] // tensors.mK.shape[2]
        thread = worker * cute.arch.WARP_SIZE + cute.arch.lane_idx()
        threads = self.preparing * cute.arch.WARP_SIZE
        # One loop, not unrolled: few registers are left to these warps.
        for i in cutlass.range(group * self.parts, unroll=1):
            head, tile = kv_head * group + i // self.parts, block * self.parts + i % self.parts
            if tile < tensors.tiles.num_blocks:
                row = batch * tensors.tiles.num_blocks + tile
                clear(tensors.dq_sum[row, head, None], thread, threads)
                if cutlass.const_expr(self.config.statistics_ahead):
                    self._statistics(tensors, (tile, head, batch), worker)

    @cute.jit
    def _statistics(self, tensors: Globals, place: tuple, worker: Int32):
        tile, head, batch = place
        block_q, rows = self.config.block_q, tensors.rows
        extent = tensors.tiles.lengths.extent(batch)
        lanes = row_lanes(self.traits.head_dim_v)
        a_warp = cute.arch.WARP_SIZE // lanes
        lane = cute.arch.lane_idx()
        statistics = tensors.statistics[batch * tensors.tiles.num_blocks + tile, head, None]
        for first in cutlass.range(worker * a_warp, block_q, self.preparing * a_warp, unroll=1):
            row = first + lane // lanes
            query = tile * block_q + row
            inside = row < block_q
            row_statistics(
                rows, (head, batch, extent, self.traits.varlen), query, inside,
                (lane % lanes, lanes), (statistics, row, block_q),
            )  # fmt: skip

    @cute.jit
    def _finish(self, tensors: Globals, scalars: Scalars, target: Int32, worker: Int32):
        """A warp's share of a block's rows: dQ, rounded."""
        block, kv_head, batch = tensors.tiles.order.coordinates(target, DeviceInteger)
        group = tensors.mQ.shape[2] // tensors.mK.shape[2]
        extent = tensors.tiles.lengths.extent(batch)
        for i in cutlass.range(group * self.parts, unroll=1):
            head, tile = kv_head * group + i // self.parts, block * self.parts + i % self.parts
            if tile < tensors.tiles.num_blocks:
                gdQ = tokens_of(tensors.rows.mdQ, head, batch, extent.offset_q, self.traits.varlen)
                sums = tensors.dq_sum[batch * tensors.tiles.num_blocks + tile, head, None]
                rows = tile * self.config.block_q, extent.seqlen_q
                self._round(sums, gdQ, rows, scalars.softmax_scale, worker)

    @cute.jit
    def _round(
        self, sums: cute.Tensor, gdQ: cute.Tensor, rows: tuple, scale: Float32, worker: Int32
    ):
        """Of a tile; rows: its first, the sequence's. A lane keeps to its two rows of 64, whatever
        the columns: few registers are left to these warps."""
        first, length = rows
        lane, columns = cute.arch.lane_idx(), self.traits.head_dim // VECTOR
        for atom in cutlass.range_constexpr(self.config.block_q // 64):
            query = first + atom * 64 + lane // 8 * 16 + lane % 8
            for half in cutlass.range_constexpr(2):
                row = query + 8 * half
                if row < length:
                    for column in cutlass.range(worker, columns, self.finishing, unroll=1):
                        if column * VECTOR < gdQ.shape[1]:
                            start = (atom * columns + column) * 512 + lane * WORDS + 2 * half
                            round_row(sums, start, gdQ[row, None], column, scale)


@cute.jit
def round_row(sums: cute.Tensor, start: Int32, row: cute.Tensor, column: Int32, scale: Float32):
    """Eight columns of a row of dQ from where a lane's words of them start: every second pair."""
    words = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
    for pair in cutlass.range_constexpr(VECTOR // 2):
        two = cute.make_tensor(words.iterator + 2 * pair, cute.make_layout(2))
        cute.autovec_copy(run(sums, start + 4 * pair, 2), two)
    narrow = cute.make_rmem_tensor(cute.make_layout(VECTOR), row.element_type)
    for e in cutlass.range_constexpr(VECTOR):
        narrow[e] = (words[e] * scale).to(row.element_type)
    cute.autovec_copy(narrow, run(row, column * VECTOR, VECTOR))
