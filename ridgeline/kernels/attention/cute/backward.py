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

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from ridgeline.kernels.attention.cute.backward_keys import Keys
from ridgeline.kernels.attention.cute.backward_queries import TURN_STAGES, Queries
from ridgeline.kernels.attention.cute.backward_rows import (
    THREADS,
    Rows,
    RowTensors,
    Tiles,
    packed_sequence,
)
from ridgeline.kernels.attention.cute.backward_types import (
    Globals,
    Layouts,
    Scalars,
    Shared,
    Work,
)
from ridgeline.kernels.attention.cute.blocks import key_order, query_range, window_span
from ridgeline.kernels.attention.cute.forward import DeviceInteger, modes, one_stage
from ridgeline.kernels.attention.cute.mainloop import DTYPES
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS, Ring
from ridgeline.kernels.attention.cute.scheduler import TileOrder
from ridgeline.kernels.attention.cute.seqlens import Lengths
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    HELPER_REGISTERS,
    KEYS,
    ROW_STATISTICS,
    BackwardConfig,
    BackwardTraits,
    ahead_warps,
    is_ordered,
    is_overlapped,
    is_persistent,
    is_zeroing,
    keys_per_block,
    registers,
)

KV_STAGES = 2
"""Of K and V, where a block of threads has several blocks of keys."""
RECORD_WORDS = 4
"""A number and its place: block, head, batch."""


class Backward:
    """The kernels for one (traits, config); `__call__` is the host function that is compiled."""

    overlapped = False
    kv_stages = 1

    def __init__(self, traits: BackwardTraits, config: BackwardConfig):
        self.traits = traits
        self.config = config
        self.dtype = DTYPES[traits.dtype]
        self.wgs = config.num_warpgroups
        self.others = 2 if config.helpers else 1
        self.threads = WARPGROUP_THREADS * (self.wgs + self.others)
        self.queries = Queries(traits, config)
        self.keys = Keys(traits, config)
        self.rows = Rows(traits, config)
        self.kv_stages = KV_STAGES if is_persistent(config) else 1
        # Those who work for later and earlier blocks may fall behind a little.
        self.record_stages, self.record_words = (4, RECORD_WORDS) if config.quick_end else (2, 1)
        self.overlapped = is_overlapped(config)
        # In turns, blocks of a bounded mask add from the last keys to the first, and so they start:
        # then whatever is waited for has started before.
        self.last_keys_first = traits.deterministic and (traits.has_left or traits.has_right)
        # But that ends with the longest walks, most of the multiprocessors idle beside them. So the
        # last heads go the other way around: first keys first, queries from last to first.
        self.turned = 0 if traits.has_left or traits.varlen else config.turned_sections

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
        dlse: cute.Tensor,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
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
        has_dlse: Int32,
        together: Int32,
        stream,
    ):
        """q, dq [B, S, H, D]; k, dk [B, T, G, D]; v, dv [B, T, G, V]; o, dout [B, S, H, V];
        lse, dlse [B, H, S], dlse read only if has_dlse. Packed: the same without B, tokens for
        S and T. Where seqused are given, rows behind them are not read, and those of dq, dk and dv
        are not written."""
        packed = self.traits.varlen
        by_token = (0, 2, 1) if packed else (1, 3, 2, 0)
        by_row = (1, 0) if packed else (2, 1, 0)
        mO, mdO, mdQ = (modes(x, by_token) for x in (o, dout, dq))
        rows = RowTensors(mO, mdO, modes(lse, by_row), modes(dlse, by_row), has_dlse, mdQ)
        lengths = Lengths(q.shape[0 if packed else 1], k.shape[0 if packed else 1],
                          cu_seqlens_q, cu_seqlens_k, seqused_k, seqused_q)  # fmt: skip
        num_batches = cu_seqlens_q.shape[0] - 1 if packed else q.shape[0]
        block_q, block_k = self.config.block_q, keys_per_block(self.config)
        num_blocks = (longest_q + block_q - 1) // block_q
        order = None
        if cutlass.const_expr(is_ordered(self.config)):
            sizes = (longest_k + block_k - 1) // block_k, k.shape[2], num_batches
            span = None
            if cutlass.const_expr(self.traits.has_left):
                span = window_span(window_left, block_k)
            bounds = span, self.traits.has_right
            order = key_order(sizes, heads_per_section, bounds, DeviceInteger)
        tiles = Tiles(lengths, num_blocks, num_batches if packed else None, order)
        grid = (num_blocks, mdQ.shape[2], num_batches)
        rest = None
        if cutlass.const_expr(packed):
            grid = (q.shape[0] // block_q + num_batches, mdQ.shape[2], 1)
            if cutlass.const_expr(not self.traits.seqused):
                rest = (dq, dk, dv)
        self.rows.before(rows, statistics, dq_sum, turns, tiles, rest).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream
        )
        layouts = self._layouts()
        tensors = self._globals(
            [modes(x, by_token) for x in (q, dout, k, v, dk, dv)],
            (statistics, dq_sum, turns, tiles, rows if is_zeroing(self.config) else None),
            (longest_k + block_k - 1) // block_k,
            num_batches,
            layouts,
        )
        scalars = Scalars(
            softmax_scale, softcap, window_left, window_right, heads_per_section, together
        )
        order = self._order(tensors, scalars)
        num_blocks = order.num_tiles()
        if cutlass.const_expr(packed):
            num_blocks = (k.shape[0] // block_k + num_batches) * k.shape[1]
        self._launch(tensors, scalars, layouts, num_blocks, stream)
        self.rows.after(dq_sum, mdQ, softmax_scale, tiles).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream, use_pdl=self.overlapped
        )

    def _launch(self, tensors: Globals, scalars: Scalars, layouts: Layouts, num_blocks, stream):
        """The main kernel on that many blocks of keys."""
        self.kernel(tensors, scalars, layouts).launch(
            grid=(num_blocks, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.overlapped,
        )

    def _layouts(self) -> Layouts:
        """Row layouts are swizzled for WGMMA, their transposed views address the same bytes."""
        cfg, dims = self.config, self.traits
        pieces, kv_pieces = cfg.ds_stages * self.wgs, self.kv_stages * self.wgs
        return Layouts(
            q=self._row_layout(cfg.block_q, dims.head_dim, cfg.stages),
            q_columns=self._column_layout(dims.head_dim, cfg.block_q, cfg.stages),
            do=self._row_layout(cfg.block_q, dims.head_dim_v, cfg.stages),
            do_columns=self._column_layout(dims.head_dim_v, cfg.block_q, cfg.stages),
            k=self._row_layout(KEYS, dims.head_dim, kv_pieces),
            k_columns=self._column_layout(dims.head_dim, KEYS, kv_pieces),
            v=self._row_layout(KEYS, dims.head_dim_v, kv_pieces),
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
        views = {}
        for tensor, (name, op, layout, tile) in zip(tensors, self._atoms(layouts), strict=True):
            atom, view = cpasync.make_tiled_tma_atom(
                op, tensor, one_stage(layout), tile, self._copies(name)
            )
            views["tma_" + name.lower()] = atom
            views["m" + name] = view
        dk, dv = tensors[4:]
        statistics, dq_sum, turns, tiles, rows = buffers
        return Globals(
            mdK_plain=dk,
            mdV_plain=dv,
            statistics=statistics,
            dq_sum=dq_sum,
            turns=turns,
            tiles=tiles,
            rows=rows,
            num_key_blocks=num_key_blocks,
            num_batches=num_batches,
            **views,
        )

    def _atoms(self, layouts: Layouts) -> list:
        """(name, operation, layout, tile) of what TMA moves."""
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        dim, dim_v, block_q = self.traits.head_dim, self.traits.head_dim_v, self.config.block_q
        return [
            ("Q", load, layouts.q, (block_q, dim)),
            ("dO", load, layouts.do, (block_q, dim_v)),
            ("K", load, layouts.k, (KEYS, dim)),
            ("V", load, layouts.v, (KEYS, dim_v)),
            ("dK", store, layouts.k, (KEYS, dim)),
            ("dV", store, layouts.v, (KEYS, dim_v)),
        ]

    def _copies(self, name: str) -> int:
        """Blocks of threads that bring a part each of a tile for all."""
        return 1

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
        self._begin(tensors, shared)
        if cutlass.const_expr(self.overlapped):
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        other_registers, key_registers = registers(self.config)
        # One branch a role, or ptxas drops setmaxnreg; each works out its own tile, which keeps
        # those values from living across the branch.
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(other_registers)
            work = self._work(tensors, scalars)
            if self._exists(work):
                self.queries.serve(tensors, scalars, shared, work)
            if cutlass.const_expr(self.overlapped):
                # Also where there is nothing to do: what comes after needs what was before.
                cute.arch.griddepcontrol_wait()
        elif warp_index < 4 * self.others:
            cute.arch.setmaxregister_decrease(HELPER_REGISTERS)
            work = self._work(tensors, scalars)
            if self._exists(work):
                self.queries.help(tensors, scalars, shared, work)
        else:
            cute.arch.setmaxregister_increase(key_registers)
            work = self._work(tensors, scalars)
            if self._exists(work):
                wg = warp_index // 4 - self.others
                self.keys.own_keys(tensors, scalars, shared, work, wg)

    @cute.jit
    def _begin(self, tensors: Globals, shared: Any):
        """The first warp: descriptors and barriers; all meet afterwards."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            for atom in (tensors.tma_q, tensors.tma_do, tensors.tma_k, tensors.tma_v):
                cpasync.prefetch_descriptor(atom)
            cpasync.prefetch_descriptor(tensors.tma_dk)
            cpasync.prefetch_descriptor(tensors.tma_dv)
            if cute.arch.lane_idx() == 0:
                self._init_barriers(shared)
            cute.arch.mbarrier_init_fence()

    def _exists(self, work: Work):
        """False for blocks behind the end of a sequence shorter than the longest."""
        return work.block * keys_per_block(self.config) < work.extent.seqlen_k

    @cute.jit
    def _packed_block(self, tensors: Globals, scalars: Scalars, index: Int32):
        """(blocks, block, head, sequence) of a number, from the last block. Sequence after
        sequence, in each as in a dense call: by sections of heads whose rows stay in L2."""
        block_k, num_heads = keys_per_block(self.config), tensors.mK.shape[2]
        starts = tensors.tiles.lengths.cu_seqlens_k
        batch = packed_sequence(starts, tensors.num_batches, block_k, index // num_heads)
        begin = starts[batch] // block_k + batch
        end = self._num_indices() // num_heads
        if batch + 1 < tensors.num_batches:
            end = starts[batch + 1] // block_k + batch + 1
        order = TileOrder(end - begin, num_heads, 1, scalars.heads_per_section)
        block, head, _ = order.coordinates(index - begin * num_heads, cutlass.min)
        return end - begin, block, head, batch

    def _index(self):
        """The number of the block of keys."""
        index, _, _ = cute.arch.block_idx()
        return index

    def _num_indices(self):
        """How many numbers there are."""
        grid, _, _ = cute.arch.grid_dim()
        return grid

    def _work(self, tensors: Globals, scalars: Scalars) -> Work:
        """Of this block of threads."""
        return self._work_of(tensors, scalars, self._index())

    @cute.jit
    def _work_of(self, tensors: Globals, scalars: Scalars, index: Int32) -> Work:
        """Of a block of keys by its number."""
        return self._work_at(tensors, scalars, *self._place(tensors, scalars, index))

    @cute.jit
    def _place(self, tensors: Globals, scalars: Scalars, index: Int32):
        """(block, head, batch) of a number."""
        block, head, batch = Int32(0), Int32(0), Int32(0)
        if cutlass.const_expr(self.traits.varlen):
            num_blocks, block, head, batch = self._packed_block(tensors, scalars, index)
            if cutlass.const_expr(not self.last_keys_first):
                block = num_blocks - 1 - block
        elif cutlass.const_expr(is_ordered(self.config)):
            block, head, batch = tensors.tiles.order.coordinates(index, DeviceInteger)
        else:
            block, head, batch = self._order(tensors, scalars).coordinates(index, cutlass.min)
            if cutlass.const_expr(not self.last_keys_first):
                # A causal mask leaves the first keys most work: they start first.
                block = tensors.num_key_blocks - 1 - block
        return block, head, batch

    @cute.jit
    def _work_at(
        self, tensors: Globals, scalars: Scalars, block: Int32, head: Int32, batch: Int32
    ) -> Work:
        """Of a block of keys of a head."""
        down = None
        if cutlass.const_expr(self.last_keys_first and self.turned > 0):
            heads = tensors.mK.shape[2] * tensors.num_batches
            turned = self.turned * scalars.heads_per_section
            # With fewer heads all would walk down from the start, one waiting for the other.
            whole = heads >= 2 * turned
            down = whole & (batch * tensors.mK.shape[2] + head >= heads - turned)
            block = cutlass.select_(down, tensors.num_key_blocks - 1 - block, block)
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
        first = Int32(queries.begin)
        if cutlass.const_expr(not (self.traits.has_left or self.traits.has_right)):
            # Without a mask all blocks of a head would walk in step and add to the same rows of dQ
            # at the same time; so they start apart.
            num_blocks = (extent.seqlen_k + block_k - 1) // block_k
            first = block * queries.end // num_blocks
            if cutlass.const_expr(self.traits.deterministic):
                first = cutlass.select_(scalars.together != 0, first, Int32(0))
        if cutlass.const_expr(down is not None):
            first = cutlass.select_(down, queries.end - 1, first)
        return Work(block, head, batch, extent, queries, group, first, down)

    @cute.jit
    def _shared(self, layouts: Layouts) -> Shared:
        cfg = self.config
        smem = SmemAllocator()
        num_barriers = 4 * cfg.stages + 2 * cfg.ds_stages
        num_barriers += 4 * TURN_STAGES
        more = 2 * (self.kv_stages + self.record_stages)
        barriers = smem.allocate_array(Int64, num_barriers + more)
        statistics = smem.allocate_tensor(
            Float32, cute.make_layout((ROW_STATISTICS * cfg.block_q, cfg.stages)), 128
        )

        def tensor(layout):
            return smem.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)

        sQ, sdO, sK, sV = (tensor(x) for x in (layouts.q, layouts.do, layouts.k, layouts.v))
        sdS = tensor(layouts.ds)
        records = None
        if cutlass.const_expr(is_persistent(cfg)):
            words = self.record_stages * self.record_words
            records = smem.allocate_tensor(Int32, cute.make_layout(words), 16)
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
            turn_ring=Ring(barriers + num_barriers - 4 * TURN_STAGES, TURN_STAGES),
            added_ring=Ring(barriers + num_barriers - 2 * TURN_STAGES, TURN_STAGES),
            kv_ring=Ring(barriers + num_barriers, self.kv_stages),
            record_ring=Ring(barriers + num_barriers + 2 * self.kv_stages, self.record_stages),
            sRecord=records,
        )

    @cute.jit
    def _init_barriers(self, shared: Shared):
        key_warps = 4 * self.wgs
        shared.q_ring.init(1, key_warps)
        shared.do_ring.init(1, key_warps)
        shared.ds_ring.init(key_warps, 4)
        shared.turn_ring.init(1, 4)
        shared.added_ring.init(4, 1)
        # Whose dK and dV leave through K and V says when they have, one a warpgroup; else whoever
        # has read K or V, dQ's warpgroup among them, one a warp.
        shared.kv_ring.init(1, key_warps + 4 if self.config.quick_end else self.wgs)
        if cutlass.const_expr(is_persistent(self.config)):
            helping = 2 if self.traits.deterministic else sum(ahead_warps(self.config))
            shared.record_ring.init(1, key_warps + 4 + helping)
