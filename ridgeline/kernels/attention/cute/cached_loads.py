"""The producer of the forward over caches: K and V by TMA, from rows of a cache or from its pages.

A page no longer than a block of keys is one TMA box for each 64 columns (a swizzled row of shared
memory), so a block of keys is filled page by page; of a longer page a block is one box. Pages that
a sequence does not reach are asked for beyond the cache's last: TMA writes zeros for them, reads
nothing, and counts their bytes all the same.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ridgeline.kernels.attention.cute.cached_types import Globals, Shared, Tile
from ridgeline.kernels.attention.cute.forward import tma_pair
from ridgeline.kernels.attention.cute.mainloop import DTYPES
from ridgeline.kernels.attention.cute.pipeline import Ring
from ridgeline.kernels.attention.cute.seqlens import columns_of, tokens_of
from ridgeline.kernels.attention.cute_sm90_cached_config import CachedConfig, CachedTraits


class Loads:
    """Fills the rings with a tile's blocks, from right to left, K one block ahead of V."""

    def __init__(self, traits: CachedTraits, config: CachedConfig):
        self.traits = traits
        self.config = config
        self.dtype = DTYPES[traits.dtype]
        self.paged = traits.page_rows > 0
        self.boxes = config.block_k // traits.page_rows if self.paged else 1
        """Boxes that a block of keys is filled with, one above the other."""

    def box(self, head_dim: int) -> tuple[int, int]:
        """(keys, columns) of a TMA box."""
        if not self.paged:
            return self.config.block_k, head_dim
        return self.traits.page_rows, swizzled_columns(head_dim)

    @cute.jit
    def load(self, tensors: Globals, shared: Shared, tile: Tile):
        """All blocks of a tile that computes; the producer warp calls it."""
        blocks = tile.blocks
        ids = self._pages(tensors, tile, blocks.end - 1)
        ahead = self._pages(tensors, tile, blocks.end - 2)
        self._load_k(tensors, shared, tile, blocks.end - 1, Int32(0), ids)
        for i in cutlass.range(1, blocks.end - blocks.begin, unroll=1):
            further = self._pages(tensors, tile, blocks.end - 2 - i)
            self._load_k(tensors, shared, tile, blocks.end - 1 - i, i, ahead)
            self._load_v(tensors, shared, tile, blocks.end - i, i - 1, ids)
            ids, ahead = ahead, further
        count = blocks.end - blocks.begin
        self._load_v(tensors, shared, tile, blocks.begin, count - 1, ids)

    @cute.jit
    def _pages(self, tensors: Globals, tile: Tile, block: Int32) -> Int32:
        """The page of this lane's box of a block; one that does not exist is behind the last."""
        page = Int32(0)
        if cutlass.const_expr(self.paged):
            page_tokens = tensors.mK.shape[0]
            page = Int32(tensors.mK.shape[3])
            first = block * self.config.block_k
            lane = cute.arch.lane_idx()
            index = first // page_tokens + lane
            if (block >= 0) & (lane < self.boxes) & (index * page_tokens < tile.sequence.seqlen_k):
                page = tensors.mPages[tile.batch, index]
        return page

    @cute.jit
    def _load_k(
        self, tensors: Globals, shared: Shared, tile: Tile, block: Int32, position: Int32, ids
    ):
        ring, stage = shared.k_ring, shared.k_ring.stage(position)
        rows, columns = self.box(self.traits.head_dim)
        self._expect(ring, position, self.traits.head_dim)
        if cutlass.const_expr(self.paged):
            sub = block * self.config.block_k % tensors.mK.shape[0] // rows
            for p in cutlass.range_constexpr(self.boxes):
                page = cute.arch.shuffle_sync(ids, p)
                gK = tensors.mK[None, None, tile.kv_head, page]
                for c in cutlass.range_constexpr(self.traits.head_dim // columns):
                    source = cute.local_tile(gK, (rows, columns), (sub, c))
                    target = cute.local_tile(shared.sK[None, None, stage], (rows, columns), (p, c))
                    _copy(tensors.tma_k, source, target, ring.full(position))
        else:
            mK = tokens_of(
                tensors.mK,
                tile.kv_head,
                tile.sequence.kv_row,
                tile.sequence.offset_k,
                self.traits.varlen,
            )
            source = cute.local_tile(mK, (rows, columns), (block, 0))
            _copy(tensors.tma_k, source, shared.sK[None, None, stage], ring.full(position))

    @cute.jit
    def _load_v(
        self, tensors: Globals, shared: Shared, tile: Tile, block: Int32, position: Int32, ids
    ):
        ring, stage = shared.v_ring, shared.v_ring.stage(position)
        rows, columns = self.box(self.traits.head_dim_v)
        self._expect(ring, position, self.traits.head_dim_v)
        if cutlass.const_expr(self.paged):
            sub = block * self.config.block_k % tensors.mK.shape[0] // rows
            for p in cutlass.range_constexpr(self.boxes):
                page = cute.arch.shuffle_sync(ids, p)
                gV = tensors.mV[None, None, tile.kv_head, page]
                for c in cutlass.range_constexpr(self.traits.head_dim_v // columns):
                    source = cute.local_tile(gV, (columns, rows), (c, sub))
                    target = cute.local_tile(shared.sV[None, None, stage], (columns, rows), (c, p))
                    _copy(tensors.tma_v, source, target, ring.full(position))
        else:
            mV = columns_of(
                tensors.mV,
                tile.kv_head,
                tile.sequence.kv_row,
                tile.sequence.offset_k,
                self.traits.varlen,
            )
            source = cute.local_tile(mV, (columns, rows), (0, block))
            _copy(tensors.tma_v, source, shared.sV[None, None, stage], ring.full(position))

    @cute.jit
    def _expect(self, ring: Ring, position: Int32, head_dim: cutlass.Constexpr[int]):
        """Wait for a free stage and announce a block's bytes, those outside the tensor included."""
        ring.wait_empty(position)
        with cute.arch.elect_one():
            ring.expect(position, self.config.block_k * head_dim * self.dtype.width // 8)


def swizzled_columns(head_dim: int) -> int:
    """Columns of a swizzled row in shared memory: 128 bytes where they divide the head dim."""
    return 64 if head_dim % 64 == 0 else 32


def _copy(atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, barrier: Any) -> None:
    """One TMA box into shared memory."""
    in_shared, in_global = tma_pair(atom, target, source)
    cute.copy(atom, in_global, in_shared, tma_bar_ptr=barrier)
