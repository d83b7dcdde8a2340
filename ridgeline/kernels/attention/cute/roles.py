"""The backward by roles on Hopper: head dims up to 256, and softcap.

Same formulas and the same two small kernels as backward.py; another division of the main one. dK
and dV of 64 keys fill a warpgroup's registers each at head dim 256, so warpgroups divide products:

    scores      S^T = K Q^T, P^T, dV += P^T dO      | P in 16 bits through shared memory
    gradients   dP^T = V dO^T, dS^T, dK += dS^T Q   | dS in 16 bits through shared memory
    dQ          dQ = dS K, added in global memory
    loads       Q, dO and their statistics

What bounds it is the way to L2: with 64 keys a block of threads, Q, dO and fp32 dQ cost twice the
bytes per product of backward.py's 128. So two blocks form a pair (a cluster): Q and dO are read
once and multicast to both, and dQ of both blocks' 128 keys is computed by one of them, in turns,
from its own dS and the other's, which comes through distributed shared memory.

Source: the division and the pair are our own; clusters, multicast and distributed shared memory:
NVIDIA, "CUDA C++ Programming Guide", sections on thread block clusters and asynchronous copies.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ridgeline.kernels.attention.cute.backward import Backward
from ridgeline.kernels.attention.cute.backward_rows import Rows
from ridgeline.kernels.attention.cute.backward_types import Globals, Layouts, Scalars
from ridgeline.kernels.attention.cute.mainloop import DTYPES
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS, Ring
from ridgeline.kernels.attention.cute.roles_keys import RoleKeys
from ridgeline.kernels.attention.cute.roles_queries import RoleQueries
from ridgeline.kernels.attention.cute.roles_types import DQ, LOADS, SCORES, WORDS, Shared
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    KEYS,
    ROW_STATISTICS,
    BackwardTraits,
)
from ridgeline.kernels.attention.cute_sm90_roles_config import RolesConfig, pieces, registers

DS_STAGES = 2


class BackwardByRoles(Backward):
    """The kernels for one (traits, config); what is not here is Backward's."""

    def __init__(self, traits: BackwardTraits, config: RolesConfig):
        self.traits = traits
        self.config = config
        self.dtype = DTYPES[traits.dtype]
        self.wgs = self.ranks = config.num_warpgroups
        self.threads = 4 * WARPGROUP_THREADS
        self.role_queries = RoleQueries(traits, config)
        self.role_keys = RoleKeys(traits, config, self.dtype)
        self.rows = Rows(traits, config)
        self.last_keys_first = traits.deterministic and (traits.has_left or traits.has_right)
        self.turned = 0

    # ---- host -----------------------------------------------------------------------------------
    def _layouts(self) -> Layouts:
        cfg, dims = self.config, self.traits
        return Layouts(
            q=self._row_layout(cfg.block_q, dims.head_dim, cfg.stages),
            q_columns=self._column_layout(dims.head_dim, cfg.block_q, cfg.stages),
            do=self._row_layout(cfg.block_q, dims.head_dim_v, cfg.do_stages),
            do_columns=self._column_layout(dims.head_dim_v, cfg.block_q, cfg.do_stages),
            k=self._row_layout(KEYS, dims.head_dim, self.ranks),
            k_columns=self._column_layout(dims.head_dim, KEYS, self.ranks),
            v=self._row_layout(KEYS, dims.head_dim_v, 1),
            ds=self._row_layout(cfg.block_q, KEYS, pieces(cfg)),
            ds_columns=self._column_layout(KEYS, cfg.block_q, pieces(cfg)),
        )

    def _atoms(self, layouts: Layouts) -> list:
        """Backward's, but for multicast of Q and dO to a pair."""
        plain = super()._atoms(layouts)
        if not self.config.pair:
            return plain
        multicast = cpasync.CopyBulkTensorTileG2SMulticastOp()
        return [
            (name, multicast if name in ("Q", "dO") else op, layout, tile)
            for name, op, layout, tile in plain
        ]

    def _copies(self, name: str) -> int:
        """Blocks of threads that bring a part each of a tile for all."""
        return self.ranks if name in ("Q", "dO") else 1

    def _launch(self, tensors: Globals, scalars: Scalars, layouts: Layouts, num_blocks, stream):
        self.role_kernel(tensors, scalars, layouts).launch(
            grid=(num_blocks * self.ranks, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.ranks, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    # ---- device ---------------------------------------------------------------------------------
    @cute.kernel
    def role_kernel(self, tensors: Globals, scalars: Scalars, layouts: Layouts):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self._role_shared(layouts)
        self._begin(tensors, shared)
        self._meet()
        dq_registers, load_registers, key_registers = registers(self.config)
        # One branch a role, or ptxas drops setmaxnreg; each works out its own tile, which keeps
        # those values from living across the branch.
        if warp_index // 4 == DQ:
            cute.arch.setmaxregister_decrease(dq_registers)
            work = self._work(tensors, scalars)
            if self._exists(work):
                self.role_queries.compute_dq(tensors, scalars, shared, work)
            self._leave()
        elif warp_index // 4 == LOADS:
            cute.arch.setmaxregister_decrease(load_registers)
            work = self._work(tensors, scalars)
            if self._exists(work) & (warp_index == 4 * LOADS):
                self.role_queries.load(tensors, shared, work)
            self._leave()
        elif warp_index // 4 == SCORES:
            cute.arch.setmaxregister_increase(key_registers)
            work = self._work(tensors, scalars)
            if self._exists(work):
                self.role_keys.own_scores(tensors, scalars, shared, work)
            self._leave()
        else:
            cute.arch.setmaxregister_increase(key_registers)
            work = self._work(tensors, scalars)
            if self._exists(work):
                self.role_keys.own_gradients(tensors, scalars, shared, work)
            self._leave()

    def _meet(self):
        """Barriers are there, in every block of the pair."""
        cute.arch.sync_threads()
        if self.config.pair:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def _leave(self):
        """No block of a pair goes while the other may still arrive at its barriers."""
        if self.config.pair:
            cute.arch.sync_warp()
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def _index(self):
        index, _, _ = cute.arch.block_idx()
        return index // self.ranks

    def _num_indices(self):
        grid, _, _ = cute.arch.grid_dim()
        return grid // self.ranks

    @cute.jit
    def _role_shared(self, layouts: Layouts) -> Shared:
        cfg = self.config
        smem = SmemAllocator()
        words = 2 * (cfg.stages + cfg.do_stages + 1 + DS_STAGES)
        barriers = smem.allocate_array(Int64, words + 1)
        statistics = smem.allocate_tensor(
            Float32, cute.make_layout((ROW_STATISTICS * cfg.block_q, cfg.stages)), 128
        )

        def tensor(layout):
            return smem.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)

        sQ, sdO, sK, sV = (tensor(x) for x in (layouts.q, layouts.do, layouts.k, layouts.v))
        sdS = tensor(layouts.ds)
        sP = smem.allocate_tensor(Int32, cute.make_layout(WORDS * 4 * WARPGROUP_THREADS), 128)
        q_ring = Ring(barriers, cfg.stages)
        do_ring = Ring(barriers + 2 * cfg.stages, cfg.do_stages)
        p_ring = Ring(barriers + 2 * (cfg.stages + cfg.do_stages), 1)
        ds_ring = Ring(barriers + 2 * (cfg.stages + cfg.do_stages + 1), DS_STAGES)
        rank = Int32(0)
        if cutlass.const_expr(cfg.pair):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
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
            sP=sP,
            sStatistics=statistics,
            q_ring=q_ring,
            do_ring=do_ring,
            p_ring=p_ring,
            ds_ring=ds_ring,
            kv_barrier=barriers + words,
            rank=rank,
        )

    @cute.jit
    def _init_barriers(self, shared: Shared):
        shared.q_ring.init(1, 8 * self.ranks)
        shared.do_ring.init(1, 8 * self.ranks)
        shared.p_ring.init(4, 4)
        # Of a pair: four warps here, and the announcement of the other block's bytes.
        shared.ds_ring.init(4 + self.ranks - 1, 4)
        cute.arch.mbarrier_init(shared.kv_barrier, 1)
