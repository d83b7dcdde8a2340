"""The two warpgroups of the backward by roles that own 64 keys: scores and dV, gradients and dK.

A step of each, in the order of issue (products run asynchronously):

    scores     | P = exp(S), P to the other | dV += P^T dO, S = K Q^T (next)        |
    gradients  | P from the other, dS = P (dP - delta), dS out | dK += dS^T Q, dP = V dO^T (next) |

P goes in the order of registers, which both share, so 16-byte stores and loads without conflicts
carry it. Each waits for its own products only; while one computes, the tensor cores have the
other's products and dQ's.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup

from ridgeline.kernels.attention.cute import ptx
from ridgeline.kernels.attention.cute import softmax as sm
from ridgeline.kernels.attention.cute.backward_types import (
    Globals,
    Scalars,
    Work,
    multiply,
    statistics_pair,
)
from ridgeline.kernels.attention.cute.mainloop import flat
from ridgeline.kernels.attention.cute.mask import TransposedMask, transposed_mask
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS
from ridgeline.kernels.attention.cute.roles_types import (
    GRADIENTS,
    SCORES,
    WORDS,
    Role,
    Shared,
)
from ridgeline.kernels.attention.cute_sm90_backward_config import KEYS


@dataclass(frozen=True)
class Side:
    """What one of the two warpgroups works with."""

    X: cute.Tensor
    """fp32 [64, block_q] accumulator of S^T, or of dP^T."""
    sum: cute.Tensor
    """fp32 accumulator of dV, or of dK."""
    A: cute.Tensor
    """P^T, or dS^T, in 16 bits as operand A."""
    tA: cute.Tensor
    """K, or V, as operand A of X."""
    tB: cute.Tensor
    """Q, or dO, as operand B of X."""
    tColumns: cute.Tensor
    """dO, or Q, as operand B of the sum."""


class RoleKeys(Role):
    """Both warpgroups' walks over the queries."""

    @cute.jit
    def _side(self, a, b, columns, dim: cutlass.Constexpr[int]) -> Side:
        """a [64, D], b [block_q, D, stages], columns [dim, block_q, stages]."""
        scores, sums = self.products.scores(), self.products.sums(dim)
        x_part, sum_part = scores.get_slice(0), sums.get_slice(0)
        tile = (KEYS, self.config.block_q)
        return Side(
            X=cute.make_rmem_tensor(scores.partition_shape_C(tile), Float32),
            sum=cute.make_rmem_tensor(sums.partition_shape_C((KEYS, dim)), Float32),
            A=cute.make_rmem_tensor(sums.partition_shape_A(tile), self.dtype),
            tA=scores.make_fragment_A(x_part.partition_A(a)),
            tB=scores.make_fragment_B(x_part.partition_B(b)),
            tColumns=sums.make_fragment_B(sum_part.partition_B(columns)),
        )

    # ---- scores and dV --------------------------------------------------------------------------
    @cute.jit
    def own_scores(self, tensors: Globals, scalars: Scalars, shared: Shared, work: Work):
        """S^T, P^T and dV of the block's 64 keys."""
        sK = shared.sK[None, None, shared.rank]
        c = self._side(sK, shared.sQ, shared.sdO_columns, self.traits.head_dim_v)
        first_key = (work.block * self.ranks + shared.rank) * KEYS
        mask = transposed_mask(self.traits, scalars, first_key, work.extent)
        num_steps = work.num_steps()
        c.sum.fill(0.0)
        cute.arch.mbarrier_wait(shared.kv_barrier, 0)
        for w in cutlass.range_constexpr(self.ranks):  # dQ needs those of the whole pair
            first_key = (work.block * self.ranks + w) * KEYS
            self.clear_rows(shared.sK[None, None, w], first_key, work.extent.seqlen_k, SCORES)
        if num_steps > 0:
            shared.q_ring.wait_full(Int32(0))
            self._clear_q(shared, work, work.first, Int32(0), SCORES)
        self._issue(c, shared.q_ring.stage(Int32(0)))
        warpgroup.wait_group(0)
        block = work.first
        for step in cutlass.range(num_steps, unroll=1):
            following = block + 1
            if following == work.queries.end:
                following = Int32(work.queries.begin)
            blocks, more = (block, following), step + 1 < num_steps
            self._score_step(scalars, c, mask, shared, work, blocks, step, more)
            block = following
        warpgroup.wait_group(0)
        # Once the other has taken the last P, its last dP is done and dO's memory free.
        shared.p_ring.wait_empty(num_steps)
        target = shared.sdO[None, None, 0]
        mma = self.products.sums(self.traits.head_dim_v)
        out = tensors.tma_dv, tensors.mdV, tensors.mdV_plain
        self.store_keys(mma, c.sum, target, out, work, shared.rank, SCORES)

    @cute.jit
    def _clear_q(
        self, shared: Shared, work: Work, block: Int32, step: Int32, role: cutlass.Constexpr[int]
    ):
        tile = shared.sQ[None, None, shared.q_ring.stage(step)]
        self.clear_rows(tile, block * self.config.block_q, work.extent.seqlen_q, role)

    @cute.jit
    def _clear_do(
        self, shared: Shared, work: Work, block: Int32, step: Int32, role: cutlass.Constexpr[int]
    ):
        tile = shared.sdO[None, None, shared.do_ring.stage(step)]
        self.clear_rows(tile, block * self.config.block_q, work.extent.seqlen_q, role)

    @cute.jit
    def _issue(self, c: Side, stage: Int32):
        """S^T or dP^T, asynchronously, as one group."""
        multiply(self.products.scores(), c.X, c.tA, c.tB[None, None, None, stage], True)

    @cute.jit
    def _score_step(
        self, scalars: Scalars, c: Side, mask: TransposedMask, shared: Shared, work: Work,
        blocks: tuple, step: Int32, more: Boolean,
    ):  # fmt: skip
        """One block of queries, blocks[0], whose S^T is done. At its end S^T of the next one,
        blocks[1], is issued (on whatever the stage holds, where there is none: a branch around it
        would make ptxas wait after every product)."""
        statistics = shared.sStatistics[None, shared.q_ring.stage(step)]
        shared.p_ring.wait_empty(step)
        self._probabilities(scalars, c, mask, shared, work, statistics, blocks[0])
        self.publish(shared.p_ring, step)
        self.release(shared.q_ring, step)
        shared.do_ring.wait_full(step)
        self._clear_do(shared, work, blocks[0], step, SCORES)
        dv = self.products.sums(self.traits.head_dim_v)
        do_stage = shared.do_ring.stage(step)
        multiply(dv, c.sum, c.A, c.tColumns[None, None, None, do_stage], False)
        if more:
            shared.q_ring.wait_full(step + 1)
            self._clear_q(shared, work, blocks[1], step + 1, SCORES)
        self._issue(c, shared.q_ring.stage(step + 1))
        warpgroup.wait_group(1)
        self.release(shared.do_ring, step)
        warpgroup.wait_group(0)

    @cute.jit
    def _probabilities(
        self, scalars: Scalars, c: Side, mask: TransposedMask, shared: Shared, work: Work,
        statistics: cute.Tensor, block: Int32,
    ):  # fmt: skip
        """P^T of S^T, packed as operand A, and what the other warpgroup gets of it: the same, or
        with softcap P (1 - tanh^2)."""
        scores = flat(c.X)
        scale_log2 = scalars.softmax_scale * sm.LOG2_E
        if cutlass.const_expr(self.traits.softcap):
            sm.soft_cap(scores, scalars.softmax_scale / scalars.softcap)
            scale_log2 = scalars.softcap * sm.LOG2_E
        if self._needs_mask(work, block, shared.rank):
            mask.apply(scores, block * self.config.block_q)
        packed = flat(cute.recast_tensor(c.A, Int32))
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        first_column = 2 * (thread % 4)
        sent = cute.make_rmem_tensor(cute.make_layout(WORDS), Int32)
        for column in cutlass.range_constexpr(0, self.config.block_q, 8):
            pair = statistics_pair(statistics, first_column + column)
            for half in cutlass.range_constexpr(2):
                e = column // 2 + 2 * half
                low = ptx.exp2(ptx.fma(scores[e], scale_log2, pair[0]))
                high = ptx.exp2(ptx.fma(scores[e + 1], scale_log2, pair[1]))
                word = e // 2
                packed[word] = ptx.pack(low, high, self.dtype)
                sent[word % WORDS] = packed[word]
                if cutlass.const_expr(self.traits.softcap):
                    low, high = low * _slope(scores[e]), high * _slope(scores[e + 1])
                    sent[word % WORDS] = ptx.pack(low, high, self.dtype)
                if cutlass.const_expr(word % WORDS == WORDS - 1):
                    place = WARPGROUP_THREADS * (word // WORDS) + thread
                    cute.autovec_copy(sent, cute.local_tile(shared.sP, (WORDS,), (place,)))

    def _needs_mask(self, work: Work, block: Int32, rank: Int32):
        behind = (work.block * self.ranks + rank + 1) * KEYS > work.extent.seqlen_k
        return (block < work.queries.full_begin) | (block >= work.queries.full_end) | behind

    # ---- gradients and dK -----------------------------------------------------------------------
    @cute.jit
    def own_gradients(self, tensors: Globals, scalars: Scalars, shared: Shared, work: Work):
        """dP^T, dS^T and dK of the block's 64 keys."""
        sV = shared.sV[None, None, 0]
        c = self._side(sV, shared.sdO, shared.sQ_columns, self.traits.head_dim)
        num_steps = work.num_steps()
        c.sum.fill(0.0)
        cute.arch.mbarrier_wait(shared.kv_barrier, 0)
        first_key = (work.block * self.ranks + shared.rank) * KEYS
        self.clear_rows(sV, first_key, work.extent.seqlen_k, GRADIENTS)
        if num_steps > 0:
            shared.do_ring.wait_full(Int32(0))
            self._clear_do(shared, work, work.first, Int32(0), GRADIENTS)
        self._issue(c, shared.do_ring.stage(Int32(0)))
        warpgroup.wait_group(0)
        if num_steps > 0:
            self.release(shared.do_ring, Int32(0))
        block = work.first
        for step in cutlass.range(num_steps, unroll=1):
            following = block + 1
            if following == work.queries.end:
                following = Int32(work.queries.begin)
            blocks, more = (block, following), step + 1 < num_steps
            self._gradient_step(c, shared, work, blocks, step, more)
            block = following
        warpgroup.wait_group(0)
        dK = flat(c.sum)
        for e in cutlass.range_constexpr(cute.size(dK)):
            dK[e] = dK[e] * scalars.softmax_scale
        # The other's last S was done before its last P came: Q's memory is free.
        target = shared.sQ[None, None, 0]
        mma = self.products.sums(self.traits.head_dim)
        out = tensors.tma_dk, tensors.mdK, tensors.mdK_plain
        self.store_keys(mma, c.sum, target, out, work, shared.rank, GRADIENTS)

    @cute.jit
    def _gradient_step(
        self, c: Side, shared: Shared, work: Work, blocks: tuple, step: Int32, more: Boolean
    ):
        """One block of queries, blocks[0], whose dP^T is done; blocks[1] is the next. Waits stand
        in front of the arithmetic, which LLVM would else move behind them, past the start of the
        next products."""
        shared.p_ring.wait_full(step)
        self._take_p(c, shared)
        self.release_here(shared.p_ring, step)
        shared.q_ring.wait_full(step)
        self._clear_q(shared, work, blocks[0], step, GRADIENTS)
        shared.ds_ring.wait_empty(step)
        self._score_gradients(c, shared.sStatistics[None, shared.q_ring.stage(step)])
        self._share_ds(c, shared, step)
        dk = self.products.sums(self.traits.head_dim)
        q_stage = shared.q_ring.stage(step)
        multiply(dk, c.sum, c.A, c.tColumns[None, None, None, q_stage], False)
        if more:
            shared.do_ring.wait_full(step + 1)
            self._clear_do(shared, work, blocks[1], step + 1, GRADIENTS)
        self._issue(c, shared.do_ring.stage(step + 1))
        warpgroup.wait_group(1)
        self.release(shared.q_ring, step)
        warpgroup.wait_group(0)
        if more:
            self.release(shared.do_ring, step + 1)

    @cute.jit
    def _take_p(self, c: Side, shared: Shared):
        packed = flat(cute.recast_tensor(c.A, Int32))
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        for vector in cutlass.range_constexpr(cute.size(packed) // WORDS):
            four = cute.make_tensor(packed.iterator + WORDS * vector, cute.make_layout(WORDS))
            place = WARPGROUP_THREADS * vector + thread
            cute.autovec_copy(cute.local_tile(shared.sP, (WORDS,), (place,)), four)
        cute.arch.sync_warp()

    @cute.jit
    def _score_gradients(self, c: Side, statistics: cute.Tensor):
        """dS^T of dP^T and P^T, packed in the place of P^T."""
        dP = flat(c.X)
        packed = flat(cute.recast_tensor(c.A, Int32))
        first_column = 2 * (cute.arch.lane_idx() % 4)
        for column in cutlass.range_constexpr(0, self.config.block_q, 8):
            pair = statistics_pair(statistics, self.config.block_q + first_column + column)
            for half in cutlass.range_constexpr(2):
                e = column // 2 + 2 * half
                low, high = ptx.unpack(packed[e // 2], self.dtype)
                low, high = low * (dP[e] - pair[0]), high * (dP[e + 1] - pair[1])
                packed[e // 2] = ptx.pack(low, high, self.dtype)

    @cute.jit
    def _share_ds(self, c: Side, shared: Shared, step: Int32):
        """dS^T to the shared memory of whoever computes this step's dQ, transposed on the way."""
        piece = shared.ds_ring.stage(step)
        here = Boolean(True)
        if cutlass.const_expr(self.config.pair):
            here = piece == shared.rank
            piece = cutlass.select_(here, shared.rank, Int32(2))
        thread = cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, self.products.scores()).get_slice(thread)
        values = cute.make_tensor(c.A.iterator, cute.make_layout(c.X.shape))
        target = copy.partition_D(shared.sdS_columns[None, None, piece])
        cute.copy(atom, copy.retile(values), target)
        cute.arch.fence_proxy("async.shared", space="cta")
        if cutlass.const_expr(self.config.pair):
            if here:
                self.publish(shared.ds_ring, step)
            else:
                self._send_ds(shared, step, thread)
        else:
            self.publish(shared.ds_ring, step)

    @cute.jit
    def _send_ds(self, shared: Shared, step: Int32, thread: Int32):
        """The outgoing tile to the other block, whose barrier counts its bytes; it has left when
        that one gives its stage back, which the next but one step waits for."""
        self.group_barrier(GRADIENTS)
        if thread // 32 == 0:
            with cute.arch.elect_one():
                ptx.bulk_send(
                    shared.sdS[None, None, shared.rank].iterator,
                    shared.sdS[None, None, 2].iterator,
                    self.config.block_q * KEYS * self.dtype.width // 8,
                    shared.ds_ring.full(step),
                    1 - shared.rank,
                )
        cute.arch.sync_warp()


def _slope(capped: Float32) -> Float32:
    """1 - tanh^2; hidden scores are -inf, and their P is 0."""
    bounded = cute.arch.fmax(capped, Float32(-1.0))
    return ptx.fma(-bounded, bounded, Float32(1.0))
