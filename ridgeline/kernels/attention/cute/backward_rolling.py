"""fp32 dQ of a causal window in a ring (`blocks.Rolling`), rounded to 16 bits by the main kernel.

Whole, fp32 dQ is twice as long as Q: zeroed by one kernel, added to, and rounded by another, it
goes through memory four times. Blocks of keys that run at the same time add to few of its rows
only, so a ring of 2 lag + span blocks (22 MB at head dim 128) stays in L2. The warpgroup of dQ
rounds and zeroes the place of the block `lag` before its own in its spare time, a chunk a step;
what is left of the ring at the end is for the kernel `last`.

With `rows_ahead` the rows' statistics are made likewise, by warps that only wait otherwise, for the
block lag + span on: the main kernel is bound by its products, what the small ones read is free.

A place holds the 128 rows of a block of keys in tiles as backward_rows.py orders them; a chunk is
16 words a thread, 8 columns of the rows r and r + 8.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ridgeline.kernels.attention.cute import ptx
from ridgeline.kernels.attention.cute.backward_rows import (
    THREADS,
    VECTOR,
    RowInputs,
    Rows,
    Tiles,
    clear,
    lanes_of,
    run_of,
    store_rounded,
    tile_of,
)
from ridgeline.kernels.attention.cute.forward import DeviceInteger
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS
from ridgeline.kernels.attention.cute.seqlens import tokens_of
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    ROLLING_CLUSTER,
    BackwardConfig,
    BackwardTraits,
    keys_per_block,
)

LANES = 32
ATOM_ROWS = 64
ATOM_QUADS = 32
"""Chunks of an atom of 64 rows are 32 a column of 8 words."""
CHUNK = 16


class Rounding:
    """What reads the ring, for one (traits, config)."""

    def __init__(self, traits: BackwardTraits, config: BackwardConfig):
        self.traits = traits
        self.lag = config.rolling
        self.block_q = config.block_q
        self.rows = keys_per_block(config)
        self.parts = self.rows // config.block_q
        self.columns = traits.head_dim // VECTOR
        self.overlapped = config.overlapped
        self.all_rows = Rows(traits, config)

    def chunks(self) -> int:
        """Of a place, of one head."""
        return self.rows // ATOM_ROWS * ATOM_QUADS * self.columns

    def rounds(self) -> int:
        """Half chunks of a place and head for each thread of a warpgroup."""
        return 2 * self.chunks() // WARPGROUP_THREADS

    @cute.jit
    def sums(self, dq_sum: cute.Tensor, tiles: Tiles, kv_head: Int32, batch: Int32, query: tuple):
        """The tile of dQ that a step adds to; query: member of the group, block of queries."""
        member, block = query
        owner = block // self.parts
        number = tiles.rolling.number(owner, kv_head, batch, DeviceInteger)
        place = tiles.rolling.place(number, DeviceInteger)
        part = block - owner * self.parts
        return tile_of(dq_sum, tiles.rolling.tile(place, member, part, self.parts))

    @cute.jit
    def wait(self, ended, tiles: Tiles, number: Int32):
        """A whole warp: until blocks have ended that must (`Rolling.ended`)."""
        begin, end = tiles.rolling.ended(number, self.lag, ROLLING_CLUSTER, DeviceInteger)
        cluster = begin + cute.arch.lane_idx()
        while cluster < end:
            counter = ended.iterator + cluster
            done = ptx.load_acquire(counter)
            while done != ROLLING_CLUSTER:
                done = ptx.load_acquire(counter)
            cluster += LANES
        cute.arch.sync_warp()

    @cute.jit
    def end(self, ended, number: Int32):
        """One thread, when all that this block does to the ring is done."""
        cute.arch.fence_acq_rel_gpu()
        counter = ended.iterator + number // ROLLING_CLUSTER
        cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")

    @cute.jit
    def fetch(self, tensors, words: cute.Tensor, number: Int32, index: Int32):
        """A warpgroup: half a chunk a thread of the block that lies `lag` behind, zeroed where it
        was with the second half; `leave` rounds it, a step later, as its words take a microsecond
        to come."""
        place, chunk, half = self._chunk_of(number, index)
        run = self._run(tensors.dq_sum, tensors.tiles, place, chunk)
        for pair in cutlass.range_constexpr(CHUNK // 4):
            target = cute.make_tensor(words.iterator + 2 * pair, cute.make_layout(2))
            cute.autovec_copy(cute.local_tile(run, (2,), (2 * pair + half,)), target)
        if half == 1:
            zeros = cute.make_rmem_tensor(cute.make_layout(CHUNK), Float32)
            zeros.fill(0.0)
            cute.autovec_copy(zeros, run)

    @cute.jit
    def leave(self, tensors, words: cute.Tensor, scale: Float32, number: Int32, index: Int32):
        """What `fetch` brought, rounded, to the output: 8 columns of a row."""
        place, chunk, half = self._chunk_of(number, index)
        gdQ, row, column = self._target(tensors.mdQ, tensors.tiles, place, chunk)
        query = row[0] + 8 * half
        if (query < row[1]) & (column * VECTOR < gdQ.shape[1]):
            narrow = cute.make_rmem_tensor(cute.make_layout(VECTOR), gdQ.element_type)
            for e in cutlass.range_constexpr(VECTOR):
                narrow[e] = (words[e] * scale).to(gdQ.element_type)
            cute.autovec_copy(narrow, run_of(gdQ[query, None], column * VECTOR, VECTOR))

    def _chunk_of(self, number: Int32, index: Int32):
        """((block number, member of the group), chunk, half) of a thread of a warpgroup."""
        member = index // self.rounds()
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        chunk = (index - member * self.rounds()) // 2 * WARPGROUP_THREADS + thread
        return (number - self.lag, member), chunk, index % 2

    @cute.jit
    def _run(self, dq_sum: cute.Tensor, tiles: Tiles, place: tuple, chunk: Int32):
        """Where a chunk of a place (block number, member of the group) lies."""
        number, member = place
        quad, column = chunk // self.columns, chunk % self.columns
        atom, quad_in_atom = quad // ATOM_QUADS, quad % ATOM_QUADS
        atoms = self.block_q // ATOM_ROWS
        part, atom_in_tile = atom // atoms, atom % atoms
        slot = tiles.rolling.place(number, DeviceInteger)
        sums = tile_of(dq_sum, tiles.rolling.tile(slot, member, part, self.parts))
        start = (atom_in_tile * self.columns + column) * ATOM_QUADS * CHUNK
        return run_of(sums, start + quad_in_atom * CHUNK, CHUNK)

    @cute.jit
    def _target(self, mdQ: cute.Tensor, tiles: Tiles, place: tuple, chunk: Int32):
        """(dQ of a head, (first of a chunk's two rows, how many rows there are), column of 8)."""
        number, member = place
        block, kv_head, batch = tiles.rolling.coordinates(number, DeviceInteger)
        quad, column = chunk // self.columns, chunk % self.columns
        atom, quad_in_atom = quad // ATOM_QUADS, quad % ATOM_QUADS
        extent = tiles.lengths.extent(batch)
        head = kv_head * tiles.rolling.group + member
        gdQ = tokens_of(mdQ, head, batch, extent.offset_q, self.traits.varlen)
        row = block * self.rows + atom * ATOM_ROWS + quad_in_atom // 8 * 16 + quad_in_atom % 8
        return gdQ, (row, extent.seqlen_q), column

    @cute.jit
    def rows_ahead(self, tensors, number: Int32, warp: Int32, num_warps: cutlass.Constexpr[int]):
        """A warp's share of the statistics of the rows of the block lag + span on: whoever loads
        them waits until this block has ended."""
        rolling = tensors.tiles.rolling
        target = number + self.lag + rolling.span
        if target < rolling.num_long():
            for member in cutlass.range(rolling.group, unroll=1):
                lanes = lanes_of(self.traits.head_dim_v)
                passes = self.rows * lanes // LANES
                for p in cutlass.range(warp, passes, num_warps, unroll=1):
                    row = p * (LANES // lanes) + cute.arch.lane_idx() // lanes
                    self._row(
                        tensors.rows, tensors.statistics, tensors.tiles, (target, member), row
                    )

    @cute.jit
    def _row(
        self, inputs: RowInputs, statistics: cute.Tensor, tiles: Tiles, place: tuple, row: Int32
    ):
        """One row of a place; `lanes_of` lanes together."""
        number, member = place
        block, kv_head, batch = tiles.rolling.coordinates(number, DeviceInteger)
        query_block = block * self.parts + row // self.block_q
        row_in_tile = row % self.block_q
        if query_block < tiles.num_blocks:
            extent = tiles.lengths.extent(batch)
            tile = tiles.first(extent, batch, self.block_q) + query_block
            head = kv_head * tiles.rolling.group + member
            where = (head, batch, block * self.rows + row)
            lane = cute.arch.lane_idx() % lanes_of(self.traits.head_dim_v)
            words = statistics[tile, head, None]
            self.all_rows.write_row(inputs, words, where, extent, row_in_tile, lane)

    @cute.kernel
    def first(
        self, inputs: RowInputs, statistics: cute.Tensor, dq_sum: cute.Tensor, turns, tiles: Tiles
    ):
        """Before the main kernel where it makes statistics itself: those of the blocks that nobody
        makes, zeros in the ring's first round and for what blocks count."""
        thread, _, _ = cute.arch.thread_idx()
        place, member, _ = cute.arch.block_idx()
        places, _, _ = cute.arch.grid_dim()
        number = tiles.rolling.owner(place, DeviceInteger)
        if cutlass.const_expr(self.overlapped):
            cute.arch.griddepcontrol_launch_dependents()
        for part in cutlass.range_constexpr(self.parts):
            clear(tile_of(dq_sum, tiles.rolling.tile(place, member, part, self.parts)), thread)
        early = number < self.lag + tiles.rolling.span
        if early | (number >= tiles.rolling.num_long()):
            lanes = lanes_of(self.traits.head_dim_v)
            for row in cutlass.range(thread // lanes, self.rows, THREADS // lanes, unroll=1):
                self._row(inputs, statistics, tiles, (number, member), row)
        words = turns.shape[0] * turns.shape[1]
        if member == 0:
            for word in cutlass.range(place * THREADS + thread, words, places * THREADS, unroll=1):
                row = word // turns.shape[1]
                turns[row, word - row * turns.shape[1], 0] = Int32(0)

    @cute.kernel
    def last(self, dq_sum: cute.Tensor, mdQ: cute.Tensor, scale: Float32, tiles: Tiles):
        """What the main kernel does not round. mdQ [S, D, H, B]."""
        thread, _, _ = cute.arch.thread_idx()
        index, member, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.overlapped):
            cute.arch.griddepcontrol_wait()
        place = (tiles.rolling.first_left(self.lag, DeviceInteger) + index, member)
        for chunk in cutlass.range(thread, self.chunks(), THREADS, unroll=1):
            words = cute.make_rmem_tensor(cute.make_layout(CHUNK), Float32)
            cute.autovec_copy(self._run(dq_sum, tiles, place, chunk), words)
            gdQ, row, column = self._target(mdQ, tiles, place, chunk)
            store_rounded(words, gdQ, row, column, scale)
