"""The backward's third warpgroup: it loads, computes dQ = dS K and adds it to the sum in memory.

It runs beside the warpgroups of the keys and a step behind them, with all of its own time to wait:
nothing that it does holds them up as long as both rings have a free stage. With helpers a fourth
one loads, waits for turns and hands them on: latencies of memory that would else add up in a step.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from ridgeline.kernels.attention.cute import ptx
from ridgeline.kernels.attention.cute.backward_types import (
    Globals,
    Products,
    Scalars,
    Shared,
    Work,
    kv_piece,
)
from ridgeline.kernels.attention.cute.blocks import Walk, turn
from ridgeline.kernels.attention.cute.forward import DeviceInteger, tma_pair
from ridgeline.kernels.attention.cute.mainloop import DTYPES, flat, release
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS
from ridgeline.kernels.attention.cute.seqlens import tokens_of
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    KEYS,
    ROW_STATISTICS,
    BackwardConfig,
    BackwardTraits,
    keys_per_block,
)

TURN_STAGES = 2
"""Steps that the helpers' warps may be ahead of, or behind, the additions."""
OTHER_BARRIER = 7
"""Named barrier of the warpgroup that computes dQ; the keys' have `group_barrier`'s."""


class Queries:
    """The warpgroup that serves the others: loads, dQ, and its sum in global memory."""

    def __init__(self, traits: BackwardTraits, config: BackwardConfig):
        self.traits = traits
        self.config = config
        self.dtype = DTYPES[traits.dtype]
        self.wgs = config.num_warpgroups
        self.products = Products(traits, config)

    @cute.jit
    def serve(self, tensors: Globals, scalars: Scalars, shared: Shared, work: Work):
        """The warpgroup beside the keys': loads, dQ = dS K, and its sum in global memory."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        num_steps = work.num_steps()
        helpers, ordered = self.config.helpers, self.traits.deterministic
        if cutlass.const_expr(not helpers):
            if warp_index == 0:
                self._load_keys(tensors, shared, work)
        self.await_before()
        if cutlass.const_expr(not helpers):
            if warp_index == 0:
                for i in cutlass.range_constexpr(self.config.stages):
                    if i < num_steps:
                        self._load_queries(tensors, shared, work, Int32(i))
        mma = self.products.dq()
        rows, columns = self.products.dq_part()
        dQ = cute.make_rmem_tensor(mma.partition_shape_C((rows, columns)), Float32)
        for step in cutlass.range(num_steps, unroll=1):
            position = work.position(step)
            shared.ds_ring.wait_full(position)
            stage = shared.ds_ring.stage(position)
            if cutlass.const_expr(not helpers):
                self._await_turn(tensors, scalars, work, step)
            for i in cutlass.range_constexpr(self.config.dq_parts):
                self._issue_dq(shared, mma, dQ, (stage, work), i)
                warpgroup.wait_group(0)
                if cutlass.const_expr(i == self.config.dq_parts - 1):
                    release(shared.ds_ring, position)
                if cutlass.const_expr(helpers and ordered and i == 0):
                    shared.turn_ring.wait_full(position)
                self._add_dq(tensors, shared, work, dQ, step, i)
            if cutlass.const_expr(helpers):
                if cutlass.const_expr(ordered):
                    self._tell_added(shared, position)
            else:
                self._pass_turn(tensors, work, step)
                # Only now, when no accumulator is alive: it takes the registers of one.
                if warp_index == 0:
                    if step + self.config.stages < num_steps:
                        self._load_queries(tensors, shared, work, step + self.config.stages)
        if cutlass.const_expr(self.config.quick_end and self.config.persistent > 0):
            release(shared.kv_ring, work.before)  # dQ was the last to read K
        if cutlass.const_expr(self.config.dq_bulk):
            if warp_index == 0:
                cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def await_before(self):
        """Until the kernel before this one has ended: its statistics and zeros are there."""
        if cutlass.const_expr(self.config.overlapped):
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def _tell_added(self, shared: Shared, step: Int32):
        """To the warps that wait for turns and hand them on: this warp's additions are issued."""
        shared.added_ring.wait_empty(step)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            shared.turn_ring.release(step)
            shared.added_ring.publish(step)

    @cute.jit
    def help(self, tensors: Globals, scalars: Scalars, shared: Shared, work: Work):
        """The fourth warpgroup, a warp for each kind of waiting."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        if warp == 0:
            self.load(tensors, shared, work)
        if cutlass.const_expr(self.traits.deterministic):
            if warp == 1:
                self.poll_turns(tensors, scalars, shared, work)
            if warp == 2:
                self.hand_on_turns(tensors, shared, work)

    @cute.jit
    def load(self, tensors: Globals, shared: Shared, work: Work):
        """A warp: K and V, then Q and dO of every step as room is made."""
        self._load_keys(tensors, shared, work)
        self.await_before()
        for step in cutlass.range(work.num_steps(), unroll=1):
            self._load_queries(tensors, shared, work, step)

    @cute.jit
    def poll_turns(self, tensors: Globals, scalars: Scalars, shared: Shared, work: Work):
        """A warp: says when each step's turn has come."""
        self.await_before()
        for step in cutlass.range(work.num_steps(), unroll=1):
            shared.turn_ring.wait_empty(work.position(step))
            if cute.arch.lane_idx() == 0:
                self._poll(tensors, scalars, work, step)
                shared.turn_ring.publish(work.position(step))
            cute.arch.sync_warp()

    @cute.jit
    def hand_on_turns(self, tensors: Globals, shared: Shared, work: Work):
        """A warp: hands each step's turn on once its additions are there."""
        for step in cutlass.range(work.num_steps(), unroll=1):
            shared.added_ring.wait_full(work.position(step))
            if cute.arch.lane_idx() == 0:
                # Cumulative: the barrier orders the other threads' additions before it.
                cute.arch.fence_acq_rel_gpu()
                self._count(tensors, work, step, "relaxed")
                shared.added_ring.release(work.position(step))
            cute.arch.sync_warp()

    @cute.jit
    def _issue_dq(self, shared: Shared, mma, dQ: cute.Tensor, place: tuple, part: int):
        """One part of dQ = dS K: some of its rows or of its columns. place: stage of dS, and whose
        keys."""
        stage, work = place
        rows, columns = self.products.dq_part()
        by_row = rows < self.config.block_q
        sdS = cute.local_tile(shared.sdS, (rows, KEYS), (part if by_row else 0, 0, None))
        sK = cute.local_tile(shared.sK_columns, (columns, KEYS), (0 if by_row else part, 0, None))
        thread = mma.get_slice(0)
        tdS = mma.make_fragment_A(thread.partition_A(sdS))
        tK = mma.make_fragment_B(thread.partition_B(sK))
        warpgroup.fence()
        for w in cutlass.range_constexpr(self.wgs):
            for k in cutlass.range_constexpr(KEYS // 16):
                mma.set(warpgroup.Field.ACCUMULATE, w + k > 0)
                a = tdS[None, None, k, stage * self.wgs + w]
                piece = kv_piece(shared, work, w, self.wgs)
                cute.gemm(mma, dQ, a, tK[None, None, k, piece], dQ)
        warpgroup.commit_group()

    @cute.jit
    def _load_keys(self, tensors: Globals, shared: Shared, work: Work):
        """K and V, once, in pieces of one warpgroup's keys."""
        size = self.dtype.width // 8
        num_bytes = keys_per_block(self.config) * (self.traits.head_dim + self.traits.head_dim_v)
        if cutlass.const_expr(self.config.persistent > 0):
            shared.kv_ring.wait_empty(work.before)
        with cute.arch.elect_one():
            shared.kv_ring.expect(work.before, num_bytes * size)
        for atom, m, s, dim in (
            (tensors.tma_k, tensors.mK, shared.sK, self.traits.head_dim),
            (tensors.tma_v, tensors.mV, shared.sV, self.traits.head_dim_v),
        ):
            rows = tokens_of(m, work.kv_head, work.batch, work.extent.offset_k, self.traits.varlen)
            for w in cutlass.range_constexpr(self.wgs):
                tile = cute.local_tile(rows, (KEYS, dim), (work.block * self.wgs + w, 0))
                in_shared, in_global = tma_pair(atom, s, tile)
                piece, full = kv_piece(shared, work, w, self.wgs), shared.kv_ring.full(work.before)
                cute.copy(atom, in_global, in_shared[None, piece], tma_bar_ptr=full)

    @cute.jit
    def _load_queries(self, tensors: Globals, shared: Shared, work: Work, step: Int32):
        """Q with its statistics, and dO, of one step; waits until their stage is free."""
        head, block = work.at(step)
        position = work.position(step)
        block_q, size = self.config.block_q, self.dtype.width // 8
        for ring, atom, m, s, dim in (
            (shared.q_ring, tensors.tma_q, tensors.mQ, shared.sQ, self.traits.head_dim),
            (shared.do_ring, tensors.tma_do, tensors.mdO, shared.sdO, self.traits.head_dim_v),
        ):
            rows = tokens_of(m, head, work.batch, work.extent.offset_q, self.traits.varlen)
            tile = cute.local_tile(rows, (block_q, dim), (block, 0))
            with_statistics = s is shared.sQ
            words = ROW_STATISTICS * block_q if with_statistics else 0
            ring.wait_empty(position)
            with cute.arch.elect_one():
                ring.expect(position, block_q * dim * size + 4 * words)
            in_shared, in_global = tma_pair(atom, s, tile)
            stage = ring.stage(position)
            cute.copy(atom, in_global, in_shared[None, stage], tma_bar_ptr=ring.full(position))
            if cutlass.const_expr(with_statistics):
                tile_index = work.first_tile(tensors, self.config.block_q) + block
                source = tensors.statistics[tile_index, head, None].iterator
                target = shared.sStatistics[None, stage].iterator
                with cute.arch.elect_one():
                    ptx.bulk_load(target, source, 4 * words, ring.full(position))

    @cute.jit
    def _add_dq(
        self, tensors: Globals, shared: Shared, work: Work, dQ: cute.Tensor, step: Int32, part: int
    ):
        """Add a part of a step's dQ to the sum in global memory."""
        head, block = work.at(step)
        tile = work.first_tile(tensors, self.config.block_q) + block
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
    def _await_turn(self, tensors: Globals, scalars: Scalars, work: Work, step: Int32):
        """Deterministic: until the blocks of keys that come before this one have added."""
        if cutlass.const_expr(self.traits.deterministic):
            if cute.arch.thread_idx()[0] == 0:
                self._poll(tensors, scalars, work, step)
            self._other_barrier()

    @cute.jit
    def _poll(self, tensors: Globals, scalars: Scalars, work: Work, step: Int32):
        """One thread."""
        head, block = work.at(step)
        block_q, block_k = self.config.block_q, keys_per_block(self.config)
        extent = work.extent
        walk = Walk(
            num_key_blocks=(extent.seqlen_k + block_k - 1) // block_k,
            num_query_blocks=(extent.seqlen_q + block_q - 1) // block_q,
            shift=extent.seqlen_k - extent.seqlen_q,
            block_q=block_q,
            block_k=block_k,
            together=scalars.together != 0,
            integer=DeviceInteger,
            down=work.down,
        )
        window = (
            scalars.window_left if self.traits.has_left else None,
            scalars.window_right if self.traits.has_right else None,
        )
        wanted = turn(work.block, block, walk, window)
        tile = work.first_tile(tensors, block_q) + block
        counter = tensors.turns[tile, head, None].iterator
        done = ptx.load_acquire(counter)
        while done != wanted:
            done = ptx.load_acquire(counter)

    @cute.jit
    def _pass_turn(self, tensors: Globals, work: Work, step: Int32):
        if cutlass.const_expr(self.traits.deterministic):
            cute.arch.fence_acq_rel_gpu()
            self._other_barrier()
            if cute.arch.thread_idx()[0] == 0:
                self._count(tensors, work, step, "release")

    @cute.jit
    def _count(self, tensors: Globals, work: Work, step: Int32, order: cutlass.Constexpr[str]):
        """One thread; relaxed suffices right behind its own fence."""
        head, block = work.at(step)
        tile = work.first_tile(tensors, self.config.block_q) + block
        counter = tensors.turns[tile, head, None].iterator
        cute.arch.atomic_add(counter, Int32(1), sem=order, scope="gpu")

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
