"""FlashAttention-3-class backward on Hopper: dQ, dK, dV of one block of keys a block of threads.

    S^T = K Q^T        P^T = exp(scale S^T - LSE)      dV += P^T dO
    dP^T = V dO^T      dS^T = P^T * (dP^T - delta)     dK += dS^T Q       dQ += dS K

K and V stay in shared memory, blocks of Q and dO stream by. Two warpgroups own 64 keys each: they
compute everything transposed, so that P^T and dS^T are operand A of the next products straight from
registers; only dS goes through shared memory, to a third warpgroup, which computes dQ, adds it to
fp32 dQ in global memory, and issues the loads. So the two never wait for each other, and each one's
exponentials run under the other's products:

    keys 0..63    | dP(i) | exp S(i) | dS(i) | dV += , dK +=(i), S(i+1) | dP(i+1) ...
    keys 64..127  ... dV +=, dK +=(i-1), S(i) | dP(i) | exp S(i) | dS(i) | dV += ...
    dQ and loads  | load Q, dO (i+1) | dQ(i-1) = dS K | add dQ(i-1) | load (i+2) ...

Per step the tensor cores work 5 * 2 * block_q * 128 * D / 4096 cycles; shared memory moves nearly
as long (operand A of S^T and dP^T comes from there), which is why block_q is 128 where registers
allow it. Grouped heads: the block walks the queries of every head that shares its keys.
Legend: m/g/s/t prefixes are CuTe's: global tensor, its tile, shared memory, a thread's partition.
Sources: FlashAttention-2 paper (arXiv 2307.08691) 3.1.2; FlashAttention-3 paper (arXiv 2407.08608)
B.1; the operand swap and the reduced dQ are described in the FlashAttention-3 repository.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from ridgeline.kernels.attention.cute import ptx
from ridgeline.kernels.attention.cute import softmax as sm
from ridgeline.kernels.attention.cute.backward_rows import THREADS, Rows, Tiles
from ridgeline.kernels.attention.cute.blocks import BlockRange, query_range
from ridgeline.kernels.attention.cute.forward import DeviceInteger, _modes, _one, _tma_pair
from ridgeline.kernels.attention.cute.mainloop import DTYPES, flat, group_barrier, release
from ridgeline.kernels.attention.cute.mask import (
    TransposedMask,
    accumulator_column,
    accumulator_row,
)
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS, Ring
from ridgeline.kernels.attention.cute.scheduler import TileOrder
from ridgeline.kernels.attention.cute.seqlens import Extent, Lengths, tokens_of
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    KEYS,
    ROW_STATISTICS,
    BackwardConfig,
    BackwardTraits,
    dq_part,
    keys_per_block,
    registers,
)

OTHER_BARRIER = 7
"""Named barrier of the warpgroup that computes dQ; key warpgroups have `group_barrier`'s."""


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
    mdO: cute.Tensor
    """[S, V, H, B]"""
    mK: cute.Tensor
    """[T, D, G, B]"""
    mV: cute.Tensor
    """[T, V, G, B]"""
    mdK: cute.Tensor
    mdV: cute.Tensor
    mdK_plain: cute.Tensor
    mdV_plain: cute.Tensor
    """The same two as ordinary tensors"""
    statistics: cute.Tensor
    """fp32 [tiles, H, 2 * block_q]: -LSE log2(e), then delta"""
    dq_sum: cute.Tensor
    """fp32 [tiles, H, block_q * D], in the order of backward_rows.py"""
    turns: Any
    """int32 [tiles, H] or None: blocks of keys that have added to a tile of dQ"""
    tiles: Tiles
    num_key_blocks: Int32
    num_batches: Int32
    tma_q: cute.CopyAtom
    tma_do: cute.CopyAtom
    tma_k: cute.CopyAtom
    tma_v: cute.CopyAtom
    tma_dk: cute.CopyAtom
    tma_dv: cute.CopyAtom


@dataclass(frozen=True)
class Layouts:
    """Shared-memory layouts: the tensor as it lies, and transposed for operand B where needed."""

    q: Any
    q_columns: Any
    do: Any
    do_columns: Any
    k: Any
    k_columns: Any
    v: Any
    ds: Any
    ds_columns: Any


@dataclass(frozen=True)
class Shared:
    """Shared memory of a block of threads. Columns: the transposed view of the same bytes."""

    sQ: cute.Tensor
    """[block_q, D, stages]"""
    sQ_columns: cute.Tensor
    sdO: cute.Tensor
    """[block_q, V, stages]"""
    sdO_columns: cute.Tensor
    sK: cute.Tensor
    """[64, D, warpgroups]"""
    sK_columns: cute.Tensor
    sV: cute.Tensor
    """[64, V, warpgroups]"""
    sdS: cute.Tensor
    """[block_q, 64, ds_stages * warpgroups]"""
    sdS_columns: cute.Tensor
    sStatistics: cute.Tensor
    """fp32 [2 * block_q, stages]"""
    sdQ: Any
    """fp32 [block_q * D] or None"""
    q_ring: Ring
    do_ring: Ring
    ds_ring: Ring
    kv_barrier: cute.Pointer


@dataclass(frozen=True)
class Work:
    """One block of keys and the steps of its walk: every head of its group, every query block."""

    block: Int32
    kv_head: Int32
    batch: Int32
    extent: Extent
    queries: BlockRange
    group: Int32

    def steps_per_head(self):
        return self.queries.end - self.queries.begin

    def num_steps(self):
        return self.steps_per_head() * self.group

    def at(self, step):
        """(query head, block of queries) of a step."""
        per_head = self.steps_per_head()
        head = step // per_head
        return self.kv_head * self.group + head, self.queries.begin + step - head * per_head


@dataclass(frozen=True)
class KeyOwner:
    """What a key warpgroup works with."""

    S: cute.Tensor
    """fp32 [64, block_q] accumulator of S^T, then of dP^T."""
    dK: cute.Tensor
    dV: cute.Tensor
    P: cute.Tensor
    """P^T in 16 bits, operand A, then dS^T."""
    tK: cute.Tensor
    tQ: cute.Tensor
    tV: cute.Tensor
    tdO: cute.Tensor
    tQ_columns: cute.Tensor
    tdO_columns: cute.Tensor
    wg: Int32
    scale_log2: Float32
    capped_scale: Float32


class Products:
    """The five matrix products as WGMMAs of one warpgroup."""

    def __init__(self, traits: BackwardTraits, config: BackwardConfig):
        self.traits = traits
        self.config = config
        self.dtype = DTYPES[traits.dtype]

    def _mma(self, columns: int, a_from, b_major) -> cute.TiledMma:
        k_major = cute.nvgpu.OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(
            self.dtype, Float32, (KEYS, columns, 16), a_from, k_major, b_major
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def scores(self) -> cute.TiledMma:
        """S^T or dP^T [64, block_q], both operands from shared memory, rows along memory."""
        source = warpgroup.OperandSource.SMEM
        return self._mma(self.config.block_q, source, cute.nvgpu.OperandMajorMode.K)

    def sums(self, columns: int) -> cute.TiledMma:
        """dK or dV [64, columns], operand A from registers."""
        source = warpgroup.OperandSource.RMEM
        return self._mma(columns, source, cute.nvgpu.OperandMajorMode.MN)

    def dq(self) -> cute.TiledMma:
        """A part of dQ [block_q, D] = dS K."""
        source = warpgroup.OperandSource.SMEM
        return self._mma(self.dq_part()[1], source, cute.nvgpu.OperandMajorMode.MN)

    def dq_part(self) -> tuple[int, int]:
        return dq_part(self.config, self.traits)


class Backward:
    """The kernels for one (traits, config); `__call__` is the host function that is compiled."""

    def __init__(self, traits: BackwardTraits, config: BackwardConfig):
        self.traits = traits
        self.config = config
        self.dtype = DTYPES[traits.dtype]
        self.wgs = config.num_warpgroups
        self.threads = WARPGROUP_THREADS * (self.wgs + 1)
        self.masks = traits.has_left or traits.has_right or traits.varlen
        self.products = Products(traits, config)
        self.rows = Rows(traits, config)

    # ---- host -----------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse,
        cu_seqlens_q,
        cu_seqlens_k,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        statistics: cute.Tensor,
        dq_sum: cute.Tensor,
        turns,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        heads_per_section: Int32,
        longest_q: Int32,
        longest_k: Int32,
        stream,
    ):
        """q, dq [B, S, H, D]; k, dk [B, T, G, D]; v, dv [B, T, G, V]; o, dout [B, S, H, V];
        lse, dlse [B, H, S]. Packed: the same without B, tokens for S and T."""
        packed = self.traits.varlen
        by_token = (0, 2, 1) if packed else (1, 3, 2, 0)
        by_row = (1, 0) if packed else (2, 1, 0)
        mO, mdO, mdQ = (_modes(x, by_token) for x in (o, dout, dq))
        lengths = Lengths(q.shape[0 if packed else 1], k.shape[0 if packed else 1],
                          cu_seqlens_q, cu_seqlens_k, None)  # fmt: skip
        num_batches = cu_seqlens_q.shape[0] - 1 if packed else q.shape[0]
        block_q, block_k = self.config.block_q, keys_per_block(self.config)
        num_blocks = (longest_q + block_q - 1) // block_q
        tiles = Tiles(lengths, num_blocks)
        grid = (num_blocks, mdQ.shape[2], num_batches)
        mdLSE = None if dlse is None else _modes(dlse, by_row)
        self.rows.before(
            mO, mdO, _modes(lse, by_row), mdLSE, statistics, dq_sum, turns, tiles
        ).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)
        layouts = self._layouts()
        tensors = self._globals(
            [_modes(x, by_token) for x in (q, dout, k, v, dk, dv)],
            (statistics, dq_sum, turns, tiles),
            (longest_k + block_k - 1) // block_k,
            num_batches,
            layouts,
        )
        scalars = Scalars(softmax_scale, softcap, window_left, window_right, heads_per_section)
        order = self._order(tensors, scalars)
        self.kernel(tensors, scalars, layouts).launch(
            grid=(order.num_tiles(), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )
        self.rows.after(dq_sum, mdQ, softmax_scale, tiles).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream
        )

    def _layouts(self) -> Layouts:
        """Row layouts are swizzled for WGMMA, their transposed views address the same bytes."""
        cfg, dims = self.config, self.traits
        pieces = cfg.ds_stages * self.wgs
        return Layouts(
            q=self._row_layout(cfg.block_q, dims.head_dim, cfg.stages),
            q_columns=self._column_layout(dims.head_dim, cfg.block_q, cfg.stages),
            do=self._row_layout(cfg.block_q, dims.head_dim_v, cfg.stages),
            do_columns=self._column_layout(dims.head_dim_v, cfg.block_q, cfg.stages),
            k=self._row_layout(KEYS, dims.head_dim, self.wgs),
            k_columns=self._column_layout(dims.head_dim, KEYS, self.wgs),
            v=self._row_layout(KEYS, dims.head_dim_v, self.wgs),
            ds=self._row_layout(cfg.block_q, KEYS, pieces),
            ds_columns=self._column_layout(KEYS, cfg.block_q, pieces),
        )

    def _row_layout(self, rows: int, columns: int, stages: int):
        swizzle = warpgroup.SmemLayoutAtomKind
        kind = swizzle.K_SW128 if columns % 64 == 0 else swizzle.K_SW64
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))

    def _column_layout(self, rows: int, columns: int, stages: int):
        swizzle = warpgroup.SmemLayoutAtomKind
        kind = swizzle.MN_SW128 if rows % 64 == 0 else swizzle.MN_SW64
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom, (rows, columns, stages), order=(1, 0, 2))

    def _globals(self, tensors, buffers, num_key_blocks, num_batches, layouts: Layouts) -> Globals:
        """TMA views. tensors: q, dout, k, v, dk, dv by token; buffers: Globals' plain ones."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        dim, dim_v, block_q = self.traits.head_dim, self.traits.head_dim_v, self.config.block_q
        q, dout, k, v, dk, dv = tensors
        views = {}
        for name, op, tensor, layout, tile in (
            ("q", load, q, layouts.q, (block_q, dim)),
            ("do", load, dout, layouts.do, (block_q, dim_v)),
            ("k", load, k, layouts.k, (KEYS, dim)),
            ("v", load, v, layouts.v, (KEYS, dim_v)),
            ("dk", store, dk, layouts.k, (KEYS, dim)),
            ("dv", store, dv, layouts.v, (KEYS, dim_v)),
        ):
            atom, view = cpasync.make_tiled_tma_atom(op, tensor, _one(layout), tile)
            views["tma_" + name] = atom
            views["m" + {"q": "Q", "do": "dO", "k": "K", "v": "V", "dk": "dK", "dv": "dV"}[name]] = (
                view
            )
        statistics, dq_sum, turns, tiles = buffers
        return Globals(
            mdK_plain=dk,
            mdV_plain=dv,
            statistics=statistics,
            dq_sum=dq_sum,
            turns=turns,
            tiles=tiles,
            num_key_blocks=num_key_blocks,
            num_batches=num_batches,
            **views,
        )

    def _order(self, tensors: Globals, scalars: Scalars) -> TileOrder:
        """The numbering of blocks of keys."""
        return TileOrder(
            num_blocks=tensors.num_key_blocks,
            num_heads=tensors.mK.shape[2],
            num_batches=tensors.num_batches,
            heads_per_section=scalars.heads_per_section,
        )

    # ---- device ---------------------------------------------------------------------------------
    @cute.kernel
    def kernel(self, tensors: Globals, scalars: Scalars, layouts: Layouts):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self._shared(layouts)
        if warp_index == 0:
            for atom in (tensors.tma_q, tensors.tma_do, tensors.tma_k, tensors.tma_v):
                cpasync.prefetch_descriptor(atom)
            cpasync.prefetch_descriptor(tensors.tma_dk)
            cpasync.prefetch_descriptor(tensors.tma_dv)
            if cute.arch.lane_idx() == 0:
                self._init_barriers(shared)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        other_registers, key_registers = registers(self.config)
        # One branch a role, or ptxas drops setmaxnreg; each works out its own tile, which keeps those
        # values from living across the branch.
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(other_registers)
            work = self._work(tensors, scalars)
            if self._exists(work):
                self._serve(tensors, shared, work)
        else:
            cute.arch.setmaxregister_increase(key_registers)
            work = self._work(tensors, scalars)
            if self._exists(work):
                self._own_keys(tensors, scalars, shared, work, warp_index // 4 - 1)

    def _exists(self, work: Work):
        """False for blocks behind the end of a sequence shorter than the longest."""
        return work.block * keys_per_block(self.config) < work.extent.seqlen_k

    @cute.jit
    def _work(self, tensors: Globals, scalars: Scalars) -> Work:
        index, _, _ = cute.arch.block_idx()
        block, head, batch = self._order(tensors, scalars).coordinates(index, cutlass.min)
        block = tensors.num_key_blocks - 1 - block  # a causal mask leaves the first keys most work
        extent = tensors.tiles.lengths.extent(batch)
        block_k = keys_per_block(self.config)
        queries = query_range(
            block * block_k,
            block_k,
            self.config.block_q,
            (extent.seqlen_q, extent.seqlen_k),
            (
                scalars.window_left if self.traits.has_left else None,
                scalars.window_right if self.traits.has_right else None,
            ),
            DeviceInteger,
        )
        group = tensors.mQ.shape[2] // tensors.mK.shape[2]
        return Work(block, head, batch, extent, queries, group)

    @cute.jit
    def _shared(self, layouts: Layouts) -> Shared:
        cfg = self.config
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 4 * cfg.stages + 2 * cfg.ds_stages + 1)
        statistics = smem.allocate_tensor(
            Float32, cute.make_layout((ROW_STATISTICS * cfg.block_q, cfg.stages)), 128
        )

        def tensor(layout):
            return smem.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)

        sQ, sdO, sK, sV = (tensor(x) for x in (layouts.q, layouts.do, layouts.k, layouts.v))
        sdS = tensor(layouts.ds)
        sdQ = None
        if cutlass.const_expr(cfg.dq_bulk):
            words = cfg.block_q * self.traits.head_dim // self.config.dq_parts
            sdQ = smem.allocate_tensor(Float32, cute.make_layout(words), 128)
        return Shared(
            sQ=sQ,
            sQ_columns=cute.make_tensor(sQ.iterator, layouts.q_columns.outer),
            sdO=sdO,
            sdO_columns=cute.make_tensor(sdO.iterator, layouts.do_columns.outer),
            sK=sK,
            sK_columns=cute.make_tensor(sK.iterator, layouts.k_columns.outer),
            sV=sV,
            sdS=sdS,
            sdS_columns=cute.make_tensor(sdS.iterator, layouts.ds_columns.outer),
            sStatistics=statistics,
            sdQ=sdQ,
            q_ring=Ring(barriers, cfg.stages),
            do_ring=Ring(barriers + 2 * cfg.stages, cfg.stages),
            ds_ring=Ring(barriers + 4 * cfg.stages, cfg.ds_stages),
            kv_barrier=barriers + 4 * cfg.stages + 2 * cfg.ds_stages,
        )

    @cute.jit
    def _init_barriers(self, shared: Shared):
        key_warps = 4 * self.wgs
        shared.q_ring.init(1, key_warps)
        shared.do_ring.init(1, key_warps)
        shared.ds_ring.init(key_warps, 4)
        cute.arch.mbarrier_init(shared.kv_barrier, 1)

    # ---- dQ and loads ---------------------------------------------------------------------------
    @cute.jit
    def _serve(self, tensors: Globals, shared: Shared, work: Work):
        """The warpgroup beside the keys': loads, dQ = dS K, and its sum in global memory."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        num_steps = work.num_steps()
        if warp_index == 0:
            self._load_keys(tensors, shared, work)
            for i in cutlass.range_constexpr(self.config.stages):
                if i < num_steps:
                    self._load_queries(tensors, shared, work, Int32(i))
        mma = self.products.dq()
        rows, columns = self.products.dq_part()
        dQ = cute.make_rmem_tensor(mma.partition_shape_C((rows, columns)), Float32)
        for step in cutlass.range(num_steps, unroll=1):
            shared.ds_ring.wait_full(step)
            stage = shared.ds_ring.stage(step)
            for i in cutlass.range_constexpr(self.config.dq_parts):
                self._issue_dq(shared, mma, dQ, stage, i)
                warpgroup.wait_group(0)
                if cutlass.const_expr(i == self.config.dq_parts - 1):
                    release(shared.ds_ring, step)
                self._add_dq(tensors, shared, work, dQ, step, i)
            # Only now, when no accumulator is alive: it takes the registers of one.
            if warp_index == 0:
                if step + self.config.stages < num_steps:
                    self._load_queries(tensors, shared, work, step + self.config.stages)
        if cutlass.const_expr(self.config.dq_bulk):
            if warp_index == 0:
                cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def _issue_dq(self, shared: Shared, mma, dQ: cute.Tensor, stage: Int32, part: int):
        """One part of dQ = dS K: some of its rows or of its columns."""
        rows, columns = self.products.dq_part()
        by_row = rows < self.config.block_q
        sdS = cute.local_tile(shared.sdS, (rows, KEYS), (part if by_row else 0, 0, None))
        sK = cute.local_tile(
            shared.sK_columns, (columns, KEYS), (0 if by_row else part, 0, None)
        )
        thread = mma.get_slice(0)
        tdS = mma.make_fragment_A(thread.partition_A(sdS))
        tK = mma.make_fragment_B(thread.partition_B(sK))
        warpgroup.fence()
        for w in cutlass.range_constexpr(self.wgs):
            for k in cutlass.range_constexpr(KEYS // 16):
                mma.set(warpgroup.Field.ACCUMULATE, w + k > 0)
                a = tdS[None, None, k, stage * self.wgs + w]
                cute.gemm(mma, dQ, a, tK[None, None, k, w], dQ)
        warpgroup.commit_group()

    @cute.jit
    def _load_keys(self, tensors: Globals, shared: Shared, work: Work):
        """K and V, once, in pieces of one warpgroup's keys."""
        size = self.dtype.width // 8
        num_bytes = keys_per_block(self.config) * (self.traits.head_dim + self.traits.head_dim_v)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(shared.kv_barrier, num_bytes * size)
        for atom, m, s, dim in (
            (tensors.tma_k, tensors.mK, shared.sK, self.traits.head_dim),
            (tensors.tma_v, tensors.mV, shared.sV, self.traits.head_dim_v),
        ):
            rows = tokens_of(m, work.kv_head, work.batch, work.extent.offset_k, self.traits.varlen)
            for w in cutlass.range_constexpr(self.wgs):
                tile = cute.local_tile(rows, (KEYS, dim), (work.block * self.wgs + w, 0))
                in_shared, in_global = _tma_pair(atom, s, tile)
                cute.copy(atom, in_global, in_shared[None, w], tma_bar_ptr=shared.kv_barrier)

    @cute.jit
    def _load_queries(self, tensors: Globals, shared: Shared, work: Work, step: Int32):
        """Q with its statistics, and dO, of one step; waits until their stage is free."""
        head, block = work.at(step)
        block_q, size = self.config.block_q, self.dtype.width // 8
        for ring, atom, m, s, dim in (
            (shared.q_ring, tensors.tma_q, tensors.mQ, shared.sQ, self.traits.head_dim),
            (shared.do_ring, tensors.tma_do, tensors.mdO, shared.sdO, self.traits.head_dim_v),
        ):
            rows = tokens_of(m, head, work.batch, work.extent.offset_q, self.traits.varlen)
            tile = cute.local_tile(rows, (block_q, dim), (block, 0))
            with_statistics = s is shared.sQ
            words = ROW_STATISTICS * block_q if with_statistics else 0
            ring.wait_empty(step)
            with cute.arch.elect_one():
                ring.expect(step, block_q * dim * size + 4 * words)
            in_shared, in_global = _tma_pair(atom, s, tile)
            stage = ring.stage(step)
            cute.copy(atom, in_global, in_shared[None, stage], tma_bar_ptr=ring.full(step))
            if cutlass.const_expr(with_statistics):
                tile_index = tensors.tiles.first(work.extent, work.batch, self.config.block_q) + block
                source = tensors.statistics[tile_index, head, None].iterator
                target = shared.sStatistics[None, stage].iterator
                with cute.arch.elect_one():
                    ptx.bulk_load(target, source, 4 * words, ring.full(step))

    @cute.jit
    def _add_dq(
        self, tensors: Globals, shared: Shared, work: Work, dQ: cute.Tensor, step: Int32, part: int
    ):
        """Add a part of a step's dQ to the sum in global memory."""
        head, block = work.at(step)
        tile = tensors.tiles.first(work.extent, work.batch, self.config.block_q) + block
        target = tensors.dq_sum[tile, head, None]
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        values = flat(dQ)
        first_word = part * WARPGROUP_THREADS * cute.size(values)
        if cutlass.const_expr(self.config.dq_bulk):
            self._add_dq_bulk(shared, values, target.iterator + first_word, thread)
        else:
            base = target.iterator + first_word + 4 * thread
            for vector in cutlass.range_constexpr(cute.size(values) // 4):
                four = [values[4 * vector + i] for i in range(4)]
                ptx.add_to_global(base + 4 * WARPGROUP_THREADS * vector, *four)

    @cute.jit
    def _add_dq_bulk(self, shared: Shared, values: cute.Tensor, target, thread: Int32):
        """Through shared memory; the copy engine adds."""
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self._other_barrier()
        for vector in cutlass.range_constexpr(cute.size(values) // 4):
            four = cute.make_tensor(values.iterator + 4 * vector, cute.make_layout(4))
            place = WARPGROUP_THREADS * vector + thread
            cute.autovec_copy(four, cute.local_tile(shared.sdQ, (4,), (place,)))
        cute.arch.fence_proxy("async.shared", space="cta")
        self._other_barrier()
        if thread < 32:
            with cute.arch.elect_one():
                ptx.bulk_add(target, shared.sdQ.iterator, 4 * cute.size(shared.sdQ))
            cute.arch.cp_async_bulk_commit_group()

    def _other_barrier(self):
        cute.arch.barrier(barrier_id=OTHER_BARRIER, number_of_threads=WARPGROUP_THREADS)

    # ---- keys -----------------------------------------------------------------------------------
    @cute.jit
    def _own_keys(
        self, tensors: Globals, scalars: Scalars, shared: Shared, work: Work, wg: Int32
    ):
        """A warpgroup's 64 keys: the walk over all queries, then dK and dV out."""
        c = self._key_owner(scalars, shared, wg)
        mask = self._mask(scalars, work, wg)
        num_steps = work.num_steps()
        c.dK.fill(0.0)
        c.dV.fill(0.0)
        cute.arch.mbarrier_wait(shared.kv_barrier, 0)
        if num_steps > 0:
            shared.q_ring.wait_full(Int32(0))
        self._issue_scores(c, shared, Int32(0))
        warpgroup.wait_group(0)
        block, left_in_head = work.queries.begin, work.steps_per_head()
        for step in cutlass.range(num_steps, unroll=1):
            self._step(c, mask, shared, work, block, step, step + 1 < num_steps)
            block += 1
            if block == work.queries.end:
                block = work.queries.begin
        warpgroup.wait_group(0)
        self._store(tensors, scalars, shared, work, c, num_steps)

    @cute.jit
    def _key_owner(self, scalars: Scalars, shared: Shared, wg: Int32) -> KeyOwner:
        scores, block_q = self.products.scores(), self.config.block_q
        dk = self.products.sums(self.traits.head_dim)
        dv = self.products.sums(self.traits.head_dim_v)
        s_part, dk_part, dv_part = (mma.get_slice(0) for mma in (scores, dk, dv))
        score_shape = scores.partition_shape_C((KEYS, block_q))
        a_shape = dv.partition_shape_A((KEYS, block_q))
        capped_scale, scale_log2 = Float32(0.0), scalars.softmax_scale * sm.LOG2_E
        if cutlass.const_expr(self.traits.softcap):
            capped_scale = scalars.softmax_scale / scalars.softcap
            scale_log2 = scalars.softcap * sm.LOG2_E
        return KeyOwner(
            S=cute.make_rmem_tensor(score_shape, Float32),
            dK=cute.make_rmem_tensor(
                dk.partition_shape_C((KEYS, self.traits.head_dim)), Float32
            ),
            dV=cute.make_rmem_tensor(
                dv.partition_shape_C((KEYS, self.traits.head_dim_v)), Float32
            ),
            P=cute.make_rmem_tensor(a_shape, self.dtype),
            tK=scores.make_fragment_A(s_part.partition_A(shared.sK[None, None, wg])),
            tQ=scores.make_fragment_B(s_part.partition_B(shared.sQ)),
            tV=scores.make_fragment_A(s_part.partition_A(shared.sV[None, None, wg])),
            tdO=scores.make_fragment_B(s_part.partition_B(shared.sdO)),
            tQ_columns=dk.make_fragment_B(dk_part.partition_B(shared.sQ_columns)),
            tdO_columns=dv.make_fragment_B(dv_part.partition_B(shared.sdO_columns)),
            wg=wg,
            scale_log2=scale_log2,
            capped_scale=capped_scale,
        )

    @cute.jit
    def _mask(self, scalars: Scalars, work: Work, wg: Int32) -> TransposedMask:
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        first = (work.block * self.wgs + wg) * KEYS
        return TransposedMask(
            key=first + thread // 32 * 16 + thread % 32 // 4,
            lane_column=2 * (thread % 4),
            seqlen_k=work.extent.seqlen_k,
            shift=work.extent.seqlen_k - work.extent.seqlen_q,
            left=scalars.window_left if self.traits.has_left else None,
            right=scalars.window_right if self.traits.has_right else None,
        )

    @cute.jit
    def _issue_scores(self, c: KeyOwner, shared: Shared, step: Int32):
        stage = shared.q_ring.stage(step)
        _multiply(self.products.scores(), c.S, c.tK, c.tQ[None, None, None, stage], True)

    @cute.jit
    def _step(
        self, c: KeyOwner, mask: TransposedMask, shared: Shared, work: Work,
        block: Int32, step: Int32, more: Boolean,
    ):  # fmt: skip
        """One block of queries, whose S^T is under way. At its end the next one's S^T is issued
        (on whatever the stage holds, where there is none: a branch around it would make ptxas wait
        after every product)."""
        stage = shared.do_ring.stage(step)
        statistics = shared.sStatistics[None, shared.q_ring.stage(step)]
        self._probabilities(c, mask, statistics, work, block)
        shared.do_ring.wait_full(step)
        # Waiting here and not where dS is stored: LLVM would move dS's arithmetic behind this loop,
        # that is behind the start of the next products, and ptxas would then serialise them.
        shared.ds_ring.wait_empty(step)
        _multiply(self.products.scores(), c.S, c.tV, c.tdO[None, None, None, stage], True)
        dv = self.products.sums(self.traits.head_dim_v)
        _multiply(dv, c.dV, c.P, c.tdO_columns[None, None, None, stage], False)
        warpgroup.wait_group(0)
        release(shared.do_ring, step)
        self._score_gradients(c, statistics)
        self._share_ds(c, shared, step)
        dk = self.products.sums(self.traits.head_dim)
        q_stage = shared.q_ring.stage(step)
        _multiply(dk, c.dK, c.P, c.tQ_columns[None, None, None, q_stage], False)
        if more:
            shared.q_ring.wait_full(step + 1)
        self._issue_scores(c, shared, step + 1)
        warpgroup.wait_group(1)
        release(shared.q_ring, step)
        warpgroup.wait_group(0)

    @cute.jit
    def _probabilities(
        self, c: KeyOwner, mask: TransposedMask, statistics, work: Work, block: Int32
    ):
        """P^T of S^T, packed at once: in 16 bits it takes half of the registers while dP^T, in the
        place of S^T, is computed."""
        scores = flat(c.S)
        if cutlass.const_expr(self.traits.softcap):
            sm.soft_cap(scores, c.capped_scale)
        if cutlass.const_expr(self.masks):
            if self._needs_mask(work, block):
                mask.apply(scores, block * self.config.block_q)
        packed = flat(cute.recast_tensor(c.P, Int32))
        first_column = 2 * (cute.arch.lane_idx() % 4)
        for column in cutlass.range_constexpr(0, self.config.block_q, 8):
            pair = _pair(statistics, first_column + column)
            for half in cutlass.range_constexpr(2):
                e = column // 2 + 2 * half
                low = ptx.exp2(ptx.fma(scores[e], c.scale_log2, pair[0]))
                high = ptx.exp2(ptx.fma(scores[e + 1], c.scale_log2, pair[1]))
                packed[e // 2] = ptx.pack(low, high, self.dtype)

    def _needs_mask(self, work: Work, block: Int32):
        needed = (block < work.queries.full_begin) | (block >= work.queries.full_end)
        if self.traits.varlen:
            past = (work.block + 1) * keys_per_block(self.config) > work.extent.seqlen_k
            needed = needed | past
        return needed

    @cute.jit
    def _score_gradients(self, c: KeyOwner, statistics):
        """dS^T of dP^T and P^T, packed in the place of P^T."""
        dP = flat(c.S)
        packed = flat(cute.recast_tensor(c.P, Int32))
        first_column = 2 * (cute.arch.lane_idx() % 4)
        for column in cutlass.range_constexpr(0, self.config.block_q, 8):
            pair = _pair(statistics, self.config.block_q + first_column + column)
            for half in cutlass.range_constexpr(2):
                e = column // 2 + 2 * half
                low, high = ptx.unpack(packed[e // 2], self.dtype)
                low, high = low * (dP[e] - pair[0]), high * (dP[e + 1] - pair[1])
                packed[e // 2] = ptx.pack(low, high, self.dtype)

    @cute.jit
    def _share_ds(self, c: KeyOwner, shared: Shared, step: Int32):
        """dS^T to shared memory, transposed on the way, for the warpgroup that computes dQ."""
        piece = shared.ds_ring.stage(step) * self.wgs + c.wg
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, self.products.scores()).get_slice(thread)
        values = cute.make_tensor(c.P.iterator, cute.make_layout(c.S.shape))
        target = copy.partition_D(shared.sdS_columns[None, None, piece])
        cute.copy(atom, copy.retile(values), target)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            shared.ds_ring.publish(step)

    # ---- epilogue -------------------------------------------------------------------------------
    @cute.jit
    def _store(
        self, tensors: Globals, scalars: Scalars, shared: Shared, work: Work, c: KeyOwner,
        num_steps: Int32,
    ):  # fmt: skip
        """dV through the warpgroup's own V, dK through its K once dQ no longer needs that."""
        dK = flat(c.dK)
        for e in cutlass.range_constexpr(cute.size(dK)):
            dK[e] = dK[e] * scalars.softmax_scale
        if cutlass.const_expr(self.traits.varlen):
            if (work.block * self.wgs + c.wg + 1) * KEYS <= work.extent.seqlen_k:
                self._store_whole(tensors, shared, work, c, num_steps)
            else:
                # TMA clips at the tensor's end, not at the sequence's.
                self._store_rows(c.dV, tensors.mdV_plain, work, c.wg)
                self._store_rows(c.dK, tensors.mdK_plain, work, c.wg)
        else:
            self._store_whole(tensors, shared, work, c, num_steps)

    @cute.jit
    def _store_whole(
        self, tensors: Globals, shared: Shared, work: Work, c: KeyOwner, num_steps: Int32
    ):
        dv, dk = (self.products.sums(n) for n in (self.traits.head_dim_v, self.traits.head_dim))
        sdV, sdK = shared.sV[None, None, c.wg], shared.sK[None, None, c.wg]
        self._store_tile(dv, c.dV, sdV, tensors.tma_dv, tensors.mdV, work, c.wg)
        if num_steps > 0:
            # Until the last step's dS was used, and with it K.
            shared.ds_ring.wait_empty(num_steps - 1 + self.config.ds_stages)
        self._store_tile(dk, c.dK, sdK, tensors.tma_dk, tensors.mdK, work, c.wg)
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def _store_tile(self, mma, values, target, atom, m, work: Work, wg: Int32):
        """A warpgroup's [64, D] to shared memory and out by TMA."""
        group_barrier(wg)
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(store, mma).get_slice(thread)
        narrow = cute.make_rmem_tensor(values.shape, self.dtype)
        sm.pack_operand(flat(values), flat(cute.recast_tensor(narrow, Int32)), self.dtype)
        cute.copy(store, copy.retile(narrow), copy.partition_D(target))
        cute.arch.fence_proxy("async.shared", space="cta")
        group_barrier(wg)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            rows = tokens_of(m, work.kv_head, work.batch, work.extent.offset_k, self.traits.varlen)
            dim = cute.size(target, mode=[1])
            g = cute.local_tile(rows, (KEYS, dim), (work.block * self.wgs + wg, 0))
            in_shared, in_global = _tma_pair(atom, target, g)
            cute.copy(atom, in_shared, in_global)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _store_rows(self, values: cute.Tensor, m: cute.Tensor, work: Work, wg: Int32):
        """The last keys of a packed sequence, row by row from registers."""
        rows = cute.domain_offset((work.extent.offset_k, 0), m[None, None, work.kv_head])
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        first = (work.block * self.wgs + wg) * KEYS + thread // 32 * 16 + thread % 32 // 4
        output = flat(values)
        for e in cutlass.range_constexpr(cute.size(output)):
            row = first + 8 * accumulator_row(e)
            column = 2 * (thread % 4) + accumulator_column(e)
            if (row < work.extent.seqlen_k) & (column < rows.shape[1]):
                rows[row, column] = output[e].to(self.dtype)


def _pair(statistics: cute.Tensor, start):
    """Two neighbouring words of a stage's statistics, one 8-byte access."""
    pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    cute.autovec_copy(cute.local_tile(statistics, (2,), (start // 2,)), pair)
    return pair


@cute.jit
def _multiply(mma, accumulator, a, b, clear: cutlass.Constexpr[bool]):
    """Issue accumulator (+)= a b, asynchronously, as one group."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, not (clear and k == 0))
        cute.gemm(mma, accumulator, a[None, None, k], b[None, None, k], accumulator)
    warpgroup.commit_group()
