"""Which tile of queries a block of threads works on next.

Tiles are numbered so that the longest come first and neighbours in time share keys and values in
L2: heads (times batch) are cut into sections whose keys and values fit the cache, and inside a
section all heads' last tiles (the longest under a causal mask) come before their earlier ones.
Source of the order: FlashAttention-3's causal scheduler, described in the FA3 repository.

Packed sequences are numbered without a host's help: the producer warp holds one sequence a lane,
sorts 32 of them by length and finds a number's sequence by a scan over the lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ridgeline.kernels.attention.cute.pipeline import Ring
from ridgeline.kernels.attention.cute.seqlens import Extent, Lengths

LANES = 32
RECORD_WORDS = 8
NONE = -1
"""Block of a work record that says: no more tiles."""


@dataclass(frozen=True)
class Work:
    """One tile: its block of queries (NONE at the end), head, sequence and that one's extent."""

    block: Any
    head: Any
    batch: Any
    extent: Extent


@dataclass(frozen=True)
class TileOrder:
    """The numbering of tiles; `coordinates` is its inverse. Integers of either world."""

    num_blocks: Any
    """Tiles of one head."""
    num_heads: Any
    num_batches: Any
    heads_per_section: Any

    def num_tiles(self) -> Any:
        return self.num_blocks * self.num_heads * self.num_batches

    def coordinates(self, tile: Any, minimum: Any = min) -> tuple[Any, Any, Any]:
        """(block, head, batch) of a number."""
        per_section = self.num_blocks * self.heads_per_section
        section = tile // per_section
        inside = tile - section * per_section
        first = section * self.heads_per_section
        width = minimum(self.heads_per_section, self.num_heads * self.num_batches - first)
        row = inside // width
        flat_head = first + inside - row * width
        batch = flat_head // self.num_heads
        return self.num_blocks - 1 - row, flat_head - batch * self.num_heads, batch


@dataclass(frozen=True)
class Cursor:
    """Where a producer stands among packed sequences: chunks of 32 behind it and their tiles."""

    chunk: Any
    before: Any


@dataclass(frozen=True)
class PackedOrder:
    """The numbering of tiles of packed sequences; a whole warp calls it."""

    lengths: Lengths
    rows: int
    num_heads: Any
    num_batches: Any
    heads_per_section: Any

    @cute.jit
    def find(self, index: Int32, cursor: Cursor):
        """(block, head, batch, cursor) of a number not below the last one asked for."""
        chunk, before = Int32(cursor.chunk), Int32(cursor.before)
        block, head, batch = Int32(NONE), Int32(0), Int32(0)
        searching = chunk * LANES < self.num_batches
        while searching:
            sequence, blocks = self._sorted_chunk(chunk)
            through = _inclusive_scan(blocks * self.num_heads)
            total = cute.arch.shuffle_sync(through, LANES - 1)
            if index < before + total:
                passed = cute.arch.vote_ballot_sync(before + through <= index)
                owner = cute.arch.popc(passed)
                own_blocks = cute.arch.shuffle_sync(blocks, owner)
                start = cute.arch.shuffle_sync(through, owner) - own_blocks * self.num_heads
                order = TileOrder(own_blocks, self.num_heads, 1, self.heads_per_section)
                block, head, _ = order.coordinates(index - before - start, cutlass.min)
                batch = cute.arch.shuffle_sync(sequence, owner)
                searching = Int32(0) == 1
            else:
                before += total
                chunk += 1
                searching = chunk * LANES < self.num_batches
        return block, head, batch, Cursor(chunk, before)

    @cute.jit
    def _sorted_chunk(self, chunk: Int32):
        """This lane's (sequence, blocks) after sorting the chunk's sequences, longest first."""
        lane = cute.arch.lane_idx()
        sequence = chunk * LANES + lane
        blocks = Int32(0)
        if sequence < self.num_batches:
            blocks = self.lengths.num_blocks(sequence, self.rows)
        rank = Int32(0)
        for other in cutlass.range(LANES, unroll=4):
            theirs = cute.arch.shuffle_sync(blocks, other)
            ahead = (theirs > blocks) | ((theirs == blocks) & (other < lane))
            rank += Int32(ahead)
        source = Int32(0)
        for other in cutlass.range(LANES, unroll=4):
            theirs = cute.arch.shuffle_sync(rank, other)
            source = cutlass.select_(theirs == lane, Int32(other), source)
        return chunk * LANES + source, cute.arch.shuffle_sync(blocks, source)


@cute.jit
def _inclusive_scan(value: Int32) -> Int32:
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        value += cutlass.select_(lane >= (1 << step), below, Int32(0))
    return value


@dataclass(frozen=True)
class WorkQueue:
    """Hands tiles to persistent blocks: each takes the next number when it has loaded its last.

    The producer warp draws the number (one atomic add, issued a tile ahead, so its latency hides
    behind the loads) and passes the tile's record to the consumers through a ring of two.
    """

    ring: Ring
    records: cute.Tensor
    """int32 [stages, RECORD_WORDS] in shared memory."""
    counter: cute.Tensor
    """int32 [2] in global memory: tiles drawn, blocks finished; both zero between launches."""

    @cute.jit
    def draw(self) -> Int32:
        """Producer warp: the next number beyond the grid's first wave."""
        drawn = Int32(0)
        if cute.arch.lane_idx() == 0:
            drawn = cute.arch.atomic_add(
                self.counter.iterator, Int32(1), sem="relaxed", scope="gpu"
            )
        grid, _, _ = cute.arch.grid_dim()
        return cute.arch.shuffle_sync(drawn, 0) + grid

    @cute.jit
    def announce(self, position: Int32, work: Work):
        """Producer warp: give a tile to the consumers."""
        self.ring.wait_empty(position)
        if cute.arch.lane_idx() == 0:
            record = self.records[self.ring.stage(position), None]
            words = self._words(work)
            for i in cutlass.range_constexpr(RECORD_WORDS - 1):
                record[i] = words[i]
            self.ring.publish(position)
        cute.arch.sync_warp()

    @cute.jit
    def take(self, position: Int32) -> Work:
        """Consumer warp: the next tile; one release a warp."""
        self.ring.wait_full(position)
        record = self.records[self.ring.stage(position), None]
        words = [cute.arch.make_warp_uniform(record[i]) for i in range(RECORD_WORDS - 1)]
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            self.ring.release(position)
        return self._work(words)

    def _words(self, work: Work) -> tuple[Any, ...]:
        """A tile as it is written down."""
        extent = work.extent
        lengths = extent.offset_q, extent.offset_k, extent.seqlen_q, extent.seqlen_k
        return work.block, work.head, work.batch, *lengths

    def _work(self, words: list[Any]) -> Work:
        return Work(words[0], words[1], words[2], Extent(*words[3:7]))

    @cute.jit
    def retire(self):
        """Producer warp, at the end: the last block of the grid to come here zeroes the counter."""
        grid, _, _ = cute.arch.grid_dim()
        if cute.arch.lane_idx() == 0:
            done = cute.arch.atomic_add(
                self.counter.iterator + 1, Int32(1), sem="acq_rel", scope="gpu"
            )
            if done == grid - 1:
                self.counter[0] = Int32(0)
                self.counter[1] = Int32(0)
