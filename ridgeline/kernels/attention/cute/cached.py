"""Forward over caches and for few queries: packed heads, split keys, lengths, padding and pages.

    O = softmax(scale Q K^T + mask) V,  LSE = log of the softmax's denominator

A block of threads has one tile: up to 64 rows a consumer warpgroup, the queries of all heads of a
group (cached_blocks.py), and one part of the keys that they see. A producer warp fills rings of K
and V by TMA (cached_loads.py); the walk over the blocks is the other forward's (mainloop.py). With
one part O is written as it is; with several a part's O and LSE in fp32, which cached_merge.py
joins.

    producer warp       | K(n) | K(n-1) V(n) | K(n-2) V(n-1) | ...         page numbers ahead
    consumer warpgroup  | Q to shared memory | S(n) | softmax | S(n-1), O += P V(n) | ... | O out

Bound by bytes while the rows are few: two blocks of threads a multiprocessor, so that one's start
and end lie under the other's loads. Q is loaded by the consumers' own loads, as rows of a tile are
any heads and queries; O leaves from registers for the same reason.
Sources: FlashAttention-3 (arXiv 2407.08608), Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from ridgeline.kernels.attention.cute import cached_merge, ptx
from ridgeline.kernels.attention.cute.cached_blocks import packed_range, split_range
from ridgeline.kernels.attention.cute.cached_loads import Loads
from ridgeline.kernels.attention.cute.cached_types import (
    Globals,
    PackedMask,
    Places,
    Scalars,
    Shared,
    Tile,
)
from ridgeline.kernels.attention.cute.forward import DeviceInteger, Forward, modes, one_stage
from ridgeline.kernels.attention.cute.mainloop import (
    DTYPES,
    Consumer,
    Mainloop,
    flat,
    group_barrier,
)
from ridgeline.kernels.attention.cute.mask import (
    MINUS_INFINITY,
    accumulator_column,
    accumulator_row,
)
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS, Ring
from ridgeline.kernels.attention.cute_sm90_cached_config import (
    ROWS,
    CachedConfig,
    CachedTraits,
    moved_registers,
)

VECTOR = 8
"""16-bit elements of a 16-byte access."""


class CachedForward:
    """The kernel for one (traits, config); `__call__` is the host function that is compiled."""

    def __init__(self, traits: CachedTraits, config: CachedConfig):
        self.traits = traits
        self.config = config
        self.dtype = DTYPES[traits.dtype]
        self.wgs = config.num_warpgroups
        self.threads = WARPGROUP_THREADS * (self.wgs + 1)
        self.mainloop = Mainloop(traits, config)
        self.loads = Loads(traits, config)
        self.merge = cached_merge.Merge(traits)

    # ---- host -----------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        part,
        part_lse,
        sinks,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        leftpad_k,
        kv_rows,
        pages,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        num_splits: Int32,
        row_tiles: Int32,
        stream,
    ):
        """q [B, S, H, D], k [rows, T, G, D], v [rows, T, G, V], o [B, S, H, V], lse [B, H, S].

        Packed: the same without B, tokens for S and T; pages: k, v [pages, W, G, .]. part fp32
        [B S, H, splits, V], part_lse [B S, H, splits]. Optional tensors are None.
        """
        cfg, dims, packed = self.config, self.traits, self.traits.varlen
        packed_keys = packed and not self.loads.paged
        layout_q = self._row_layout(ROWS, dims.head_dim, self.wgs)
        layout_k = self._row_layout(cfg.block_k, dims.head_dim, cfg.stages)
        layout_v = self._column_layout(dims.head_dim_v, cfg.block_k, cfg.stages)
        by_token = (0, 2, 1) if packed else (1, 3, 2, 0)
        rows, columns = self.loads.box(dims.head_dim)
        tma_k, mK = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            modes(k, (0, 2, 1) if packed_keys else (1, 3, 2, 0)),
            one_stage(self._row_layout(rows, columns, 1)),
            (rows, columns),
        )
        rows, columns = self.loads.box(dims.head_dim_v)
        tma_v, mV = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            modes(v, (2, 0, 1) if packed_keys else (3, 1, 2, 0)),
            one_stage(self._column_layout(columns, rows, 1)),
            (columns, rows),
        )
        num_batches = cu_seqlens_q.shape[0] - 1 if packed else q.shape[0]
        capacity_k = mK.shape[0]
        if cutlass.const_expr(self.loads.paged):
            capacity_k = pages.shape[1] * mK.shape[0]
        mQ = modes(q, by_token)
        tensors = Globals(
            mQ=mQ,
            mK=mK,
            mV=mV,
            mO=modes(o, by_token),
            mLSE=modes(lse, (1, 0) if packed else (2, 1, 0)),
            mPart=part,
            mPartLSE=part_lse,
            mSinks=sinks,
            mPages=pages,
            places=Places(
                mQ.shape[0],
                capacity_k,
                cu_seqlens_q,
                None if self.loads.paged else cu_seqlens_k,
                seqused_q,
                seqused_k,
                leftpad_k,
                kv_rows,
            ),
            num_batches=num_batches,
            tma_k=tma_k,
            tma_v=tma_v,
        )
        scalars = Scalars(softmax_scale, softcap, window_left, window_right, num_splits, row_tiles)
        grid = row_tiles * mK.shape[2] * num_splits * num_batches
        self.kernel(tensors, scalars, layout_q, layout_k, layout_v).launch(
            grid=(grid, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=cfg.blocks_per_sm,
            # In percent; without it the DSL would ask a device.
            preferred_smem_carveout=100,
            stream=stream,
        )
        if cutlass.const_expr(self.traits.split):
            results = part.shape[0] * part.shape[1]
            self.merge.kernel(
                part,
                part_lse,
                tensors.mO,
                tensors.mLSE,
                cu_seqlens_q,
                num_batches,
                num_splits,
            ).launch(
                grid=((results + cached_merge.WARPS - 1) // cached_merge.WARPS, 1, 1),
                block=(cached_merge.WARPS * cached_merge.LANES, 1, 1),
                stream=stream,
            )

    _row_layout = Forward._row_layout
    _column_layout = Forward._column_layout
    _window = Forward._window

    # ---- device ---------------------------------------------------------------------------------
    @cute.kernel
    def kernel(
        self,
        tensors: Globals,
        scalars: Scalars,
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
    ):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self._shared(layout_q, layout_k, layout_v)
        if warp_index == 0:
            cpasync.prefetch_descriptor(tensors.tma_k)
            cpasync.prefetch_descriptor(tensors.tma_v)
            if cute.arch.lane_idx() == 0:
                shared.k_ring.init(1, 4 * self.wgs)
                shared.v_ring.init(1, 4 * self.wgs)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        moved = moved_registers(self.config)
        # Each role works out the tile for itself: a value made before the branch lives in both.
        if warp_index < 4:
            if cutlass.const_expr(moved is not None):
                cute.arch.setmaxregister_decrease(moved[0])
            if warp_index == 0:
                tile = self._tile(tensors, scalars)
                if tile.computes:
                    self.loads.load(tensors, shared, tile)
        else:
            if cutlass.const_expr(moved is not None):
                cute.arch.setmaxregister_increase(moved[1])
            wg = warp_index // 4 - 1
            tile = self._tile(tensors, scalars)
            if tile.computes:
                self._consume(tensors, scalars, shared, tile, wg)
            else:
                self._store_nothing(tensors, tile, wg)
            if cutlass.const_expr(self.traits.varlen and not self.traits.split):
                self._clear_rest(tensors)

    @cute.jit
    def _shared(self, layout_q, layout_k, layout_v) -> Shared:
        stages = self.config.stages
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 4 * stages)
        sQ = smem.allocate_tensor(self.dtype, layout_q.outer, 1024, swizzle=layout_q.inner)
        sK = smem.allocate_tensor(self.dtype, layout_k.outer, 1024, swizzle=layout_k.inner)
        sV = smem.allocate_tensor(self.dtype, layout_v.outer, 1024, swizzle=layout_v.inner)
        return Shared(
            sQ=sQ,
            sK=sK,
            sV=sV,
            k_ring=Ring(barriers, stages),
            v_ring=Ring(barriers + 2 * stages, stages),
        )

    @cute.jit
    def _tile(self, tensors: Globals, scalars: Scalars) -> Tile:
        """This block's tile. Neighbours share keys, then lie side by side in a cache's rows; the
        last queries, which see most keys, come first."""
        index, _, _ = cute.arch.block_idx()
        kv_heads = tensors.mK.shape[2]
        rest, row_tile = index // scalars.row_tiles, index % scalars.row_tiles
        rest, kv_head = rest // kv_heads, rest % kv_heads
        batch, split = rest // scalars.num_splits, rest % scalars.num_splits
        group = tensors.mQ.shape[2] // kv_heads
        sequence = tensors.places.sequence(batch)
        rows = ROWS * self.wgs
        first = (scalars.row_tiles - 1 - row_tile) * rows
        whole = packed_range(
            (first, rows, group),
            self.config.block_k,
            (sequence.seqlen_q, sequence.seqlen_k, sequence.leftpad),
            self._window(scalars),
            DeviceInteger,
        )
        blocks, count = split_range(whole, split, scalars.num_splits, DeviceInteger)
        computes = (first < sequence.seqlen_q * group) & (count > 0)
        return Tile(first, kv_head, batch, split, group, sequence, blocks, computes)

    # ---- consumers ------------------------------------------------------------------------------
    @cute.jit
    def _consume(self, tensors: Globals, scalars: Scalars, shared: Shared, tile: Tile, wg: Int32):
        loop, blocks = self.mainloop, tile.blocks
        self._load_q(tensors, shared.sQ[None, None, wg], tile, wg)
        consumer = loop.consumer(
            shared.sQ[None, None, wg],
            shared.sK,
            shared.sV,
            (None, shared.k_ring, shared.v_ring),
            scalars.softmax_scale,
            scalars.softcap,
            wg,
        )
        loop.turns.start(wg)
        shared.k_ring.wait_full(Int32(0))
        loop.issue_qk(consumer, Int32(0), Int32(0))
        last = loop.walk(consumer, self._mask(scalars, tile, wg), blocks, Int32(0), Int32(0))
        shared.v_ring.wait_full(last)
        if cutlass.const_expr(self.traits.leftpad):
            self._clear_front(consumer, tile, last)
        loop.issue_pv(consumer, last)
        warpgroup.wait_group(0)
        consumer.softmax.finish(
            flat(consumer.O), self._sinks(tensors, scalars, tile, wg), self.traits.sinks
        )
        self._store(tensors, consumer, tile, wg)

    @cute.jit
    def _load_q(self, tensors: Globals, sQ: cute.Tensor, tile: Tile, wg: Int32):
        """The rows of one warpgroup, 16 bytes a load, all of a thread's in flight; rows that are
        not used are zero. sQ [64, D]."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        vectors = self.traits.head_dim // VECTOR
        count = ROWS * vectors // WARPGROUP_THREADS
        loaded = cute.make_rmem_tensor(cute.make_layout((VECTOR, count)), self.dtype)
        loaded.fill(0.0)
        for n in cutlass.range_constexpr(count):
            row, vector = (
                (n * WARPGROUP_THREADS + thread) // vectors,
                (n * WARPGROUP_THREADS + thread) % vectors,
            )
            query, head = self._row(tile, wg, row)
            if (query < tile.sequence.seqlen_q) & (vector * VECTOR < tensors.mQ.shape[1]):
                gQ = self._of_row(tensors.mQ, tile, query, head)
                run = cute.local_tile(gQ, (VECTOR,), (vector,))
                cute.autovec_copy(run, loaded[None, n])
        for n in cutlass.range_constexpr(count):
            row, vector = (
                (n * WARPGROUP_THREADS + thread) // vectors,
                (n * WARPGROUP_THREADS + thread) % vectors,
            )
            target = cute.local_tile(sQ[row, None], (VECTOR,), (vector,))
            cute.autovec_copy(loaded[None, n], target)
        cute.arch.fence_proxy("async.shared", space="cta")
        group_barrier(wg)

    def _row(self, tile: Tile, wg: Any, row: Any) -> tuple[Any, Any]:
        """(query, head) of a row of a warpgroup."""
        packed = tile.first + wg * ROWS + row
        query = packed // tile.group
        return query, tile.kv_head * tile.group + packed - query * tile.group

    def _own_row(self, tile: Tile, wg: Any, r: int) -> tuple[Any, Any]:
        """(query, head) of a thread's row r of the accumulator, 0 or 1."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        return self._row(tile, wg, thread // 32 * 16 + thread % 32 // 4 + 8 * r)

    def _of_row(self, tensor: cute.Tensor, tile: Tile, query: Any, head: Any) -> cute.Tensor:
        """The vector of one query and head, from [S, D, H(, B)]."""
        if self.traits.varlen:
            return tensor[tile.sequence.offset_q + query, None, head]
        return tensor[query, None, head, tile.batch]

    @cute.jit
    def _mask(self, scalars: Scalars, tile: Tile, wg: Int32) -> PackedMask:
        (first, _), (second, _) = self._own_row(tile, wg, 0), self._own_row(tile, wg, 1)
        left, right = self._window(scalars)
        return PackedMask(
            queries=(first, second),
            lane_column=2 * (cute.arch.lane_idx() % 4),
            seqlen_k=tile.sequence.seqlen_k,
            first_key=tile.sequence.leftpad,
            shift=tile.sequence.seqlen_k - tile.sequence.seqlen_q,
            left=left,
            right=right,
        )

    @cute.jit
    def _clear_front(self, c: Consumer, tile: Tile, position: Int32):
        """Zero V's rows before the first key, as Mainloop.clear_values those behind the last."""
        absent = tile.sequence.leftpad - tile.blocks.begin * self.config.block_k
        if absent > 0:
            absent = cutlass.min(absent, self.config.block_k)
            sV = c.operands.sV[None, None, c.operands.v_ring.stage(position)]
            dim = self.traits.head_dim_v
            thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
            for i in cutlass.range(thread, absent * dim, WARPGROUP_THREADS, unroll=1):
                sV[i % dim, i // dim] = self.dtype(0.0)
            cute.arch.fence_proxy("async.shared", space="cta")
            group_barrier(c.wg)

    # ---- epilogue -------------------------------------------------------------------------------
    @cute.jit
    def _sinks(self, tensors: Globals, scalars: Scalars, tile: Tile, wg: Int32):
        """The logits of a thread's two rows; of several parts the last, which is never empty, has
        them."""
        first, second = Float32(0.0), Float32(0.0)
        if cutlass.const_expr(self.traits.sinks):
            _, head = self._own_row(tile, wg, 0)
            _, other = self._own_row(tile, wg, 1)
            first, second = tensors.mSinks[head], tensors.mSinks[other]
            if cutlass.const_expr(self.traits.split):
                absent = tile.split < scalars.num_splits - 1
                nothing = Float32(MINUS_INFINITY)
                first = cutlass.select_(absent, nothing, first)
                second = cutlass.select_(absent, nothing, second)
        return first, second

    @cute.jit
    def _store(self, tensors: Globals, c: Consumer, tile: Tile, wg: Int32):
        """O and LSE of a thread's two rows; rows that are stored and not used are 0 and -inf."""
        output = flat(c.O)
        lane_column = 2 * (cute.arch.lane_idx() % 4)
        for r in cutlass.range_constexpr(2):
            query, head = self._own_row(tile, wg, r)
            if query < tile.sequence.stored_q:
                used = query < tile.sequence.seqlen_q
                lse = cutlass.select_(used, c.softmax.row_sum[r], Float32(MINUS_INFINITY))
                self._store_lse(tensors, tile, query, head, lse)
                if cutlass.const_expr(self.traits.split):
                    target = tensors.mPart[
                        self._token(tensors, tile, query), head, tile.split, None
                    ]
                else:
                    narrow = self._of_row(tensors.mO, tile, query, head)
                    target = cute.recast_tensor(narrow, Int32)
                for e in cutlass.range_constexpr(0, cute.size(output), 2):
                    if cutlass.const_expr(accumulator_row(e) == r):
                        column = lane_column + accumulator_column(e)
                        if column < tensors.mO.shape[1]:
                            low = cutlass.select_(used, output[e], Float32(0.0))
                            high = cutlass.select_(used, output[e + 1], Float32(0.0))
                            self._store_pair(target, column, low, high)

    @cute.jit
    def _store_pair(self, target: cute.Tensor, column: Int32, low: Float32, high: Float32):
        """Two neighbours: fp32 of a part, or one word of O."""
        if cutlass.const_expr(self.traits.split):
            pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
            pair[0], pair[1] = low, high
            cute.autovec_copy(pair, cute.local_tile(target, (2,), (column // 2,)))
        else:
            target[column // 2] = ptx.pack(low, high, self.dtype)

    def _token(self, tensors: Globals, tile: Tile, query: Any) -> Any:
        """Row of a query among those of all sequences."""
        if self.traits.varlen:
            return tile.sequence.offset_q + query
        return tile.batch * tensors.mQ.shape[0] + query

    @cute.jit
    def _store_lse(self, tensors: Globals, tile: Tile, query: Int32, head: Int32, lse: Float32):
        if cute.arch.lane_idx() % 4 == 0:
            if cutlass.const_expr(self.traits.split):
                tensors.mPartLSE[self._token(tensors, tile, query), head, tile.split] = lse
            elif cutlass.const_expr(self.traits.varlen):
                tensors.mLSE[tile.sequence.offset_q + query, head] = lse
            else:
                tensors.mLSE[query, head, tile.batch] = lse

    @cute.jit
    def _store_nothing(self, tensors: Globals, tile: Tile, wg: Int32):
        """LSE = -inf for rows that are stored, and O = 0 where no merge follows."""
        for r in cutlass.range_constexpr(2):
            query, head = self._own_row(tile, wg, r)
            if query < tile.sequence.stored_q:
                self._store_lse(tensors, tile, query, head, Float32(MINUS_INFINITY))
                if cutlass.const_expr(not self.traits.split):
                    row = self._of_row(tensors.mO, tile, query, head)
                    words = cute.recast_tensor(row, Int32)
                    lane = cute.arch.lane_idx() % 4
                    for i in cutlass.range(lane, tensors.mO.shape[1] // 2, 4, unroll=1):
                        words[i] = Int32(0)

    @cute.jit
    def _clear_rest(self, tensors: Globals):
        """Rows behind the last packed sequence: O = 0, LSE = -inf; one (row, head) a thread."""
        rows_begin = tensors.places.cu_seqlens_q[tensors.num_batches]
        heads = tensors.mQ.shape[2]
        todo = (tensors.mQ.shape[0] - rows_begin) * heads
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        threads = self.wgs * WARPGROUP_THREADS
        thread = cute.arch.thread_idx()[0] - WARPGROUP_THREADS
        for i in cutlass.range(block * threads + thread, todo, grid * threads, unroll=1):
            row, head = rows_begin + i // heads, i % heads
            tensors.mLSE[row, head] = Float32(MINUS_INFINITY)
            for column in cutlass.range(tensors.mO.shape[1], unroll=1):
                tensors.mO[row, column, head] = self.dtype(0.0)
