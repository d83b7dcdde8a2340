"""What the warpgroups of the backward by roles share: shared memory, hand-overs."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from ridgeline.kernels.attention.cute import softmax as sm
from ridgeline.kernels.attention.cute.backward_types import Products, Work
from ridgeline.kernels.attention.cute.forward import tma_pair
from ridgeline.kernels.attention.cute.mainloop import flat
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS, Ring
from ridgeline.kernels.attention.cute.seqlens import tokens_of
from ridgeline.kernels.attention.cute.tails import clear_rows, store_rows
from ridgeline.kernels.attention.cute_sm90_backward_config import KEYS, BackwardTraits
from ridgeline.kernels.attention.cute_sm90_roles_config import RolesConfig, dq_columns

DQ, LOADS, SCORES, GRADIENTS = range(4)
"""Warpgroups by number."""
WORDS = 4
"""32-bit words of a 16-byte access."""
WIDEST = 192
"""Columns of a product's instruction."""


@dataclass(frozen=True)
class Shared:
    """Shared memory of a block of threads. Columns: the transposed view of the same bytes."""

    sQ: cute.Tensor
    """[block_q, D, stages]"""
    sQ_columns: cute.Tensor
    sdO: cute.Tensor
    """[block_q, V, do_stages]"""
    sdO_columns: cute.Tensor
    sK: cute.Tensor
    """[64, D, ranks]: K of every block of a pair, its own at its rank"""
    sK_columns: cute.Tensor
    sV: cute.Tensor
    """[64, V, 1]"""
    sdS: cute.Tensor
    """[block_q, 64, pieces]: by stage; of a pair by the rank it comes from, then what goes out"""
    sdS_columns: cute.Tensor
    sP: cute.Tensor
    """int32 [16 * 128]: P^T in 16 bits, in the order of a warpgroup's registers"""
    sStatistics: cute.Tensor
    """fp32 [2 * block_q, stages]"""
    q_ring: Ring
    do_ring: Ring
    p_ring: Ring
    ds_ring: Ring
    """Two stages. Of a pair: the stage is the rank that computes a step's dQ; a block has its own
    full barrier and both empty ones."""
    kv_barrier: cute.Pointer
    rank: Int32
    """Of this block in its pair, or 0."""


class RoleProducts(Products):
    """The five matrix products as WGMMAs of one warpgroup."""

    def sums(self, columns: int) -> cute.TiledMma:
        """dK or dV [64, columns], operand A from registers. ptxas takes no instruction whose
        registers alone exceed those of the launch: wide ones become two."""
        return super().sums(columns if columns <= WIDEST else columns // 2)

    def dq(self) -> cute.TiledMma:
        """Some columns of dQ [block_q, D] = dS K."""
        source = cute.nvgpu.warpgroup.OperandSource.SMEM
        return self._mma(dq_columns(self.traits), source, cute.nvgpu.OperandMajorMode.MN)


class Role:
    """What every role needs: releases that reach the whole pair, and tiles on their way out."""

    def __init__(self, traits: BackwardTraits, config: RolesConfig, dtype):
        self.traits = traits
        self.config = config
        self.dtype = dtype
        self.ranks = config.num_warpgroups
        self.products = RoleProducts(traits, config)  # pyright: ignore[reportArgumentType]

    @cute.jit
    def release(self, ring: Ring, position: Int32):
        """One arrival a warp, in each block of the pair: what is multicast needs room in both."""
        lane = cute.arch.lane_idx()
        if lane < self.ranks:
            if cutlass.const_expr(self.config.pair):
                cute.arch.mbarrier_arrive(ring.empty(position), lane)
            else:
                ring.release(position)

    @cute.jit
    def release_here(self, ring: Ring, position: Int32):
        if cute.arch.lane_idx() == 0:
            ring.release(position)

    @cute.jit
    def publish(self, ring: Ring, position: Int32):
        """One arrival a warp: its stores to shared memory are done."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            ring.publish(position)

    def group_barrier(self, role: int) -> None:
        """All threads of one warpgroup; barrier 0 is the block's."""
        cute.arch.barrier(barrier_id=1 + role, number_of_threads=WARPGROUP_THREADS)

    @cute.jit
    def clear_rows(
        self, tile: cute.Tensor, first_row: Int32, length: Int32, role: cutlass.Constexpr[int]
    ):
        """Zero the rows of a tile that lie behind its sequence's end (tails.py)."""
        if cutlass.const_expr(self.traits.has_tails):
            clear_rows(tile, first_row, length, 1 + role)

    @cute.jit
    def store_keys(
        self, mma, values, target, out: tuple, work: Work, rank: Int32,
        role: cutlass.Constexpr[int],
    ):  # fmt: skip
        """A warpgroup's [64, D]; out: what TMA stores with and its tensor, and the plain tensor."""
        atom, m, plain = out
        if cutlass.const_expr(self.traits.varlen):
            first = (work.block * self.ranks + rank) * KEYS
            if first + KEYS <= work.extent.seqlen_k:
                self.store_tile(mma, values, target, atom, m, work, rank, role)
            else:
                # TMA clips at the tensor's end, not at the sequence's.
                rows = tokens_of(plain, work.kv_head, work.batch, work.extent.offset_k, True)
                store_rows(flat(values), rows, first, work.extent.seqlen_k)
        else:
            self.store_tile(mma, values, target, atom, m, work, rank, role)

    @cute.jit
    def store_tile(
        self, mma, values, target, atom, m, work: Work, rank: Int32, role: cutlass.Constexpr[int]
    ):
        """A warpgroup's [64, D] through shared memory and out by TMA, which clips keys behind the
        tensor's end."""
        self.group_barrier(role)
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(store, mma).get_slice(thread)
        narrow = cute.make_rmem_tensor(values.shape, self.dtype)
        sm.pack_operand(flat(values), flat(cute.recast_tensor(narrow, Int32)), self.dtype)
        cute.copy(store, copy.retile(narrow), copy.partition_D(target))
        cute.arch.fence_proxy("async.shared", space="cta")
        self.group_barrier(role)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            rows = tokens_of(m, work.kv_head, work.batch, work.extent.offset_k, self.traits.varlen)
            dim = cute.size(target, mode=[1])
            g = cute.local_tile(rows, (KEYS, dim), (work.block * self.ranks + rank, 0))
            in_shared, in_global = tma_pair(atom, target, g)
            cute.copy(atom, in_shared, in_global)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)
