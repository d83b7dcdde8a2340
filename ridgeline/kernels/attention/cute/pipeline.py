"""Rings of shared-memory stages guarded by mbarriers, and turns between warpgroups.

A ring's position is one integer, the number of stages used since the kernel began: it gives both
the stage (position mod stages) and the phase bit of the barrier (position div stages, mod 2), so
nothing else has to be carried through loops. Stage counts are powers of two: both are one
instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

WARPGROUP_THREADS = 128


@dataclass(frozen=True)
class Ring:
    """Full and empty barriers of a ring: a producer fills stages, consumers release them."""

    barriers: cute.Pointer
    """int64 [2 * stages] in shared memory: full, then empty."""
    stages: int

    @cute.jit
    def init(self, producers: cutlass.Constexpr[int], consumers: cutlass.Constexpr[int]):
        """Set arrival counts; one thread of the block calls it, a fence and a barrier follow."""
        for stage in cutlass.range_constexpr(self.stages):
            cute.arch.mbarrier_init(self.barriers + stage, producers)
            cute.arch.mbarrier_init(self.barriers + self.stages + stage, consumers)

    @cute.jit
    def stage(self, position: Int32) -> Int32:
        return position & (self.stages - 1)

    @cute.jit
    def phase(self, position: Int32) -> Int32:
        return (position >> (self.stages.bit_length() - 1)) & 1

    def full(self, position: Int32) -> cute.Pointer:
        """The barrier that a bulk copy into this position completes on."""
        return self.barriers + self.stage(position)

    def empty(self, position: Int32) -> cute.Pointer:
        return self.barriers + self.stages + self.stage(position)

    def wait_full(self, position: Int32) -> None:
        """Consumer: until the producer has filled this position."""
        cute.arch.mbarrier_wait(self.full(position), self.phase(position))

    def wait_empty(self, position: Int32) -> None:
        """Producer: until consumers have released the stage's previous use (free at first)."""
        cute.arch.mbarrier_wait(self.empty(position), self.phase(position) ^ 1)

    def expect(self, position: Int32, num_bytes: int) -> None:
        """Producer, one elected thread: announce the bytes that copies will bring."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.full(position), num_bytes)

    def publish(self, position: Int32) -> None:
        """Producer without a copy: the stage was written by ordinary stores of this thread."""
        cute.arch.mbarrier_arrive(self.full(position))

    def release(self, position: Int32) -> None:
        """Consumer: this thread's share of giving the stage back."""
        cute.arch.mbarrier_arrive(self.empty(position))


@dataclass(frozen=True)
class Turns:
    """Warpgroups take turns at the tensor cores, in a circle, through one named barrier each.

    While one issues its products, the others are in their softmax: FlashAttention-3 paper, 3.1.
    A barrier counts the waiting warpgroup and the one before it.
    """

    first_barrier: int
    num_warpgroups: int

    @cute.jit
    def start(self, warpgroup: Int32):
        """Give the first turn to warpgroup 0 (the last one does: it comes before it)."""
        if cutlass.const_expr(self.num_warpgroups > 1):
            if warpgroup == self.num_warpgroups - 1:
                cute.arch.barrier_arrive(
                    barrier_id=self.first_barrier,
                    number_of_threads=2 * WARPGROUP_THREADS,
                )

    @cute.jit
    def wait(self, warpgroup: Int32):
        if cutlass.const_expr(self.num_warpgroups > 1):
            cute.arch.barrier(
                barrier_id=self.first_barrier + warpgroup, number_of_threads=2 * WARPGROUP_THREADS
            )

    @cute.jit
    def give(self, warpgroup: Int32):
        if cutlass.const_expr(self.num_warpgroups > 1):
            following = warpgroup + 1
            if warpgroup == self.num_warpgroups - 1:
                following = Int32(0)
            cute.arch.barrier_arrive(
                barrier_id=self.first_barrier + following,
                number_of_threads=2 * WARPGROUP_THREADS,
            )
