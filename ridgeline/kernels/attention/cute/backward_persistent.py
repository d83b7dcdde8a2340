"""The backward with one block of threads a multiprocessor, which takes block of keys after block.

A block of keys costs some 4 us beside its steps: barriers, the first loads, dK and dV on their way
out, the next block of threads. That is a tenth of a window's 18 steps. Here the warp that loads
goes on to the next number when the last loads of a block are issued, and K, V, Q and dO come in
while the key warpgroups still store dK and dV. K and V have two stages for that; positions in all
rings go on from block to block (`Work.before`, `Work.steps_before`).

A block of threads draws numbers from a counter in global memory, in order, the first one too: so
whoever waits for a lower one (turns, zeros) waits for a block that is being worked on, however few
multiprocessors the device has left for this kernel.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ridgeline.kernels.attention.cute.backward import RECORD_WORDS, Backward
from ridgeline.kernels.attention.cute.backward_ahead import Ahead
from ridgeline.kernels.attention.cute.backward_types import (
    Globals,
    Layouts,
    Scalars,
    Shared,
    Work,
)
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    BackwardConfig,
    BackwardTraits,
    ahead_warps,
    helper_registers,
    registers,
)

NONE = -1
"""A record that says: no more blocks of keys."""


class PersistentBackward(Backward):
    """Backward, but for who works on which block of keys."""

    def __init__(self, traits: BackwardTraits, config: BackwardConfig):
        super().__init__(traits, config)
        self.ahead = Ahead(traits, config)

    def _launch(self, tensors: Globals, scalars: Scalars, layouts: Layouts, num_blocks, stream):
        self.persistent_kernel(tensors, scalars, layouts).launch(
            grid=(cutlass.min(num_blocks, self.config.persistent), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.overlapped,
        )

    # ---- device ---------------------------------------------------------------------------------
    @cute.kernel
    def persistent_kernel(self, tensors: Globals, scalars: Scalars, layouts: Layouts):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self._shared(layouts)
        self._begin(tensors, shared)
        if cutlass.const_expr(self.overlapped):
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        other_registers, key_registers = registers(self.config)
        # One branch a role, or ptxas drops setmaxnreg.
        if warp_index < 4:
            cute.arch.setmaxregister_decrease(other_registers)
            self._serve(tensors, scalars, shared)
        elif warp_index < 8:
            cute.arch.setmaxregister_decrease(helper_registers(self.config))
            self._help(tensors, scalars, shared, warp_index - 4)
        else:
            cute.arch.setmaxregister_increase(key_registers)
            self._own(tensors, scalars, shared, warp_index // 4 - 2)

    @cute.jit
    def _serve(self, tensors: Globals, scalars: Scalars, shared: Shared):
        before, steps = Int32(0), Int32(0)
        number, block, head, batch = self._take(shared, before)
        while number >= 0:
            work = self._recorded(tensors, scalars, (number, block, head, batch), (before, steps))
            if cutlass.const_expr(self.config.zeros_ahead):
                self.queries.await_before()
                self.ahead.await_prepared(tensors, number)
            self.queries.serve(tensors, scalars, shared, work)
            self.ahead.tell_added(tensors, number)
            steps += work.num_steps()
            before += 1
            number, block, head, batch = self._take(shared, before)

    @cute.jit
    def _own(self, tensors: Globals, scalars: Scalars, shared: Shared, wg: Int32):
        before, steps = Int32(0), Int32(0)
        number, block, head, batch = self._take(shared, before)
        while number >= 0:
            work = self._recorded(tensors, scalars, (number, block, head, batch), (before, steps))
            self.keys.own_keys(tensors, scalars, shared, work, wg)
            steps += work.num_steps()
            before += 1
            number, block, head, batch = self._take(shared, before)

    @cute.jit
    def _help(self, tensors: Globals, scalars: Scalars, shared: Shared, warp: Int32):
        if warp == 0:
            self._load(tensors, scalars, shared)
        if cutlass.const_expr(self.traits.deterministic):
            if warp == 1:
                self._turns(tensors, scalars, shared, True)
            if warp == 2:
                self._turns(tensors, scalars, shared, False)
        preparing, finishing = ahead_warps(self.config)
        if cutlass.const_expr(preparing > 0):
            if (warp > 0) & (warp <= preparing):
                self._ahead(tensors, scalars, shared, warp - 1, True)
        if cutlass.const_expr(finishing > 0):
            if warp > preparing:
                self._ahead(tensors, scalars, shared, warp - 1 - preparing, False)

    @cute.jit
    def _load(self, tensors: Globals, scalars: Scalars, shared: Shared):
        """One warp: draws numbers, tells them the others and loads."""
        if cutlass.const_expr(self.overlapped):
            cute.arch.griddepcontrol_wait()
        total = self._order(tensors, scalars).num_tiles()
        before, steps = Int32(0), Int32(0)
        number = self._draw(tensors)
        while number < total:
            place = Int32(0), Int32(0), Int32(0)
            if cutlass.const_expr(self.config.quick_end):
                place = self._place(tensors, scalars, number)
            self._announce(shared, before, (number, *place))
            work = self._recorded(tensors, scalars, (number, *place), (before, steps))
            if cutlass.const_expr(self.config.statistics_ahead):
                self.ahead.await_prepared(tensors, number)
                # What other multiprocessors stored, the copy engine is to read.
                cute.arch.fence_proxy("async.global")
            self.queries.load(tensors, shared, work)
            steps += work.num_steps()
            before += 1
            # Not before: a number should not lie here while this block's walk goes on.
            number = self._draw(tensors)
        self._announce(shared, before, (Int32(NONE), Int32(0), Int32(0), Int32(0)))

    @cute.jit
    def _turns(
        self, tensors: Globals, scalars: Scalars, shared: Shared, polls: cutlass.Constexpr[bool]
    ):
        """One warp each: waits for turns, hands them on."""
        before, steps = Int32(0), Int32(0)
        number, block, head, batch = self._take(shared, before)
        while number >= 0:
            work = self._recorded(tensors, scalars, (number, block, head, batch), (before, steps))
            if cutlass.const_expr(polls):
                self.queries.poll_turns(tensors, scalars, shared, work)
            else:
                self.queries.hand_on_turns(tensors, shared, work)
            steps += work.num_steps()
            before += 1
            number, block, head, batch = self._take(shared, before)

    @cute.jit
    def _ahead(
        self, tensors: Globals, scalars: Scalars, shared: Shared, worker: Int32,
        prepares: cutlass.Constexpr[bool],
    ):  # fmt: skip
        """A warp: what is to be done for later blocks, or for earlier ones."""
        if cutlass.const_expr(self.overlapped):
            cute.arch.griddepcontrol_wait()
        before = Int32(0)
        number, _, _, _ = self._take(shared, before)
        while number >= 0:
            if cutlass.const_expr(prepares):
                self.ahead.prepare(tensors, number, worker)
            else:
                self.ahead.finish(tensors, scalars, number, worker)
            before += 1
            number, _, _, _ = self._take(shared, before)

    def _recorded(self, tensors: Globals, scalars: Scalars, record: tuple, behind: tuple) -> Work:
        """Of a record; behind: blocks of keys and steps that this block of threads had before."""
        number, *place = record
        before, steps = behind
        if self.config.quick_end:
            work = self._work_at(tensors, scalars, *place)
        else:
            work = self._work_of(tensors, scalars, number)
        return replace(work, before=before, steps_before=steps)

    @cute.jit
    def _draw(self, tensors: Globals) -> Int32:
        """The next number."""
        drawn = Int32(0)
        if cute.arch.lane_idx() == 0:
            counter = tensors.turns[tensors.turns.shape[0] - 1, 0, None].iterator
            drawn = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(drawn, 0)

    @cute.jit
    def _announce(self, shared: Shared, position: Int32, record: tuple):
        shared.record_ring.wait_empty(position)
        if cute.arch.lane_idx() == 0:
            first = shared.record_ring.stage(position) * self.record_words
            for i in cutlass.range_constexpr(self.record_words):
                shared.sRecord[first + i] = record[i]
            shared.record_ring.publish(position)
        cute.arch.sync_warp()

    @cute.jit
    def _take(self, shared: Shared, position: Int32):
        """A consumer warp: the next number, or NONE, and its place where that is told."""
        shared.record_ring.wait_full(position)
        first = shared.record_ring.stage(position) * self.record_words
        words = [Int32(0)] * RECORD_WORDS
        for i in cutlass.range_constexpr(self.record_words):
            words[i] = cute.arch.make_warp_uniform(shared.sRecord[first + i])
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            shared.record_ring.release(position)
        return words[0], words[1], words[2], words[3]
