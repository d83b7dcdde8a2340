"""Which tile of queries a block of threads works on next.

Tiles are numbered so that the longest come first and neighbours in time share keys and values in
L2: heads (times batch) are cut into sections whose keys and values fit the cache, and inside a
section all heads' last tiles (the longest under a causal mask) come before their earlier ones.
Source of the order: FlashAttention-3's causal scheduler, described in the FA3 repository.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from ridgeline.kernels.attention.cute.pipeline import Ring


@dataclass(frozen=True)
class Tile:
    """Coordinates of one tile."""

    block: Any
    head: Any
    batch: Any


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

    def coordinates(self, tile: Any, minimum: Any = min) -> Tile:
        per_section = self.num_blocks * self.heads_per_section
        section = tile // per_section
        inside = tile - section * per_section
        first = section * self.heads_per_section
        width = minimum(self.heads_per_section, self.num_heads * self.num_batches - first)
        row = inside // width
        flat_head = first + inside - row * width
        batch = flat_head // self.num_heads
        return Tile(
            block=self.num_blocks - 1 - row,
            head=flat_head - batch * self.num_heads,
            batch=batch,
        )


@dataclass(frozen=True)
class WorkQueue:
    """Hands tiles to persistent blocks: each takes the next number when it has loaded its last.

    The producer warp draws the number (one atomic add, issued a tile ahead, so its latency hides
    behind the loads) and passes it to the consumers through a ring of two words.
    """

    ring: Ring
    slots: cute.Tensor
    """int32 [stages] in shared memory."""
    counter: cute.Tensor
    """int32 [2] in global memory: tiles drawn, blocks finished; both zero between launches."""

    @cute.jit
    def draw(self) -> Int32:
        """Producer warp: the next number beyond the grid's first wave."""
        drawn = Int32(0)
        if cute.arch.lane_idx() == 0:
            drawn = cute.arch.atomic_add(self.counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        drawn = cute.arch.shuffle_sync(drawn, 0)
        grid, _, _ = cute.arch.grid_dim()
        return drawn + grid

    @cute.jit
    def announce(self, position: Int32, tile: Int32):
        """Producer warp: give a number to the consumers."""
        self.ring.wait_empty(position)
        if cute.arch.lane_idx() == 0:
            self.slots[self.ring.stage(position)] = tile
            self.ring.publish(position)
        cute.arch.sync_warp()

    @cute.jit
    def take(self, position: Int32) -> Int32:
        """Consumer warp: the next number; one release a warp."""
        self.ring.wait_full(position)
        tile = self.slots[self.ring.stage(position)]
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            self.ring.release(position)
        return tile

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


__all__ = ["Tile", "TileOrder", "WorkQueue"]
