"""FlashAttention-3 forward on Hopper: one producer warp, two or three consumer warpgroups.

    O = softmax(scale Q K^T + mask) V,  LSE = log of the softmax's denominator

Each consumer warpgroup owns 64 query rows: its own Q tile and barrier, its own O. K and V blocks
are shared by all and arrive by TMA through two rings. A consumer's step on block j:

    tensor cores   | S = Q K(j)^T | O += P V(j+1)      |            (issued together, in its turn)
    CUDA cores     |              | softmax of S = P(j)|  O scaled, P packed to 16 bits

so the softmax of a block hides behind the second product of the block before, and behind the other
warpgroups' products. Blocks are visited right to left: masked ones come first, then a loop without
masks, then the window's left edge. P never leaves registers. Tiles overlap too: the first S of the
next tile is on the tensor cores while O of this one is normalised and stored.

Bound by the tensor cores from head dim 128 on, by exponentials (16 a cycle and SM) at 64.
Legend: m/g/s/t prefixes are CuTe's: global tensor, its tile, shared memory, a thread's partition.
Source: FlashAttention-3 paper (arXiv 2407.08608), sections 3.1 and 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from ridgeline.kernels.attention.cute import softmax as sm
from ridgeline.kernels.attention.cute.blocks import BlockRange, block_range
from ridgeline.kernels.attention.cute.mainloop import (
    DTYPES,
    Consumer,
    Mainloop,
    flat,
    group_barrier,
    release,
)
from ridgeline.kernels.attention.cute.mask import Mask, accumulator_column, accumulator_row
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS, Ring
from ridgeline.kernels.attention.cute.scheduler import (
    NONE,
    RECORD_WORDS,
    Cursor,
    PackedOrder,
    TileOrder,
    Work,
    WorkQueue,
)
from ridgeline.kernels.attention.cute.seqlens import Lengths, columns_of, tokens_of
from ridgeline.kernels.attention.cute_sm90_config import (
    ROWS,
    ForwardConfig,
    ForwardTraits,
    registers,
    rows_per_block,
)

QUEUE_STAGES = 2


class DeviceInteger:
    """min, max and select of device integers, for blocks.py."""

    minimum = staticmethod(cutlass.min)
    maximum = staticmethod(cutlass.max)
    choose = staticmethod(cutlass.select_)


@dataclass(frozen=True)
class Scalars:
    """Arguments of a launch that are numbers."""

    softmax_scale: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    heads_per_section: Int32


@dataclass(frozen=True)
class Globals:
    """Tensors of a launch, as TMA coordinates where TMA moves them; packed calls have no B mode."""

    mQ: cute.Tensor
    """[S, D, H, B]"""
    mK: cute.Tensor
    """[T, D, G, B]"""
    mV: cute.Tensor
    """[V, T, G, B]: V's columns are the rows of the second product's operand B"""
    mO: cute.Tensor
    """[S, V, H, B]"""
    mO_plain: cute.Tensor
    """The same, as an ordinary tensor"""
    mLSE: cute.Tensor
    """[S, H, B]"""
    mSinks: Any
    """fp32 [H] or None"""
    counter: cute.Tensor
    lengths: Lengths
    num_batches: Int32
    tma_q: cute.CopyAtom
    tma_k: cute.CopyAtom
    tma_v: cute.CopyAtom
    tma_o: cute.CopyAtom


@dataclass(frozen=True)
class Shared:
    """Shared memory of a block of threads."""

    sQ: cute.Tensor
    """[64, D, warpgroups * q_stages], a warpgroup's stages together"""
    sK: cute.Tensor
    """[N, D, stages]"""
    sV: cute.Tensor
    """[V, N, stages]"""
    sO: cute.Tensor
    """[64, V, warpgroups], or Q's memory"""
    q_barriers: cute.Pointer
    k_ring: Ring
    v_ring: Ring
    queue: WorkQueue


class Forward:
    """The kernel for one (traits, config); `__call__` is the host function that is compiled."""

    records = QUEUE_STAGES
    """Of RECORD_WORDS in shared memory: the work queue's, and those of a kernel built on this."""

    def __init__(self, traits: ForwardTraits, config: ForwardConfig):
        self.traits = traits
        self.config = config
        self.dtype = DTYPES[traits.dtype]
        self.wgs = config.num_warpgroups
        self.threads = WARPGROUP_THREADS * (self.wgs + 1)
        self.mainloop = Mainloop(traits, config)

    # ---- host -----------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        sinks,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        counter: cute.Tensor,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        heads_per_section: Int32,
        num_sms: Int32,
        stream,
    ):
        """q [B, S, H, D], k [B, T, G, D], v [B, T, G, V], o [B, S, H, V], lse [B, H, S].

        Packed: the same without B, tokens for S and T. Optional tensors are None.
        """
        layouts = self._layouts()
        cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
        tensors = self._globals((q, k, v, o, lse), sinks, cu_seqlens, seqused_k, counter, layouts)
        scalars = Scalars(softmax_scale, softcap, window_left, window_right, heads_per_section)
        grid = num_sms
        if cutlass.const_expr(not self.traits.varlen):
            num_tiles = self._order(tensors, scalars).num_tiles()
            grid = cutlass.min(num_tiles, num_sms) if self.config.persistent else num_tiles
        self._launch(tensors, scalars, layouts, grid, stream)

    def _launch(self, tensors: Globals, scalars: Scalars, layouts, grid, stream):
        self.kernel(tensors, scalars, *layouts).launch(
            grid=(grid, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    def _layouts(self):
        """Of Q, K, V and O in shared memory."""
        cfg, dims = self.config, self.traits
        return (
            self._row_layout(ROWS, dims.head_dim, self.wgs * cfg.q_stages),
            self._row_layout(cfg.block_k, dims.head_dim, cfg.stages),
            self._column_layout(dims.head_dim_v, cfg.block_k, cfg.stages),
            self._row_layout(ROWS, dims.head_dim_v, self.wgs),
        )

    def _globals(self, given, sinks, cu_seqlens, seqused_k, counter, layouts) -> Globals:
        """given: q, k, v, o and lse as `__call__` has them."""
        cfg, dims, packed = self.config, self.traits, self.traits.varlen
        q, k, v, o, lse = given
        layout_q, layout_k, layout_v, layout_o = layouts
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        by_token = (0, 2, 1) if packed else (1, 3, 2, 0)
        by_column = (2, 0, 1) if packed else (3, 1, 2, 0)
        plain_o = modes(o, by_token)
        tma_q, mQ = cpasync.make_tiled_tma_atom(
            load, modes(q, by_token), one_stage(layout_q), (ROWS, dims.head_dim)
        )
        tma_k, mK = cpasync.make_tiled_tma_atom(
            load, modes(k, by_token), one_stage(layout_k), (cfg.block_k, dims.head_dim)
        )
        tma_v, mV = cpasync.make_tiled_tma_atom(
            load, modes(v, by_column), one_stage(layout_v), (dims.head_dim_v, cfg.block_k)
        )
        tma_o, mO = cpasync.make_tiled_tma_atom(
            store, plain_o, one_stage(layout_o), (ROWS, dims.head_dim_v)
        )
        return Globals(
            mQ=mQ,
            mK=mK,
            mV=mV,
            mO=mO,
            mO_plain=plain_o,
            mLSE=modes(lse, (1, 0) if packed else (2, 1, 0)),
            mSinks=sinks,
            counter=counter,
            lengths=Lengths(mQ.shape[0], mK.shape[0], *cu_seqlens, seqused_k),
            num_batches=cu_seqlens[0].shape[0] - 1 if packed else q.shape[0],
            tma_q=tma_q,
            tma_k=tma_k,
            tma_v=tma_v,
            tma_o=tma_o,
        )

    def _row_layout(self, rows: int, columns: int, stages: int):
        """Shared-memory layout of [rows, columns] with contiguous columns, swizzled for WGMMA."""
        swizzle = warpgroup.SmemLayoutAtomKind
        kind = swizzle.K_SW128 if columns % 64 == 0 else swizzle.K_SW64
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))

    def _column_layout(self, rows: int, columns: int, stages: int):
        """The transposed view: [rows, columns] with contiguous rows (V as operand B)."""
        swizzle = warpgroup.SmemLayoutAtomKind
        kind = swizzle.MN_SW128 if rows % 64 == 0 else swizzle.MN_SW64
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (rows, columns, stages), order=(1, 0, 2))

    def _order(self, tensors: Globals, scalars: Scalars) -> TileOrder:
        """The numbering of a dense call's tiles."""
        rows = rows_per_block(self.config)
        return TileOrder(
            num_blocks=(tensors.mQ.shape[0] + rows - 1) // rows,
            num_heads=tensors.mQ.shape[2],
            num_batches=tensors.num_batches,
            heads_per_section=scalars.heads_per_section,
        )

    # ---- device ---------------------------------------------------------------------------------
    @cute.kernel
    def kernel(
        self,
        tensors: Globals,
        scalars: Scalars,
        layout_q: cute.ComposedLayout,
        layout_k: cute.ComposedLayout,
        layout_v: cute.ComposedLayout,
        layout_o: cute.ComposedLayout,
    ):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self._shared(tensors, layout_q, layout_k, layout_v, layout_o)
        if warp_index == 0:
            cpasync.prefetch_descriptor(tensors.tma_q)
            cpasync.prefetch_descriptor(tensors.tma_k)
            cpasync.prefetch_descriptor(tensors.tma_v)
            cpasync.prefetch_descriptor(tensors.tma_o)
            if cute.arch.lane_idx() == 0:
                self._init_barriers(shared)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        producer_registers, consumer_registers = registers(self.config, self.traits)
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp_index == 0:
                if cutlass.const_expr(self.traits.varlen):
                    self._produce_packed(tensors, scalars, shared)
                else:
                    self._produce_dense(tensors, scalars, shared)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            self._consume(tensors, scalars, shared, warp_index // 4 - 1)

    @cute.jit
    def _shared(self, tensors, layout_q, layout_k, layout_v, layout_o) -> Shared:
        stages = self.config.stages
        q_words = 2 * self.wgs * self.config.q_stages
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, q_words + 4 * stages + 2 * QUEUE_STAGES)
        records = smem.allocate_tensor(
            Int32, cute.make_layout((self.records, RECORD_WORDS), stride=(RECORD_WORDS, 1)), 16
        )
        sQ = smem.allocate_tensor(self.dtype, layout_q.outer, 1024, swizzle=layout_q.inner)
        sK = smem.allocate_tensor(self.dtype, layout_k.outer, 1024, swizzle=layout_k.inner)
        sV = smem.allocate_tensor(self.dtype, layout_v.outer, 1024, swizzle=layout_v.inner)
        if cutlass.const_expr(self.config.output_reuses_q):
            sO = sQ
        else:
            sO = smem.allocate_tensor(self.dtype, layout_o.outer, 1024, swizzle=layout_o.inner)
        k_barriers = barriers + q_words
        queue_ring = Ring(k_barriers + 4 * stages, QUEUE_STAGES)
        return Shared(
            sQ=sQ,
            sK=sK,
            sV=sV,
            sO=sO,
            q_barriers=barriers,
            k_ring=Ring(k_barriers, stages),
            v_ring=Ring(k_barriers + 2 * stages, stages),
            queue=self._queue(queue_ring, records, tensors),
        )

    def _queue(self, ring: Ring, records: cute.Tensor, tensors: Globals) -> WorkQueue:
        return WorkQueue(ring, records, tensors.counter)

    @cute.jit
    def _init_barriers(self, shared: Shared):
        warps = 4 * self.wgs
        for wg in cutlass.range_constexpr(self.wgs):
            # With O in Q's memory the storing warp alone gives Q back, once O has left.
            releases = 1 if self.config.output_reuses_q else 4
            self._q_ring(shared, wg).init(1, releases)
        shared.k_ring.init(1, warps)
        shared.v_ring.init(1, warps)
        shared.queue.ring.init(1, warps)

    def _q_ring(self, shared: Shared, wg) -> Ring:
        stages = self.config.q_stages
        return Ring(shared.q_barriers + 2 * stages * wg, stages)

    @cute.jit
    def _blocks(self, scalars: Scalars, work: Work) -> BlockRange:
        rows = rows_per_block(self.config)
        return block_range(
            work.block * rows,
            rows,
            self.config.block_k,
            (work.extent.seqlen_q, work.extent.seqlen_k),
            self._window(scalars),
            DeviceInteger,
        )

    @cute.jit
    def _own_blocks(self, scalars: Scalars, work: Work, wg: Int32) -> BlockRange:
        """The part of the tile's blocks that one warpgroup's rows see (at least one)."""
        tile = self._blocks(scalars, work)
        if cutlass.const_expr(not (self.traits.has_left or self.traits.has_right)):
            return tile
        own = block_range(
            (work.block * self.wgs + wg) * ROWS,
            ROWS,
            self.config.block_k,
            (work.extent.seqlen_q, work.extent.seqlen_k),
            self._window(scalars),
            DeviceInteger,
        )
        return own.inside(tile, DeviceInteger)

    def _window(self, scalars: Scalars):
        return (
            scalars.window_left if self.traits.has_left else None,
            scalars.window_right if self.traits.has_right else None,
        )

    # ---- producer -------------------------------------------------------------------------------
    @cute.jit
    def _produce_dense(self, tensors: Globals, scalars: Scalars, shared: Shared):
        order = self._order(tensors, scalars)
        num_tiles = order.num_tiles()
        index, _, _ = cute.arch.block_idx()
        kv_position, position = Int32(0), Int32(0)
        while index < num_tiles:
            block, head, batch = order.coordinates(index, cutlass.min)
            work = Work(block, head, batch, tensors.lengths.extent(batch))
            kv_position = self._load_tile(tensors, scalars, shared, work, position, kv_position)
            position += 1
            index = shared.queue.draw() if self.config.persistent else num_tiles
        self._finish_producing(tensors, shared, position)

    @cute.jit
    def _produce_packed(self, tensors: Globals, scalars: Scalars, shared: Shared):
        order = PackedOrder(
            lengths=tensors.lengths,
            rows=rows_per_block(self.config),
            num_heads=tensors.mQ.shape[2],
            num_batches=tensors.num_batches,
            heads_per_section=scalars.heads_per_section,
        )
        index, _, _ = cute.arch.block_idx()
        kv_position, position = Int32(0), Int32(0)
        block, head, batch, cursor = order.find(index, Cursor(Int32(0), Int32(0)))
        while block != NONE:
            work = Work(block, head, batch, tensors.lengths.extent(batch))
            kv_position = self._load_tile(tensors, scalars, shared, work, position, kv_position)
            position += 1
            block, head, batch, cursor = order.find(shared.queue.draw(), cursor)
        self._finish_producing(tensors, shared, position)

    @cute.jit
    def _finish_producing(self, tensors: Globals, shared: Shared, position: Int32):
        shared.queue.announce(position, self._no_work(tensors))
        if cutlass.const_expr(self.config.persistent):
            shared.queue.retire()

    def _no_work(self, tensors: Globals) -> Work:
        """Says: no more tiles."""
        return Work(Int32(NONE), Int32(0), Int32(0), tensors.lengths.extent(Int32(0)))

    @cute.jit
    def _load_tile(
        self, tensors, scalars, shared: Shared, work: Work, position: Int32, kv_position: Int32
    ) -> Int32:
        """All that one tile reads, K one block ahead of V; returns the ring position behind it."""
        blocks = self._blocks(scalars, work)
        shared.queue.announce(position, work)
        for wg in cutlass.range_constexpr(self.wgs):
            self._load_q(tensors, shared, work, wg, position)
        self._load_k(tensors, shared, work, blocks.end - 1, kv_position)
        for i in cutlass.range(1, blocks.end - blocks.begin, unroll=1):
            self._load_k(tensors, shared, work, blocks.end - 1 - i, kv_position + 1)
            self._load_v(tensors, shared, work, blocks.end - i, kv_position)
            kv_position += 1
        self._load_v(tensors, shared, work, blocks.begin, kv_position)
        return kv_position + 1

    @cute.jit
    def _load_q(self, tensors: Globals, shared: Shared, work: Work, wg, position: Int32):
        ring = self._q_ring(shared, wg)
        mQ = tokens_of(tensors.mQ, work.head, work.batch, work.extent.offset_q, self.traits.varlen)
        tile = (ROWS, self.traits.head_dim)
        gQ = cute.local_tile(mQ, tile, (work.block * self.wgs + wg, 0))
        num_bytes = ROWS * self.traits.head_dim * self.dtype.width // 8
        stage = wg * self.config.q_stages + ring.stage(position)
        _load(tensors.tma_q, gQ, shared.sQ, stage, ring, position, num_bytes)

    @cute.jit
    def _load_k(self, tensors: Globals, shared: Shared, work: Work, block: Int32, position: Int32):
        group = tensors.mQ.shape[2] // tensors.mK.shape[2]
        mK = tokens_of(
            tensors.mK, work.head // group, work.batch, work.extent.offset_k, self.traits.varlen
        )
        gK = cute.local_tile(mK, (self.config.block_k, self.traits.head_dim), (block, 0))
        num_bytes = self.config.block_k * self.traits.head_dim * self.dtype.width // 8
        stage = shared.k_ring.stage(position)
        _load(tensors.tma_k, gK, shared.sK, stage, shared.k_ring, position, num_bytes)

    @cute.jit
    def _load_v(self, tensors: Globals, shared: Shared, work: Work, block: Int32, position: Int32):
        group = tensors.mQ.shape[2] // tensors.mK.shape[2]
        mV = columns_of(
            tensors.mV, work.head // group, work.batch, work.extent.offset_k, self.traits.varlen
        )
        gV = cute.local_tile(mV, (self.traits.head_dim_v, self.config.block_k), (0, block))
        num_bytes = self.config.block_k * self.traits.head_dim_v * self.dtype.width // 8
        stage = shared.v_ring.stage(position)
        _load(tensors.tma_v, gV, shared.sV, stage, shared.v_ring, position, num_bytes)

    # ---- consumers ------------------------------------------------------------------------------
    @cute.jit
    def _consume(self, tensors: Globals, scalars: Scalars, shared: Shared, wg: Int32):
        q_ring = self._q_ring(shared, wg)
        sQ = shared.sQ if self.config.q_stages > 1 else shared.sQ[None, None, wg]
        consumer = self.mainloop.consumer(
            sQ,
            shared.sK,
            shared.sV,
            (q_ring, shared.k_ring, shared.v_ring),
            scalars.softmax_scale,
            scalars.softcap,
            wg,
        )
        kv_position, position = Int32(0), Int32(0)
        self.mainloop.turns.start(wg)
        work = shared.queue.take(position)
        skipped = self._blocks(scalars, work).end - self._own_blocks(scalars, work, wg).end
        more = work.block != NONE
        self.mainloop.first_product(consumer, more, skipped, position, kv_position)
        self._tiles(tensors, scalars, shared, consumer, work)
        warpgroup.wait_group(0)
        if cutlass.const_expr(self.traits.varlen):
            self._clear_rest(tensors)
        # The last store must have read shared memory before the block goes away.
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def _tiles(self, tensors: Globals, scalars: Scalars, shared: Shared, c: Consumer, work: Work):
        """One tile after the other; the first S of `work` is under way."""
        kv_position, position = Int32(0), Int32(0)
        while work.block != NONE:
            work, kv_position = self._tile(
                tensors, scalars, shared, c, work, position, kv_position, self._epilogue
            )
            position += 1

    @cute.jit
    def _tile(
        self,
        tensors: Globals,
        scalars: Scalars,
        shared: Shared,
        c: Consumer,
        work: Work,
        position: Int32,
        kv_position: Int32,
        epilogue: cutlass.Constexpr,
    ):
        """A tile whose first S is under way, to its end and the next one's first S.

        Returns that one and its ring position.
        """
        blocks, own = self._blocks(scalars, work), self._own_blocks(scalars, work, c.wg)
        mask = self._mask(scalars, work, c.wg)
        self.mainloop.pass_values(c, blocks.end - own.end, kv_position)
        kv_position += blocks.end - own.end
        kv_position = self.mainloop.walk(c, mask, own, position, kv_position)
        following = shared.queue.take(position + 1)
        after = kv_position + 1 + own.begin - blocks.begin
        skipped = self._blocks(scalars, following).end
        skipped -= self._own_blocks(scalars, following, c.wg).end
        more = following.block != NONE
        shared.v_ring.wait_full(kv_position)
        self.mainloop.issue_pv(c, kv_position)
        if cutlass.const_expr(self.config.output_reuses_q or self.traits.has_left):
            warpgroup.wait_group(0)
            release(shared.v_ring, kv_position)
            self.mainloop.pass_blocks(c, own.begin - blocks.begin, kv_position + 1)
        if cutlass.const_expr(self.config.output_reuses_q):
            epilogue(tensors, shared, c, work, position)
            self.mainloop.first_product(c, more, skipped, position + 1, after)
        else:
            self.mainloop.first_product(c, more, skipped, position + 1, after)
            if cutlass.const_expr(not self.traits.has_left):
                warpgroup.wait_group(1)
                release(shared.v_ring, kv_position)
            epilogue(tensors, shared, c, work, position)
        return following, after

    @cute.jit
    def _mask(self, scalars: Scalars, work: Work, wg: Int32) -> Mask:
        return Mask(
            row=first_row(work, self.wgs, wg),
            lane_column=2 * (cute.arch.lane_idx() % 4),
            seqlen_k=work.extent.seqlen_k,
            shift=work.extent.seqlen_k - work.extent.seqlen_q,
            left=scalars.window_left if self.traits.has_left else None,
            right=scalars.window_right if self.traits.has_right else None,
        )

    # ---- epilogue -------------------------------------------------------------------------------
    @cute.jit
    def _epilogue(self, tensors: Globals, shared: Shared, c: Consumer, work: Work, position: Int32):
        """Normalise, O to shared memory and out by TMA, LSE straight to global memory."""
        sink = Float32(0.0)
        if cutlass.const_expr(self.traits.sinks):
            sink = tensors.mSinks[work.head]
        output = flat(c.O)
        c.softmax.finish(output, sink, self.traits.sinks)
        self._store_lse(tensors, c, work)
        if cutlass.const_expr(self.traits.varlen):
            rows_end = (work.block * self.wgs + c.wg + 1) * ROWS
            if rows_end <= work.extent.seqlen_q:
                self._store_tile(tensors, shared, c, work, position)
            else:
                # TMA clips at the tensor's end, not at the sequence's.
                self._store_rows(tensors, c, work, position)
        else:
            self._store_tile(tensors, shared, c, work, position)

    @cute.jit
    def _store_lse(self, tensors: Globals, c: Consumer, work: Work):
        row = first_row(work, self.wgs, c.wg)
        for r in cutlass.range_constexpr(2):
            if (cute.arch.lane_idx() % 4 == 0) & (row + 8 * r < work.extent.seqlen_q):
                if cutlass.const_expr(self.traits.varlen):
                    token = work.extent.offset_q + row + 8 * r
                    tensors.mLSE[token, work.head] = c.softmax.row_sum[r]
                else:
                    tensors.mLSE[row + 8 * r, work.head, work.batch] = c.softmax.row_sum[r]

    @cute.jit
    def _store_tile(
        self, tensors: Globals, shared: Shared, c: Consumer, work: Work, position: Int32
    ):
        """A warpgroup's whole O tile through its shared memory and out by TMA."""
        if cutlass.const_expr(not self.config.output_reuses_q):
            # The previous tile's O must have left this warpgroup's shared memory.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        # And, where O goes through Q's memory, every warp must be done reading Q.
        group_barrier(c.wg)
        sO = self._output_tile(shared, c.wg)
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        self._to_shared(c.O, sO, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        group_barrier(c.wg)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            mO = tokens_of(
                tensors.mO, work.head, work.batch, work.extent.offset_q, self.traits.varlen
            )
            tile = (ROWS, self.traits.head_dim_v)
            gO = cute.local_tile(mO, tile, (work.block * self.wgs + c.wg, 0))
            tO, tgO = tma_pair(tensors.tma_o, sO, gO)
            cute.copy(tensors.tma_o, tO, tgO)
            cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(self.config.output_reuses_q):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    c.operands.q_ring.release(position)

    @cute.jit
    def _output_tile(self, shared: Shared, wg: Int32) -> cute.Tensor:
        """[64, V] of this warpgroup: its own memory, or the front of its Q tile."""
        if cutlass.const_expr(self.config.output_reuses_q):
            layout = one_stage(self._row_layout(ROWS, self.traits.head_dim_v, 1))
            front = shared.sQ[None, None, wg].iterator
            if cutlass.const_expr(self.traits.head_dim % 64 != self.traits.head_dim_v % 64):
                # The pointer carries Q's swizzle, and TMA stores by O's.
                front = cute.recast_ptr(front, layout.inner)
            return cute.make_tensor(front, layout.outer)
        return shared.sO[None, None, wg]

    @cute.jit
    def _to_shared(self, output: cute.Tensor, sO: cute.Tensor, thread: Int32):
        """O in 16 bits to its swizzled tile, four 8x8 matrices an instruction."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, self.mainloop.products.pv()).get_slice(thread)
        narrow = cute.make_rmem_tensor(output.shape, self.dtype)
        sm.pack_operand(flat(output), flat(cute.recast_tensor(narrow, Int32)), self.dtype)
        cute.copy(atom, copy.retile(narrow), copy.partition_D(sO))

    @cute.jit
    def _store_rows(self, tensors: Globals, c: Consumer, work: Work, position: Int32):
        """The last tile of a packed sequence, row by row from registers."""
        if cutlass.const_expr(self.config.output_reuses_q):
            # Every warp of the group must be done reading Q before one gives it back.
            group_barrier(c.wg)
            if cute.arch.thread_idx()[0] % WARPGROUP_THREADS == 0:
                c.operands.q_ring.release(position)
        mO = cute.domain_offset((work.extent.offset_q, 0), tensors.mO_plain[None, None, work.head])
        output, first = flat(c.O), first_row(work, self.wgs, c.wg)
        lane_column = 2 * (cute.arch.lane_idx() % 4)
        for e in cutlass.range_constexpr(cute.size(output)):
            row = first + 8 * accumulator_row(e)
            column = lane_column + accumulator_column(e)
            if (row < work.extent.seqlen_q) & (column < mO.shape[1]):
                mO[row, column] = output[e].to(self.dtype)

    @cute.jit
    def _clear_rest(self, tensors: Globals):
        """Rows behind the last packed sequence: O = 0, LSE = -inf; one (row, head) a thread."""
        rows_begin = tensors.lengths.cu_seqlens_q[tensors.num_batches]
        heads = tensors.mQ.shape[2]
        todo = (tensors.mQ.shape[0] - rows_begin) * heads
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        threads = self.wgs * WARPGROUP_THREADS
        thread = cute.arch.thread_idx()[0] - WARPGROUP_THREADS
        for i in cutlass.range(block * threads + thread, todo, grid * threads, unroll=1):
            row = rows_begin + i // heads
            head = i % heads
            tensors.mLSE[row, head] = Float32(sm.MINUS_INFINITY)
            for column in cutlass.range(tensors.mO_plain.shape[1], unroll=1):
                tensors.mO_plain[row, column, head] = self.dtype(0.0)


def modes(tensor: cute.Tensor, modes: tuple[int, ...]) -> cute.Tensor:
    """The tensor with its modes in another order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(modes)))


def one_stage(layout: Any):
    """The layout of one stage."""
    return cute.slice_(layout, (None, None, 0))


def first_row(work: Work, warpgroups: int, wg: Int32) -> Int32:
    """The first of this thread's two query rows (the other is 8 further)."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    in_group = thread // 32 * 16 + thread % 32 // 4
    return (work.block * warpgroups + wg) * ROWS + in_group


def tma_pair(atom: cute.CopyAtom, in_shared: cute.Tensor, in_global: cute.Tensor):
    """Both sides of a copy as TMA sees them: one mode a tile, then the rest."""
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(in_shared, 0, 2),
        cute.group_modes(in_global, 0, 2),
    )


@cute.jit
def _load(
    atom, source, target, stage, ring: Ring, position: Int32, num_bytes: cutlass.Constexpr[int]
):
    """One TMA tile into a stage, when its previous use has been released."""
    ring.wait_empty(position)
    with cute.arch.elect_one():
        ring.expect(position, num_bytes)
    in_shared, in_global = tma_pair(atom, target, source)
    cute.copy(atom, in_global, in_shared[None, stage], tma_bar_ptr=ring.full(position))
