"""The forward without a mask whose last tiles are cut along their keys, to end all at once.

What is cut and how: tail.py. A block of threads draws whole tiles first, then a range of the other
tiles' key blocks: pieces of one tile or of two. A piece is worked on like a tile of fewer blocks,
whose O is not normalised at its end but written down, with the rows' maxima and sums. Then its
warpgroup counts it; the last of the tile's pieces to arrive, whoever that is, reads all of them:

    m = max_p m_p ;  w_p = 2^(c (m_p - m)) ;  O = sum_p w_p O_p ;  l = sum_p w_p l_p

with p in the order of the keys, its own included, and ends the tile as the others end. So the
result's bits depend on where a tile was cut (the number of tiles and of multiprocessors) and not on
who came last. Nobody waits for anybody: no order of arrival can lock it up.

A warpgroup's rows are its own, so each of a tile's warpgroups has a counter of its own. Counters
are zero between launches: who arrives last sets its one back.
Bytes, beside those of a tile: 4 V + 32 for each row of a piece, written once and read once, in L2.
Source: Stream-K, Osama et al. (arXiv 2301.03598): whole waves of tiles, then one of ranges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ridgeline.kernels.attention.cute import ptx
from ridgeline.kernels.attention.cute import softmax as sm
from ridgeline.kernels.attention.cute.blocks import BlockRange
from ridgeline.kernels.attention.cute.forward import (
    QUEUE_STAGES,
    DeviceInteger,
    Forward,
    Globals,
    Scalars,
    Shared,
    first_row,
)
from ridgeline.kernels.attention.cute.mainloop import Consumer, flat, group_barrier
from ridgeline.kernels.attention.cute.mask import accumulator_row
from ridgeline.kernels.attention.cute.pipeline import WARPGROUP_THREADS, Ring
from ridgeline.kernels.attention.cute.scheduler import NONE, Work, WorkQueue
from ridgeline.kernels.attention.cute.seqlens import Extent
from ridgeline.kernels.attention.cute.tail import Parts, Tail, tail
from ridgeline.kernels.attention.cute_sm90_tail_config import QUEUE_WORDS, VECTOR

ARRIVED = QUEUE_STAGES
"""Row of the records in shared memory: whether a warpgroup's piece was its tile's last to come."""
IN_FLIGHT = 8
"""Vectors of a piece that a thread asks for before it uses the first."""


@dataclass(frozen=True)
class Piece(Work):
    """Some of a tile's key blocks, numbered from its first one on; so long is its extent, too: from
    that block to the sequence's end. Who works on it does not see where it begins, and its code is
    that of a whole tile."""

    begin: Any
    """The tile's block that is its first."""
    count: Any
    """At least one."""
    cut: Any
    """The tile's Parts in one word, as registers are short in the walk; NONE of a whole tile."""


@dataclass(frozen=True)
class TailGlobals(Globals):
    """Tensors and numbers of a launch."""

    mPieces: cute.Tensor
    """fp32 [places, warpgroups, vectors, 4 * 128]: vectors of 4, a warpgroup's threads together;
    the last vector has the maxima and sums of a thread's two rows."""
    tail: Tail


@dataclass(frozen=True)
class PieceQueue(WorkQueue):
    """Hands out pieces, whole tiles among them."""

    def _words(self, work: Work) -> tuple[Any, ...]:
        assert isinstance(work, Piece)
        lengths = work.extent.seqlen_q, work.extent.seqlen_k
        return work.block, work.head, work.batch, work.count, work.cut, *lengths

    def _work(self, words: list[Any]) -> Piece:
        zero = Int32(0)
        extent = Extent(zero, zero, words[5], words[6])
        return Piece(words[0], words[1], words[2], extent, zero, words[3], words[4])


class TailForward(Forward):
    """Forward, but for who works on which blocks of keys, and how a piece ends."""

    records = QUEUE_STAGES + 1

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
        pieces: cute.Tensor,
        counter: cute.Tensor,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        heads_per_section: Int32,
        num_sms: Int32,
        num_ranges: Int32,
        stream,
    ):
        """As Forward's of a dense call. pieces: TailGlobals.mPieces; counter: int32, the work
        queue's two words and one for each place and warpgroup; num_ranges: Tail.ranges."""
        layouts = self._layouts()
        plain = self._globals((q, k, v, o, lse), sinks, (None, None), None, counter, layouts)
        scalars = Scalars(softmax_scale, softcap, window_left, window_right, heads_per_section)
        num_tiles = self._order(plain, scalars).num_tiles()
        blocks = (k.shape[1] + self.config.block_k - 1) // self.config.block_k
        cut = tail(num_tiles, num_sms, blocks, num_ranges, DeviceInteger)
        tensors = TailGlobals(**vars(plain), mPieces=pieces, tail=cut)
        self._launch(tensors, scalars, layouts, cutlass.min(cut.items(), num_sms), stream)

    def _queue(self, ring: Ring, records: cute.Tensor, tensors: Globals) -> WorkQueue:
        return PieceQueue(ring, records, tensors.counter)

    # ---- device ---------------------------------------------------------------------------------
    @cute.jit
    def _produce_dense(self, tensors: TailGlobals, scalars: Scalars, shared: Shared):
        order, cut = self._order(tensors, scalars), tensors.tail
        index, _, _ = cute.arch.block_idx()
        kv_position, position = Int32(0), Int32(0)
        while index < cut.items():
            first, begin, end = cut.span(index, DeviceInteger)
            while begin < end:
                tile = begin // cut.blocks
                block, head, batch = order.coordinates(first + tile, cutlass.min)
                of_tile = begin - tile * cut.blocks
                count = cutlass.min(cut.blocks - of_tile, end - begin)
                parts = Int32(NONE)
                if count < cut.blocks:
                    parts = cut.parts(index, tile).packed()
                extent = tensors.lengths.extent(batch)
                work = Piece(
                    block=block,
                    head=head,
                    batch=batch,
                    extent=replace(
                        extent, seqlen_k=extent.seqlen_k - of_tile * self.config.block_k
                    ),
                    begin=of_tile,
                    count=count,
                    cut=parts,
                )
                kv_position = self._load_tile(tensors, scalars, shared, work, position, kv_position)
                position += 1
                begin += count
            index = shared.queue.draw()
        self._finish_producing(tensors, shared, position)

    def _no_work(self, tensors: TailGlobals) -> Piece:
        extent = tensors.lengths.extent(Int32(0))
        none, zero = Int32(NONE), Int32(0)
        return Piece(none, zero, zero, extent, begin=zero, count=Int32(1), cut=none)

    @cute.jit
    def _load_k(self, tensors: Globals, shared: Shared, work: Piece, block: Int32, position: Int32):
        Forward._load_k(self, tensors, shared, work, work.begin + block, position)

    @cute.jit
    def _load_v(self, tensors: Globals, shared: Shared, work: Piece, block: Int32, position: Int32):
        Forward._load_v(self, tensors, shared, work, work.begin + block, position)

    @cute.jit
    def _blocks(self, scalars: Scalars, work: Piece) -> BlockRange:
        """The last block is masked: a tile's last one ends behind the keys."""
        full = cutlass.min(work.extent.seqlen_k // self.config.block_k, work.count - 1)
        return BlockRange(begin=0, full_begin=0, full_end=full, end=work.count)

    @cute.jit
    def _own_blocks(self, scalars: Scalars, work: Piece, wg: Int32) -> BlockRange:
        return self._blocks(scalars, work)

    @cute.jit
    def _tiles(
        self, tensors: TailGlobals, scalars: Scalars, shared: Shared, c: Consumer, work: Piece
    ):
        """Whole tiles, then pieces, by a loop of their own: the end of a piece inside the first one
        costs it registers, and instructions between the products."""
        kv_position, position = Int32(0), Int32(0)
        while (work.block != NONE) & (work.cut == NONE):
            work, kv_position = self._tile(
                tensors, scalars, shared, c, work, position, kv_position, self._epilogue
            )
            position += 1
        while work.block != NONE:
            work, kv_position = self._tile(
                tensors, scalars, shared, c, work, position, kv_position, self._end
            )
            position += 1

    @cute.jit
    def _end(self, tensors: TailGlobals, shared: Shared, c: Consumer, work: Piece, position: Int32):
        if work.cut == NONE:  # a range may hold a whole tile
            self._epilogue(tensors, shared, c, work, position)
        else:
            self._end_piece(tensors, shared, c, work, position)

    @cute.jit
    def _end_piece(
        self, tensors: TailGlobals, shared: Shared, c: Consumer, work: Piece, position: Int32
    ):
        """Write the piece down and count it; who counts the tile's last one merges all."""
        parts, thread = Parts.unpacked(work.cut), cute.arch.thread_idx()[0] % WARPGROUP_THREADS
        self._write(self._place(tensors, c, parts.first + parts.mine, thread), c)
        group_barrier(c.wg)
        if thread == 0:
            if cutlass.const_expr(self.config.output_reuses_q):
                # No O leaves through Q's memory, and every warp is done reading Q.
                c.operands.q_ring.release(position)
            # The barrier has gathered the group's stores: to release them here releases all.
            word = QUEUE_WORDS + parts.first * self.wgs + c.wg
            counted = cute.arch.atomic_add(
                tensors.counter.iterator + word, Int32(1), sem="acq_rel", scope="gpu"
            )
            if counted == parts.count - 1:
                tensors.counter[word] = Int32(0)
            shared.queue.records[ARRIVED, c.wg] = Int32(counted == parts.count - 1)
        group_barrier(c.wg)
        if cute.arch.make_warp_uniform(shared.queue.records[ARRIVED, c.wg]) != 0:
            self._merge(tensors, c, work, parts, thread)

    @cute.jit
    def _place(self, tensors: TailGlobals, c: Consumer, slot: Int32, thread: Int32) -> cute.Tensor:
        """A thread's vectors [4, vectors] of a piece."""
        piece = tensors.mPieces[slot, c.wg, None, None]
        mine = cute.local_tile(piece, (piece.shape[0], VECTOR), (0, thread))
        return cute.make_tensor(mine.iterator, cute.select(mine.layout, mode=[1, 0]))

    @cute.jit
    def _write(self, place: cute.Tensor, c: Consumer):
        output = flat(c.O)
        count = cute.size(output) // VECTOR
        for i in cutlass.range_constexpr(count):
            values = [output[VECTOR * i + e] for e in range(VECTOR)]
            ptx.store_vector(place[None, i].iterator, *values)
        top, total = c.softmax.row_max, c.softmax.row_sum
        ptx.store_vector(place[None, count].iterator, top[0], top[1], total[0], total[1])

    @cute.jit
    def _merge(self, tensors: TailGlobals, c: Consumer, work: Piece, parts: Parts, thread: Int32):
        """All pieces of a tile's rows, in the order of their keys, normalised and stored.

        In registers of its own, a few columns at a time, and not in the accumulator: where that is
        written here too, ptxas makes Q's descriptors anew in each step of the walk, some 30
        instructions among its products.
        """
        last = self.traits.head_dim_v // 2 // VECTOR
        top, total = c.softmax.row_max, c.softmax.row_sum
        for r in cutlass.range_constexpr(2):
            top[r], total[r] = Float32(sm.MINUS_INFINITY), Float32(0.0)
        for part in cutlass.range(parts.count, unroll=1):
            place = self._place(tensors, c, parts.first + part, thread)
            found = ptx.load_vector(place[None, last].iterator)
            for r in cutlass.range_constexpr(2):
                top[r] = cute.arch.fmax(top[r], found[r])
        for part in cutlass.range(parts.count, unroll=1):
            place = self._place(tensors, c, parts.first + part, thread)
            found = ptx.load_vector(place[None, last].iterator)
            for r in cutlass.range_constexpr(2):
                total[r] = ptx.fma(found[2 + r], c.softmax.weight(found[r], r), total[r])
        sink = Float32(0.0)
        if cutlass.const_expr(self.traits.sinks):
            sink = tensors.mSinks[work.head]
        inverse = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
        inverse.fill(1.0)
        c.softmax.finish(inverse, sink, self.traits.sinks)
        self._store_lse(tensors, c, work)
        step = IN_FLIGHT if last % IN_FLIGHT == 0 else IN_FLIGHT // 2
        for vector in cutlass.range(0, last, step, unroll=1):
            merged = self._merge_columns(tensors, c, parts, thread, vector, step)
            for e in cutlass.range_constexpr(cute.size(merged)):
                merged[e] = merged[e] * inverse[e % VECTOR]
            self._store_columns(tensors, c, work, merged, vector)

    @cute.jit
    def _merge_columns(
        self,
        tensors: TailGlobals,
        c: Consumer,
        parts: Parts,
        thread: Int32,
        vector: Int32,
        count: cutlass.Constexpr[int],
    ) -> cute.Tensor:
        """The weighted sum of `count` vectors of all pieces, from `vector` on."""
        merged = cute.make_rmem_tensor(cute.make_layout(VECTOR * count), Float32)
        merged.fill(0.0)
        for part in cutlass.range(parts.count, unroll=1):
            place = self._place(tensors, c, parts.first + part, thread)
            found = ptx.load_vector(place[None, place.shape[1] - 1].iterator)
            vectors = [ptx.load_vector(place[None, vector + i].iterator) for i in range(count)]
            weights = [c.softmax.weight(found[r], r) for r in range(2)]
            values = [x for four in vectors for x in four]
            for e in cutlass.range_constexpr(len(values)):
                merged[e] = ptx.fma(values[e], weights[accumulator_row(e)], merged[e])
        return merged

    @cute.jit
    def _store_columns(
        self, tensors: TailGlobals, c: Consumer, work: Piece, merged: cute.Tensor, vector: Int32
    ):
        """8 columns a vector, 2 of them this thread's, of both its rows."""
        mO = tensors.mO_plain[None, None, work.head, work.batch]
        lane_column = 2 * (cute.arch.lane_idx() % 4) + 8 * vector
        for r in cutlass.range_constexpr(2):
            row = first_row(work, self.wgs, c.wg) + 8 * r
            if row < work.extent.seqlen_q:
                start = mO.iterator + cute.crd2idx((row, lane_column), mO.layout)
                for i in cutlass.range_constexpr(cute.size(merged) // VECTOR):
                    e = VECTOR * i + 2 * r
                    if lane_column + 8 * i < mO.shape[1]:
                        word = ptx.pack(merged[e], merged[e + 1], self.dtype)
                        ptx.store_word(start + 8 * i, word)
