"""FlashAttention-3 forward on Hopper: one producer warp, two or three consumer warpgroups.

    O = softmax(scale Q K^T + mask) V,  LSE = log of the softmax's denominator

Each consumer warpgroup owns 64 query rows: its own Q tile and barrier, its own O. K and V blocks
are shared by all and arrive by TMA through two rings. A consumer's step on block j:

    tensor cores   | S = Q K(j)^T | O += P V(j+1)      |            (issued together, in its turn)
    CUDA cores     |              | softmax of S = P(j)|  O scaled, P packed to 16 bits

so the softmax of a block hides behind the second product of the block before, and behind the other
warpgroups' products. Blocks are visited right to left: masked ones come first, then a loop without
masks, then the window's left edge. P never leaves registers.

Bound by the tensor cores from head dim 128 on, by exponentials (16 a cycle and SM) at 64.
Legend: m/g/s/t prefixes are CuTe's: global tensor, its tile, shared memory, a thread's partition.
Source: FlashAttention-3 paper (arXiv 2407.08608), sections 3.1 and 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from ridgeline.kernels.attention.cute import softmax as sm
from ridgeline.kernels.attention.cute.blocks import BlockRange, block_range
from ridgeline.kernels.attention.cute.mask import Mask
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS, Ring, Turns
from ridgeline.kernels.attention.cute.scheduler import Tile, TileOrder, WorkQueue
from ridgeline.kernels.attention.cute_sm90_config import (
    REGISTERS,
    ROWS,
    ForwardConfig,
    ForwardTraits,
    rows_per_block,
)

DTYPES = {"bfloat16": BFloat16, "float16": Float16}
FIRST_TURN_BARRIER = 1
FIRST_EPILOGUE_BARRIER = 4
QUEUE_STAGES = 2


class DeviceInteger:
    """min and max of device integers, for `block_range`."""

    minimum = staticmethod(cutlass.min)
    maximum = staticmethod(cutlass.max)


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
    """Tensors of a launch, as TMA coordinates where TMA moves them."""

    mQ: cute.Tensor
    """[S, D, H, B]"""
    mK: cute.Tensor
    """[T, D, G, B]"""
    mV: cute.Tensor
    """[V, T, G, B]: V's columns are the rows of the second product's operand B"""
    mO: cute.Tensor
    """[S, V, H, B]"""
    mLSE: cute.Tensor
    """[S, H, B]"""
    mSinks: cute.Tensor
    """[H]"""
    counter: cute.Tensor
    tma_q: cute.CopyAtom
    tma_k: cute.CopyAtom
    tma_v: cute.CopyAtom
    tma_o: cute.CopyAtom


@dataclass(frozen=True)
class Shared:
    """Shared memory of a block of threads."""

    sQ: cute.Tensor
    """[64, D, warpgroups]"""
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


@dataclass(frozen=True)
class Registers:
    """A consumer thread's tiles."""

    S: cute.Tensor
    O: cute.Tensor  # noqa: E741
    P: cute.Tensor
    tQ: cute.Tensor
    tK: cute.Tensor
    tV: cute.Tensor


class Forward:
    """The kernel for one (traits, config); `__call__` is the host function that is compiled."""

    def __init__(self, traits: ForwardTraits, config: ForwardConfig):
        self.traits = traits
        self.config = config
        self.dtype = DTYPES[traits.dtype]
        self.wgs = config.num_warpgroups
        self.threads = WARPGROUP_THREADS * (self.wgs + 1)
        self.turns = Turns(FIRST_TURN_BARRIER, self.wgs if config.ping_pong else 1)

    # ---- host -----------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        lse: cute.Tensor,
        sinks: cute.Tensor,
        counter: cute.Tensor,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        heads_per_section: Int32,
        num_sms: Int32,
        stream,
    ):
        """q [B, S, H, D], k [B, T, G, D], v [B, T, G, V], o [B, S, H, V], lse [B, H, S]."""
        cfg, dims = self.config, self.traits
        layout_q = self._row_layout(ROWS, dims.head_dim, self.wgs)
        layout_k = self._row_layout(cfg.block_k, dims.head_dim, cfg.stages)
        layout_v = self._column_layout(dims.head_dim_v, cfg.block_k, cfg.stages)
        layout_o = self._row_layout(ROWS, dims.head_dim_v, self.wgs)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_q, mQ = cpasync.make_tiled_tma_atom(
            load, _modes(q, (1, 3, 2, 0)), _one(layout_q), (ROWS, dims.head_dim)
        )
        tma_k, mK = cpasync.make_tiled_tma_atom(
            load, _modes(k, (1, 3, 2, 0)), _one(layout_k), (cfg.block_k, dims.head_dim)
        )
        tma_v, mV = cpasync.make_tiled_tma_atom(
            load, _modes(v, (3, 1, 2, 0)), _one(layout_v), (dims.head_dim_v, cfg.block_k)
        )
        tma_o, mO = cpasync.make_tiled_tma_atom(
            store, _modes(o, (1, 3, 2, 0)), _one(layout_o), (ROWS, dims.head_dim_v)
        )
        tensors = Globals(
            mQ, mK, mV, mO, _modes(lse, (2, 1, 0)), sinks, counter, tma_q, tma_k, tma_v, tma_o
        )
        scalars = Scalars(softmax_scale, softcap, window_left, window_right, heads_per_section)
        num_tiles = self._order(mQ, heads_per_section).num_tiles()
        grid = cutlass.min(num_tiles, num_sms) if cfg.persistent else num_tiles
        self.kernel(tensors, scalars, layout_q, layout_k, layout_v, layout_o).launch(
            grid=(grid, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream
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

    def _order(self, mQ: cute.Tensor, heads_per_section: Int32) -> TileOrder:
        rows = rows_per_block(self.config)
        return TileOrder(
            num_blocks=(mQ.shape[0] + rows - 1) // rows,
            num_heads=mQ.shape[2],
            num_batches=mQ.shape[3],
            heads_per_section=heads_per_section,
        )

    # ---- the products ---------------------------------------------------------------------------
    def _mma_qk(self) -> cute.TiledMma:
        op = warpgroup.MmaF16BF16Op(
            self.dtype,
            Float32,
            (ROWS, self.config.block_k, 16),
            warpgroup.OperandSource.SMEM,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def _mma_pv(self) -> cute.TiledMma:
        op = warpgroup.MmaF16BF16Op(
            self.dtype,
            Float32,
            (ROWS, self.traits.head_dim_v, 16),
            warpgroup.OperandSource.RMEM,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.MN,
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op))

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
        producer_registers, consumer_registers = REGISTERS[self.wgs]
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp_index == 0:
                self._produce(tensors, scalars, shared)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            self._consume(tensors, scalars, shared, warp_index // 4 - 1)

    @cute.jit
    def _shared(self, tensors, layout_q, layout_k, layout_v, layout_o) -> Shared:
        stages = self.config.stages
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * self.wgs + 4 * stages + 2 * QUEUE_STAGES)
        slots = smem.allocate_tensor(Int32, cute.make_layout(QUEUE_STAGES), 8)
        sQ = smem.allocate_tensor(self.dtype, layout_q.outer, 1024, swizzle=layout_q.inner)
        sK = smem.allocate_tensor(self.dtype, layout_k.outer, 1024, swizzle=layout_k.inner)
        sV = smem.allocate_tensor(self.dtype, layout_v.outer, 1024, swizzle=layout_v.inner)
        if cutlass.const_expr(self.config.output_reuses_q):
            sO = sQ
        else:
            sO = smem.allocate_tensor(self.dtype, layout_o.outer, 1024, swizzle=layout_o.inner)
        k_barriers = barriers + 2 * self.wgs
        queue_ring = Ring(k_barriers + 4 * stages, QUEUE_STAGES)
        return Shared(
            sQ=sQ,
            sK=sK,
            sV=sV,
            sO=sO,
            q_barriers=barriers,
            k_ring=Ring(k_barriers, stages),
            v_ring=Ring(k_barriers + 2 * stages, stages),
            queue=WorkQueue(queue_ring, slots, tensors.counter),
        )

    @cute.jit
    def _init_barriers(self, shared: Shared):
        warps = 4 * self.wgs
        for wg in cutlass.range_constexpr(self.wgs):
            # With O in Q's memory the storing warp alone gives Q back, once O has left.
            releases = 1 if self.config.output_reuses_q else 4
            Ring(shared.q_barriers + 2 * wg, 1).init(1, releases)
        shared.k_ring.init(1, warps)
        shared.v_ring.init(1, warps)
        shared.queue.ring.init(1, warps)

    @cute.jit
    def _blocks(self, tensors: Globals, scalars: Scalars, tile: Tile) -> BlockRange:
        rows = rows_per_block(self.config)
        return block_range(
            tile.block * rows,
            rows,
            self.config.block_k,
            (tensors.mQ.shape[0], tensors.mK.shape[0]),
            (
                scalars.window_left if self.traits.has_left else None,
                scalars.window_right if self.traits.has_right else None,
            ),
            DeviceInteger,
        )

    # ---- producer -------------------------------------------------------------------------------
    @cute.jit
    def _produce(self, tensors: Globals, scalars: Scalars, shared: Shared):
        order = self._order(tensors.mQ, scalars.heads_per_section)
        num_tiles = order.num_tiles()
        tile_index, _, _ = cute.arch.block_idx()
        kv_position, tile_position = Int32(0), Int32(0)
        while tile_index < num_tiles:
            tile = order.coordinates(tile_index, cutlass.min)
            blocks = self._blocks(tensors, scalars, tile)
            for wg in cutlass.range_constexpr(self.wgs):
                self._load_q(tensors, shared, tile, wg, tile_position)
            following = num_tiles
            count = blocks.end - blocks.begin
            if count > 0:
                self._load_k(tensors, shared, tile, blocks.end - 1, kv_position)
            if cutlass.const_expr(self.config.persistent):
                following = shared.queue.draw()
                shared.queue.announce(tile_position, following)
            for i in cutlass.range(1, count, unroll=1):
                self._load_k(tensors, shared, tile, blocks.end - 1 - i, kv_position + 1)
                self._load_v(tensors, shared, tile, blocks.end - i, kv_position)
                kv_position += 1
            if count > 0:
                self._load_v(tensors, shared, tile, blocks.begin, kv_position)
                kv_position += 1
            tile_position += 1
            tile_index = following
        if cutlass.const_expr(self.config.persistent):
            shared.queue.retire()

    @cute.jit
    def _load_q(self, tensors: Globals, shared: Shared, tile: Tile, wg, position: Int32):
        ring = Ring(shared.q_barriers + 2 * wg, 1)
        gQ = cute.local_tile(
            tensors.mQ[None, None, tile.head, tile.batch],
            (ROWS, self.traits.head_dim),
            (tile.block * self.wgs + wg, 0),
        )
        num_bytes = ROWS * self.traits.head_dim * self.dtype.width // 8
        _load(tensors.tma_q, gQ, shared.sQ, wg, ring, position, num_bytes)

    @cute.jit
    def _load_k(self, tensors: Globals, shared: Shared, tile: Tile, block: Int32, position: Int32):
        group = tensors.mQ.shape[2] // tensors.mK.shape[2]
        gK = cute.local_tile(
            tensors.mK[None, None, tile.head // group, tile.batch],
            (self.config.block_k, self.traits.head_dim),
            (block, 0),
        )
        num_bytes = self.config.block_k * self.traits.head_dim * self.dtype.width // 8
        stage = shared.k_ring.stage(position)
        _load(tensors.tma_k, gK, shared.sK, stage, shared.k_ring, position, num_bytes)

    @cute.jit
    def _load_v(self, tensors: Globals, shared: Shared, tile: Tile, block: Int32, position: Int32):
        group = tensors.mQ.shape[2] // tensors.mK.shape[2]
        gV = cute.local_tile(
            tensors.mV[None, None, tile.head // group, tile.batch],
            (self.traits.head_dim_v, self.config.block_k),
            (0, block),
        )
        num_bytes = self.config.block_k * self.traits.head_dim_v * self.dtype.width // 8
        stage = shared.v_ring.stage(position)
        _load(tensors.tma_v, gV, shared.sV, stage, shared.v_ring, position, num_bytes)

    # ---- consumers ------------------------------------------------------------------------------
    @cute.jit
    def _consume(self, tensors: Globals, scalars: Scalars, shared: Shared, wg: Int32):
        order = self._order(tensors.mQ, scalars.heads_per_section)
        num_tiles = order.num_tiles()
        registers = self._registers(shared, wg)
        softmax = self._softmax(scalars)
        q_ring = Ring(shared.q_barriers + 2 * wg, 1)
        tile_index, _, _ = cute.arch.block_idx()
        kv_position, tile_position = Int32(0), Int32(0)
        self.turns.start(wg)
        while tile_index < num_tiles:
            tile = order.coordinates(tile_index, cutlass.min)
            blocks = self._blocks(tensors, scalars, tile)
            registers.O.fill(0.0)
            softmax.reset()
            q_ring.wait_full(tile_position)
            if blocks.end > blocks.begin:
                mask = self._mask(tensors, scalars, tile, wg)
                kv_position = self._tile(shared, registers, softmax, mask, blocks, scalars, wg, kv_position)
            if cutlass.const_expr(not self.config.output_reuses_q):
                _release(q_ring, tile_position)
            self._epilogue(tensors, shared, registers, softmax, tile, wg, q_ring, tile_position)
            following = num_tiles
            if cutlass.const_expr(self.config.persistent):
                following = shared.queue.take(tile_position)
            tile_position += 1
            tile_index = following
        # The last store must have read shared memory before the block goes away.
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def _registers(self, shared: Shared, wg: Int32) -> Registers:
        mma_qk, mma_pv = self._mma_qk(), self._mma_pv()
        thread_qk, thread_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        block_k, dim_v = self.config.block_k, self.traits.head_dim_v
        S = cute.make_rmem_tensor(mma_qk.partition_shape_C((ROWS, block_k)), Float32)
        O = cute.make_rmem_tensor(mma_pv.partition_shape_C((ROWS, dim_v)), Float32)  # noqa: E741
        P = cute.make_rmem_tensor(mma_pv.partition_shape_A((ROWS, block_k)), self.dtype)
        return Registers(
            S=S,
            O=O,
            P=P,
            tQ=mma_qk.make_fragment_A(thread_qk.partition_A(shared.sQ[None, None, wg])),
            tK=mma_qk.make_fragment_B(thread_qk.partition_B(shared.sK)),
            tV=mma_pv.make_fragment_B(thread_pv.partition_B(shared.sV)),
        )

    @cute.jit
    def _softmax(self, scalars: Scalars) -> sm.Softmax:
        scale_log2 = scalars.softmax_scale * sm.LOG2_E
        if cutlass.const_expr(self.traits.softcap):
            scale_log2 = scalars.softcap * sm.LOG2_E
        pair = cute.make_layout(2)
        return sm.Softmax(
            scale_log2=scale_log2,
            row_max=cute.make_rmem_tensor(pair, Float32),
            row_sum=cute.make_rmem_tensor(pair, Float32),
            rescale=cute.make_rmem_tensor(pair, Float32),
            lazy_log2=self.config.lazy_log2,
        )

    @cute.jit
    def _mask(self, tensors: Globals, scalars: Scalars, tile: Tile, wg: Int32) -> Mask:
        return Mask(
            row=_first_row(tile, self.wgs, wg),
            lane_column=2 * (cute.arch.lane_idx() % 4),
            seqlen_k=tensors.mK.shape[0],
            shift=tensors.mK.shape[0] - tensors.mQ.shape[0],
            left=scalars.window_left if self.traits.has_left else None,
            right=scalars.window_right if self.traits.has_right else None,
        )

    @cute.jit
    def _tile(
        self, shared, registers, softmax, mask, blocks, scalars, wg: Int32, position: Int32
    ) -> Int32:
        """All blocks of one tile; returns the position behind them."""
        ratio = scalars.softmax_scale / scalars.softcap if self.traits.softcap else Float32(0.0)
        self._first(shared, registers, softmax, mask, ratio, blocks.end - 1, position)
        masked_end = cutlass.max(blocks.full_end, blocks.begin)
        masked_end = cutlass.min(masked_end, blocks.end - 1)
        for i in cutlass.range(blocks.end - 1 - masked_end, unroll=1):
            position += 1
            block = blocks.end - 2 - i
            self._step(shared, registers, softmax, mask, ratio, block, position, wg, True)
        full_begin = blocks.begin
        if cutlass.const_expr(self.traits.has_left):
            full_begin = cutlass.min(cutlass.max(blocks.full_begin, blocks.begin), masked_end)
        for i in cutlass.range(masked_end - full_begin, unroll=1):
            position += 1
            block = masked_end - 1 - i
            self._step(shared, registers, softmax, mask, ratio, block, position, wg, False)
        if cutlass.const_expr(self.traits.has_left):
            for i in cutlass.range(full_begin - blocks.begin, unroll=1):
                position += 1
                block = full_begin - 1 - i
                self._step(shared, registers, softmax, mask, ratio, block, position, wg, True)
        shared.v_ring.wait_full(position)
        _multiply(
            self._mma_pv(), registers.O, registers.P, registers.tV, shared.v_ring.stage(position), False
        )
        warpgroup.wait_group(0)
        _release(shared.v_ring, position)
        return position + 1

    @cute.jit
    def _first(self, shared, registers, softmax, mask, ratio: Float32, block: Int32, position: Int32):
        """The rightmost block: its softmax starts the row maxima, nothing to overlap with yet."""
        shared.k_ring.wait_full(position)
        _multiply(
            self._mma_qk(), registers.S, registers.tQ, registers.tK, shared.k_ring.stage(position), True
        )
        warpgroup.wait_group(0)
        _release(shared.k_ring, position)
        scores = _flat(registers.S)
        if cutlass.const_expr(self.traits.softcap):
            sm.soft_cap(scores, ratio)
        mask.apply(scores, block * self.config.block_k)
        softmax.update(scores, True, True)
        sm.pack_operand(scores, _flat(cute.recast_tensor(registers.P, Int32)), self.dtype)

    @cute.jit
    def _step(
        self,
        shared,
        registers,
        softmax,
        mask,
        ratio: Float32,
        block: Int32,
        position: Int32,
        wg: Int32,
        masked: cutlass.Constexpr[bool],
    ):
        """One block: S of this block and O of the one before go to the tensor cores together."""
        shared.k_ring.wait_full(position)
        self.turns.wait(wg)
        _multiply(
            self._mma_qk(), registers.S, registers.tQ, registers.tK, shared.k_ring.stage(position), True
        )
        shared.v_ring.wait_full(position - 1)
        _multiply(
            self._mma_pv(), registers.O, registers.P, registers.tV, shared.v_ring.stage(position - 1), False
        )
        self.turns.give(wg)
        warpgroup.wait_group(1)
        _release(shared.k_ring, position)
        scores = _flat(registers.S)
        if cutlass.const_expr(self.traits.softcap):
            sm.soft_cap(scores, ratio)
        if cutlass.const_expr(masked):
            mask.apply(scores, block * self.config.block_k)
        grown = softmax.update(scores, False, masked)
        if cutlass.const_expr(self.config.lazy_log2 > 0):
            # The wait stands behind a branch on the finished softmax, or ptxas moves it up in
            # front of the exponentials, which then no longer run beside the second product.
            if sm.any_lane(grown):
                warpgroup.wait_group(0)
                softmax.scale_output(_flat(registers.O))
            else:
                warpgroup.wait_group(0)
        else:
            warpgroup.wait_group(0)
            softmax.scale_output(_flat(registers.O))
        _release(shared.v_ring, position - 1)
        sm.pack_operand(scores, _flat(cute.recast_tensor(registers.P, Int32)), self.dtype)

    # ---- epilogue -------------------------------------------------------------------------------
    @cute.jit
    def _epilogue(self, tensors, shared, registers, softmax, tile, wg: Int32, q_ring, position: Int32):
        """Normalise, O to shared memory and out by TMA, LSE straight to global memory."""
        sink = Float32(0.0)
        if cutlass.const_expr(self.traits.sinks):
            sink = tensors.mSinks[tile.head]
        output = _flat(registers.O)
        softmax.finish(output, sink, self.traits.sinks)
        lane = cute.arch.lane_idx()
        row = _first_row(tile, self.wgs, wg)
        for r in cutlass.range_constexpr(2):
            if (lane % 4 == 0) & (row + 8 * r < tensors.mQ.shape[0]):
                tensors.mLSE[row + 8 * r, tile.head, tile.batch] = softmax.row_sum[r]

        barrier = FIRST_EPILOGUE_BARRIER + wg
        if cutlass.const_expr(not self.config.output_reuses_q):
            # The previous tile's O must have left this warpgroup's shared memory.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)
        else:
            # Every warp of the group must be done reading Q.
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)
        sO = shared.sO[None, None, wg]
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        self._to_shared(registers.O, sO, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            gO = cute.local_tile(
                tensors.mO[None, None, tile.head, tile.batch],
                (ROWS, self.traits.head_dim_v),
                (tile.block * self.wgs + wg, 0),
            )
            tO, tgO = cpasync.tma_partition(
                tensors.tma_o, 0, cute.make_layout(1), cute.group_modes(sO, 0, 2), cute.group_modes(gO, 0, 2)
            )
            cute.copy(tensors.tma_o, tO, tgO)
            cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(self.config.output_reuses_q):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                if lane == 0:
                    q_ring.release(position)

    @cute.jit
    def _to_shared(self, output: cute.Tensor, sO: cute.Tensor, thread: Int32):
        """O in 16 bits to its swizzled tile, four 8x8 matrices an instruction."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, self._mma_pv()).get_slice(thread)
        narrow = cute.make_rmem_tensor(output.shape, self.dtype)
        sm.pack_operand(_flat(output), _flat(cute.recast_tensor(narrow, Int32)), self.dtype)
        cute.copy(atom, copy.retile(narrow), copy.partition_D(sO))


def _modes(tensor: cute.Tensor, modes: tuple[int, ...]) -> cute.Tensor:
    """The tensor with its modes in another order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(modes)))


def _one(layout: Any):
    """The layout of one stage."""
    return cute.slice_(layout, (None, None, 0))


def _flat(tensor: cute.Tensor) -> cute.Tensor:
    """A register tensor as one mode, in register order."""
    return cute.make_tensor(tensor.iterator, cute.make_layout(cute.size(tensor)))


def _first_row(tile: Tile, warpgroups: int, wg: Int32) -> Int32:
    """The first of this thread's two query rows (the other is 8 further)."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
    in_group = thread // 32 * 16 + thread % 32 // 4
    return (tile.block * warpgroups + wg) * ROWS + in_group


@cute.jit
def _load(atom, source, target, stage, ring: Ring, position: Int32, num_bytes: cutlass.Constexpr[int]):
    """One TMA tile into a stage, when its previous use has been released."""
    ring.wait_empty(position)
    with cute.arch.elect_one():
        ring.expect(position, num_bytes)
    tS, tG = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2)
    )
    cute.copy(atom, tG, tS[None, stage], tma_bar_ptr=ring.full(position))


@cute.jit
def _release(ring: Ring, position: Int32):
    """One arrival a warp."""
    if cute.arch.lane_idx() == 0:
        ring.release(position)


@cute.jit
def _multiply(mma, accumulator, a, b, stage: Int32, clear: cutlass.Constexpr[bool]):
    """Issue accumulator (+)= a b for one block, asynchronously, as one group."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, not (clear and k == 0))
        cute.gemm(mma, accumulator, a[None, None, k], b[None, None, k, stage], accumulator)
    warpgroup.commit_group()


def default_scale(head_dim: int) -> float:
    """1 / sqrt(D)."""
    return 1.0 / math.sqrt(head_dim)
