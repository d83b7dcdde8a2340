"""The other two warpgroups of the backward by roles: one loads, one computes dQ = dS K and adds it.

Of a pair each block computes every other step's dQ, of both blocks' keys: so each tile of dQ is
added once a step of 128 keys, and each block has two steps' time for it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from ridgeline.kernels.attention.cute import ptx
from ridgeline.kernels.attention.cute.backward_queries import Queries
from ridgeline.kernels.attention.cute.backward_types import Globals, Scalars, Work
from ridgeline.kernels.attention.cute.mainloop import DTYPES
from ridgeline.kernels.attention.cute.pipeline import Ring
from ridgeline.kernels.attention.cute.roles_types import Role, Shared
from ridgeline.kernels.attention.cute.seqlens import tokens_of
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    KEYS,
    ROW_STATISTICS,
    BackwardTraits,
)
from ridgeline.kernels.attention.cute_sm90_roles_config import RolesConfig, dq_columns

EVERYONE = 3
"""Multicast mask of a pair."""


class RoleQueries(Queries, Role):
    """Loads, dQ, and its sum in global memory."""

    def __init__(self, traits: BackwardTraits, config: RolesConfig):
        Role.__init__(self, traits, config, DTYPES[traits.dtype])
        self.wgs = config.num_warpgroups

    # ---- loads ----------------------------------------------------------------------------------
    @cute.jit
    def load(self, tensors: Globals, shared: Shared, work: Work):
        """One warp: K and V, then Q and dO of every step as room is made."""
        self._load_kv(tensors, shared, work)
        num_steps = work.num_steps()
        size, block_q = self.dtype.width // 8, self.config.block_q
        dim, dim_v = self.traits.head_dim, self.traits.head_dim_v
        words = ROW_STATISTICS * block_q
        for step in cutlass.range(num_steps, unroll=1):
            head, block = work.at(step)
            ring, stage = shared.q_ring, shared.q_ring.stage(step)
            ring.wait_empty(step)
            with cute.arch.elect_one():
                ring.expect(step, block_q * dim * size + 4 * words)
            rows = tokens_of(tensors.mQ, head, work.batch, work.extent.offset_q, self.traits.varlen)
            tile = cute.local_tile(rows, (block_q, dim), (block, 0))
            self._copy(tensors.tma_q, tile, shared.sQ, stage, ring, step, shared.rank)
            tile_index = work.first_tile(tensors, block_q) + block
            source = tensors.statistics[tile_index, head, None].iterator
            with cute.arch.elect_one():
                target = shared.sStatistics[None, stage].iterator
                ptx.bulk_load(target, source, 4 * words, ring.full(step))
            ring, stage = shared.do_ring, shared.do_ring.stage(step)
            ring.wait_empty(step)
            with cute.arch.elect_one():
                ring.expect(step, block_q * dim_v * size)
            rows = tokens_of(
                tensors.mdO, head, work.batch, work.extent.offset_q, self.traits.varlen
            )
            tile = cute.local_tile(rows, (block_q, dim_v), (block, 0))
            self._copy(tensors.tma_do, tile, shared.sdO, stage, ring, step, shared.rank)

    @cute.jit
    def _copy(self, atom, tile, target, stage: Int32, ring: Ring, step: Int32, rank: Int32):
        """A tile into a stage; of a pair each block brings half of it to both."""
        in_shared, in_global = cpasync.tma_partition(
            atom,
            rank if self.config.pair else 0,
            cute.make_layout(self.ranks),
            cute.group_modes(target, 0, 2),
            cute.group_modes(tile, 0, 2),
        )
        if cutlass.const_expr(self.config.pair):
            cute.copy(
                atom,
                in_global,
                in_shared[None, stage],
                tma_bar_ptr=ring.full(step),
                mcast_mask=cutlass.Int16(EVERYONE),
            )
        else:
            cute.copy(atom, in_global, in_shared[None, stage], tma_bar_ptr=ring.full(step))

    @cute.jit
    def _load_kv(self, tensors: Globals, shared: Shared, work: Work):
        """K of the whole pair, for dQ, and this block's V."""
        dim, dim_v = self.traits.head_dim, self.traits.head_dim_v
        num_bytes = KEYS * (self.ranks * dim + dim_v) * self.dtype.width // 8
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(shared.kv_barrier, num_bytes)
        first, whole = work.block * self.ranks, cute.make_layout(1)
        mK, mV = (
            tokens_of(m, work.kv_head, work.batch, work.extent.offset_k, self.traits.varlen)
            for m in (tensors.mK, tensors.mV)
        )
        for w in cutlass.range_constexpr(self.ranks):
            tile = cute.local_tile(mK, (KEYS, dim), (first + w, 0))
            in_shared, in_global = cpasync.tma_partition(
                tensors.tma_k,
                0,
                whole,
                cute.group_modes(shared.sK, 0, 2),
                cute.group_modes(tile, 0, 2),
            )
            cute.copy(tensors.tma_k, in_global, in_shared[None, w], tma_bar_ptr=shared.kv_barrier)
        tile = cute.local_tile(mV, (KEYS, dim_v), (first + shared.rank, 0))
        in_shared, in_global = cpasync.tma_partition(
            tensors.tma_v, 0, whole, cute.group_modes(shared.sV, 0, 2), cute.group_modes(tile, 0, 2)
        )
        cute.copy(tensors.tma_v, in_global, in_shared[None, 0], tma_bar_ptr=shared.kv_barrier)

    # ---- dQ -------------------------------------------------------------------------------------
    @cute.jit
    def compute_dq(self, tensors: Globals, scalars: Scalars, shared: Shared, work: Work):
        """dQ = dS K of every step, or of a pair's every other one, added in global memory."""
        num_steps = work.num_steps()
        cute.arch.mbarrier_wait(shared.kv_barrier, 0)
        mma = self.products.dq()
        columns = dq_columns(self.traits)
        parts = self.traits.head_dim // columns
        shape = mma.partition_shape_C((self.config.block_q, columns))
        dQ = cute.make_rmem_tensor(shape, Float32)
        first = shared.rank if self.config.pair else Int32(0)
        self._accept(shared, first)
        for step in cutlass.range(first, num_steps, self.ranks, unroll=1):
            shared.ds_ring.wait_full(step)
            self._await_turn(tensors, scalars, work, step)
            for part in cutlass.range_constexpr(parts):
                self._issue_part(shared, mma, dQ, shared.ds_ring.stage(step), part)
                warpgroup.wait_group(0)
                if cutlass.const_expr(part == parts - 1):
                    self._accept(shared, step + 2)
                    self.release(shared.ds_ring, step)
                self._add_dq(tensors, shared, work, dQ, step, part)  # pyright: ignore[reportArgumentType]
            self._pass_turn(tensors, work, step)

    @cute.jit
    def _accept(self, shared: Shared, step: Int32):
        """Of a pair: let the other block's dS of a step of this one come in."""
        if cutlass.const_expr(self.config.pair):
            if cute.arch.thread_idx()[0] == 0:
                num_bytes = self.config.block_q * KEYS * self.dtype.width // 8
                shared.ds_ring.expect(step, num_bytes)

    @cute.jit
    def _issue_part(self, shared: Shared, mma, dQ: cute.Tensor, stage: Int32, part: int):
        """Some columns of dQ = dS K, over the keys of the block or the pair."""
        columns = dq_columns(self.traits)
        sK = cute.local_tile(shared.sK_columns, (columns, KEYS), (part, 0, None))
        thread = mma.get_slice(0)
        tdS = mma.make_fragment_A(thread.partition_A(shared.sdS))
        tK = mma.make_fragment_B(thread.partition_B(sK))
        warpgroup.fence()
        for w in cutlass.range_constexpr(self.ranks):
            for k in cutlass.range_constexpr(KEYS // 16):
                mma.set(warpgroup.Field.ACCUMULATE, w + k > 0)
                piece = w if self.config.pair else stage
                cute.gemm(mma, dQ, tdS[None, None, k, piece], tK[None, None, k, w], dQ)
        warpgroup.commit_group()
