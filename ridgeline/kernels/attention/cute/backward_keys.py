"""The backward's key warpgroups: S^T, dP^T, dV and dK of 64 keys each, over all of the queries.

A step, in the order in which a warpgroup issues it (products run asynchronously):

    P = exp(S)  |  dP = V dO^T, dV += P^T dO  |  dS = P (dP - delta)  |  dK += dS^T Q, S = K Q^T

While one warpgroup computes P or dS, the tensor cores have the other's products and dQ's. Registers
decide the order: S^T and dP^T share one accumulator, P^T and dS^T one operand, so that with dK and
dV [64, 128] they fit in 208 registers a thread. (dP issued before the exponentials, so that the two
overlap inside a warpgroup, needs 224: more than three warpgroups can have.)
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
    Products,
    Scalars,
    Shared,
    Work,
    kv_piece,
    multiply,
    statistics_pair,
)
from ridgeline.kernels.attention.cute.blocks import query_range
from ridgeline.kernels.attention.cute.forward import DeviceInteger, tma_pair
from ridgeline.kernels.attention.cute.mainloop import (
    DTYPES,
    FIRST_GROUP_BARRIER,
    flat,
    group_barrier,
    release,
)
from ridgeline.kernels.attention.cute.mask import TransposedMask, transposed_mask
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS
from ridgeline.kernels.attention.cute.seqlens import tokens_of
from ridgeline.kernels.attention.cute.tails import clear_rows, store_rows, store_stripe
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    KEYS,
    BackwardConfig,
    BackwardTraits,
)


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


class Keys:
    """The walk of a warpgroup over the queries, and its dK and dV."""

    def __init__(self, traits: BackwardTraits, config: BackwardConfig):
        self.traits = traits
        self.config = config
        self.dtype = DTYPES[traits.dtype]
        self.wgs = config.num_warpgroups
        self.products = Products(traits, config)
        self.masks = traits.has_left or traits.has_right

    @cute.jit
    def own_keys(self, tensors: Globals, scalars: Scalars, shared: Shared, work: Work, wg: Int32):
        """A warpgroup's 64 keys: the walk over all queries, then dK and dV out."""
        c = self._key_owner(scalars, shared, work, wg)
        first_key = (work.block * self.wgs + wg) * KEYS
        mask = transposed_mask(self.traits, scalars, first_key, work.extent)
        num_steps = work.num_steps()
        c.dK.fill(0.0)
        c.dV.fill(0.0)
        shared.kv_ring.wait_full(work.before)
        piece = kv_piece(shared, work, wg, self.wgs)
        self._clear_rows(shared.sK[None, None, piece], first_key, work.extent.seqlen_k, wg)
        self._clear_rows(shared.sV[None, None, piece], first_key, work.extent.seqlen_k, wg)
        begin, end = Int32(0), num_steps
        if cutlass.const_expr(self.config.pass_unseen):
            begin, end = self._seen(scalars, work, wg, num_steps)
            for step in cutlass.range(begin, unroll=1):
                self._pass(c, shared, work.position(step))
        block = work.first + begin
        if begin < end:
            shared.q_ring.wait_full(work.position(begin))
            self._clear_tails(c, shared, work, block, work.position(begin))
        self._issue_scores(c, shared, work.position(begin))
        warpgroup.wait_group(0)
        for step in cutlass.range(begin, end, unroll=1):
            following = work.following(block)
            position = work.position(step)
            self._step(c, mask, shared, work, (block, following), position, step + 1 < end)
            block = following
        warpgroup.wait_group(0)
        if cutlass.const_expr(self.config.pass_unseen):
            for step in cutlass.range(end, num_steps, unroll=1):
                self._pass(c, shared, work.position(step))
        self._store(tensors, scalars, shared, work, c, num_steps)

    @cute.jit
    def _seen(self, scalars: Scalars, work: Work, wg: Int32, num_steps: Int32):
        """Steps [begin, end) that see this warpgroup's keys, of a walk over one head."""
        extent = work.extent
        own = query_range(
            (work.block * self.wgs + wg) * KEYS,
            KEYS,
            self.config.block_q,
            (extent.seqlen_q, extent.seqlen_k),
            (
                scalars.window_left if self.traits.has_left else None,
                scalars.window_right if self.traits.has_right else None,
            ),
            DeviceInteger,
        )
        single = work.group == 1
        begin = cutlass.min(own.begin - work.queries.begin, num_steps)
        begin = cutlass.select_(single, begin, Int32(0))
        end = cutlass.max(own.end - work.queries.begin, begin)
        return begin, cutlass.select_(single, end, num_steps)

    @cute.jit
    def _pass(self, c: KeyOwner, shared: Shared, step: Int32):
        """By its position: a step none of whose queries sees these keys: its dS is zero."""
        shared.q_ring.wait_full(step)
        release(shared.q_ring, step)
        shared.do_ring.wait_full(step)
        release(shared.do_ring, step)
        shared.ds_ring.wait_empty(step)
        c.P.fill(0.0)
        self._share_ds(c, shared, step)

    @cute.jit
    def _key_owner(self, scalars: Scalars, shared: Shared, work: Work, wg: Int32) -> KeyOwner:
        piece = kv_piece(shared, work, wg, self.wgs)
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
            dK=cute.make_rmem_tensor(dk.partition_shape_C((KEYS, self.traits.head_dim)), Float32),
            dV=cute.make_rmem_tensor(dv.partition_shape_C((KEYS, self.traits.head_dim_v)), Float32),
            P=cute.make_rmem_tensor(a_shape, self.dtype),
            tK=scores.make_fragment_A(s_part.partition_A(shared.sK[None, None, piece])),
            tQ=scores.make_fragment_B(s_part.partition_B(shared.sQ)),
            tV=scores.make_fragment_A(s_part.partition_A(shared.sV[None, None, piece])),
            tdO=scores.make_fragment_B(s_part.partition_B(shared.sdO)),
            tQ_columns=dk.make_fragment_B(dk_part.partition_B(shared.sQ_columns)),
            tdO_columns=dv.make_fragment_B(dv_part.partition_B(shared.sdO_columns)),
            wg=wg,
            scale_log2=scale_log2,
            capped_scale=capped_scale,
        )

    @cute.jit
    def _issue_scores(self, c: KeyOwner, shared: Shared, step: Int32):
        stage = shared.q_ring.stage(step)
        multiply(self.products.scores(), c.S, c.tK, c.tQ[None, None, None, stage], True)

    @cute.jit
    def _step(
        self, c: KeyOwner, mask: TransposedMask, shared: Shared, work: Work,
        blocks: tuple, step: Int32, more: Boolean,
    ):  # fmt: skip
        """One block of queries, blocks[0], whose S^T is under way; step is its position. At its end
        S^T of the next one, blocks[1], is issued (on whatever the stage holds, where there is none:
        a branch around it would make ptxas wait after every product)."""
        stage = shared.do_ring.stage(step)
        statistics = shared.sStatistics[None, shared.q_ring.stage(step)]
        self._probabilities(c, mask, statistics, work, blocks[0])
        shared.do_ring.wait_full(step)
        # Waiting here and not where dS is stored: LLVM would move dS's arithmetic behind this loop,
        # that is behind the start of the next products, and ptxas would then serialise them.
        shared.ds_ring.wait_empty(step)
        multiply(self.products.scores(), c.S, c.tV, c.tdO[None, None, None, stage], True)
        dv = self.products.sums(self.traits.head_dim_v)
        multiply(dv, c.dV, c.P, c.tdO_columns[None, None, None, stage], False)
        warpgroup.wait_group(0)
        release(shared.do_ring, step)
        self._score_gradients(c, statistics)
        self._share_ds(c, shared, step)
        dk = self.products.sums(self.traits.head_dim)
        q_stage = shared.q_ring.stage(step)
        multiply(dk, c.dK, c.P, c.tQ_columns[None, None, None, q_stage], False)
        if more:
            shared.q_ring.wait_full(step + 1)
            self._clear_tails(c, shared, work, blocks[1], step + 1)
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
        if self._needs_mask(work, block, c.wg):
            mask.apply(scores, block * self.config.block_q)
        packed = flat(cute.recast_tensor(c.P, Int32))
        first_column = 2 * (cute.arch.lane_idx() % 4)
        for column in cutlass.range_constexpr(0, self.config.block_q, 8):
            pair = statistics_pair(statistics, first_column + column)
            for half in cutlass.range_constexpr(2):
                e = column // 2 + 2 * half
                low = self._exp2(ptx.fma(scores[e], c.scale_log2, pair[0]), e // 2)
                high = self._exp2(ptx.fma(scores[e + 1], c.scale_log2, pair[1]), e // 2)
                packed[e // 2] = ptx.pack(low, high, self.dtype)

    def _exp2(self, x: Float32, pair: int) -> Float32:
        """Of a pair of probabilities: some on the units that multiply, as the special function unit
        takes eight clocks a warp for each."""
        every = self.config.polynomial_every
        if every and pair % every == 0:
            return ptx.exp2_by_polynomial(x, 3 if self.traits.dtype == "bfloat16" else 4)
        return ptx.exp2(x)

    def _needs_mask(self, work: Work, block: Int32, wg: Int32):
        behind = (work.block * self.wgs + wg + 1) * KEYS > work.extent.seqlen_k
        if cutlass.const_expr(not self.masks):
            return behind
        return (block < work.queries.full_begin) | (block >= work.queries.full_end) | behind

    @cute.jit
    def _clear_rows(self, tile: cute.Tensor, first_row: Int32, length: Int32, wg: Int32):
        """Zero the rows of a tile that lie behind its sequence's end (tails.py)."""
        if cutlass.const_expr(self.traits.has_tails):
            clear_rows(tile, first_row, length, FIRST_GROUP_BARRIER + wg)

    @cute.jit
    def _clear_tails(self, c: KeyOwner, shared: Shared, work: Work, block: Int32, step: Int32):
        """Zero the rows of a step's Q and dO that lie behind the end. Here, where products start
        anyway, and not when dO is needed: a branch between the exponentials and dP^T keeps ptxas
        from moving them under it (63 % of the tensor cores' time for 72 to 77)."""
        if cutlass.const_expr(self.traits.has_tails):
            first_row, length = block * self.config.block_q, work.extent.seqlen_q
            if first_row + self.config.block_q > length:
                shared.do_ring.wait_full(step)
                q, do = shared.q_ring.stage(step), shared.do_ring.stage(step)
                self._clear_rows(shared.sQ[None, None, q], first_row, length, c.wg)
                self._clear_rows(shared.sdO[None, None, do], first_row, length, c.wg)

    @cute.jit
    def _score_gradients(self, c: KeyOwner, statistics):
        """dS^T of dP^T and P^T, packed in the place of P^T."""
        dP = flat(c.S)
        packed = flat(cute.recast_tensor(c.P, Int32))
        first_column = 2 * (cute.arch.lane_idx() % 4)
        for column in cutlass.range_constexpr(0, self.config.block_q, 8):
            pair = statistics_pair(statistics, self.config.block_q + first_column + column)
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
        """dV through the warpgroup's own V, dK through its K once dQ no longer needs that; or both
        through V, row by row."""
        dK = flat(c.dK)
        for e in cutlass.range_constexpr(cute.size(dK)):
            dK[e] = dK[e] * scalars.softmax_scale
        if cutlass.const_expr(self.config.quick_end):
            self._store_quickly(tensors, shared, work, c)
        elif cutlass.const_expr(self.traits.varlen):
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
        piece = kv_piece(shared, work, c.wg, self.wgs)
        sdV, sdK = shared.sV[None, None, piece], shared.sK[None, None, piece]
        self._store_tile(dv, c.dV, sdV, tensors.tma_dv, tensors.mdV, work, c.wg)
        if num_steps > 0:
            # Until the last step's dS was used, and with it K.
            shared.ds_ring.wait_empty(work.position(num_steps - 1 + self.config.ds_stages))
        self._store_tile(dk, c.dK, sdK, tensors.tma_dk, tensors.mdK, work, c.wg)
        # Shared memory must stay until it has been read; the writes end with the kernel.
        cute.arch.cp_async_bulk_wait_group(0, read=self.config.persistent > 0)
        if cutlass.const_expr(self.config.persistent > 0):
            if cute.arch.thread_idx()[0] % WARPGROUP_THREADS == 0:
                shared.kv_ring.release(work.before)

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
            in_shared, in_global = tma_pair(atom, target, g)
            cute.copy(atom, in_shared, in_global)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _store_quickly(self, tensors: Globals, shared: Shared, work: Work, c: KeyOwner):
        """Each warp its 16 rows, through V of its own warpgroup, which nobody else reads: no other
        wait than for the products of the four warps."""
        sV = shared.sV[None, None, kv_piece(shared, work, c.wg, self.wgs)]
        group_barrier(c.wg)
        for values, m, dim in (
            (c.dV, tensors.mdV_plain, self.traits.head_dim_v),
            (c.dK, tensors.mdK_plain, self.traits.head_dim),
        ):
            extent = work.extent
            rows = tokens_of(m, work.kv_head, work.batch, extent.offset_k, self.traits.varlen)
            first_row = (work.block * self.wgs + c.wg) * KEYS
            store_stripe(self.products.sums(dim), values, sV, (rows, first_row, extent.seqlen_k))
        if cutlass.const_expr(self.config.persistent > 0):
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            release(shared.kv_ring, work.before)

    @cute.jit
    def _store_rows(self, values: cute.Tensor, m: cute.Tensor, work: Work, wg: Int32):
        """The last keys of a packed sequence."""
        rows = cute.domain_offset((work.extent.offset_k, 0), m[None, None, work.kv_head])
        store_rows(flat(values), rows, (work.block * self.wgs + wg) * KEYS, work.extent.seqlen_k)
