"""Online softmax of one thread's two rows of a WGMMA accumulator.

    m' = max(m, rowmax(S)) ; P = 2^(c S - c m') ; r = 2^(c m - c m')
    l' = r l + rowsum(P) ; O' = r O

with c = softmax_scale * log2(e), so that one FMA and one special-function instruction make an
element. l is kept per thread and summed over the 4 lanes of a row only at the end.

Lazy rescale: m is a shift that cancels in O / l, so it need not be the maximum. While the true
maximum has grown by less than `lazy_log2` (in powers of two), m stays, P stays below 2^lazy_log2,
and O is not touched. Source of the idea: FlashAttention-4 paper, 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from ridgeline.kernels.attention.cute import ptx
from ridgeline.kernels.attention.cute.mask import MINUS_INFINITY, accumulator_row

LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Softmax:
    """Running maximum and sum of a thread's two rows."""

    scale_log2: Float32
    """softmax_scale * log2(e)."""
    row_max: cute.Tensor
    """fp32 [2] in registers, unscaled scores."""
    row_sum: cute.Tensor
    """fp32 [2] in registers, this thread's columns only."""
    rescale: cute.Tensor
    """fp32 [2] in registers: what O is to be multiplied by after `update`."""
    lazy_log2: float

    @cute.jit
    def reset(self):
        for r in cutlass.range_constexpr(2):
            self.row_max[r] = Float32(MINUS_INFINITY)
            self.row_sum[r] = Float32(0.0)

    @cute.jit
    def start(self, scores: cute.Tensor):
        """The first block of a tile: its maximum becomes the shift, scores become P."""
        for r in cutlass.range_constexpr(2):
            maximum = _quad(_row_max(scores, r), cute.arch.fmax)
            self.row_max[r] = maximum
            self.row_sum[r] = self._exponentiate(scores, r, _shift(maximum, True))

    @cute.jit
    def update(self, scores: cute.Tensor, may_hide: cutlass.Constexpr[bool]) -> Boolean:
        """Replace scores by P and fold them into maximum and sum; true in a whole warp if its rows
        of O must be multiplied by `rescale`.

        may_hide: a row may have only -inf so far.
        """
        if cutlass.const_expr(self.lazy_log2 > 0):
            grown = self._grow_if_needed(scores)
        else:
            self._grow(scores)
            grown = Boolean(True)
        for r in cutlass.range_constexpr(2):
            total = self._exponentiate(scores, r, _shift(self.row_max[r], may_hide))
            # Never true, but only known when every exponential is: see `pinned_wait`.
            grown = grown | (total < 0.0)
            self.row_sum[r] = self.row_sum[r] + total
        return any_lane(grown)

    @cute.jit
    def _grow_if_needed(self, scores: cute.Tensor) -> Boolean:
        """Raise the shift of a warp's rows if one of its scores outgrew it, else touch nothing.

        A lane looks at its own columns only: the row's maximum over four lanes, with its shuffles,
        is needed only in the rare case.
        """
        grown = Boolean(False)
        for r in cutlass.range_constexpr(2):
            growth = (_row_max(scores, r) - self.row_max[r]) * self.scale_log2
            grown = grown | (growth > self.lazy_log2)
        grown = any_lane(grown)
        if grown:
            self._grow(scores)
        return grown

    @cute.jit
    def _grow(self, scores: cute.Tensor):
        """Shift rows that outgrew their shift by their true maximum from now on; `rescale` is what
        their older sums and O shrink by. A row's neighbours have no say: its bits are its own."""
        for r in cutlass.range_constexpr(2):
            maximum = cute.arch.fmax(_row_max(scores, r), self.row_max[r])
            maximum = _quad(maximum, cute.arch.fmax)
            growth = (maximum - self.row_max[r]) * self.scale_log2
            maximum = cutlass.select_(growth > self.lazy_log2, maximum, self.row_max[r])
            fallen = self.row_max[r] - _shift(maximum, True)  # -inf - 0 while nothing was seen
            self.rescale[r] = ptx.exp2(fallen * self.scale_log2)
            self.row_sum[r] = self.row_sum[r] * self.rescale[r]
            self.row_max[r] = maximum

    @cute.jit
    def _exponentiate(
        self,
        scores: cute.Tensor,
        r: cutlass.Constexpr[int],
        shift: Float32,
    ) -> Float32:
        """scores = 2^(scale * (scores - shift)) in one row; returns this thread's sum."""
        offset = -shift * self.scale_log2
        chains = [None, None]
        count = 0
        for e in cutlass.range_constexpr(cute.size(scores)):
            if cutlass.const_expr(accumulator_row(e) == r):
                probability = ptx.exp2(ptx.fma(scores[e], self.scale_log2, offset))
                scores[e] = probability
                c = count % 2
                chains[c] = probability if chains[c] is None else chains[c] + probability
                count += 1
        return chains[0] + chains[1]

    @cute.jit
    def scale_output(self, output: cute.Tensor):
        for e in cutlass.range_constexpr(cute.size(output)):
            output[e] = output[e] * self.rescale[accumulator_row(e)]

    @cute.jit
    def weight(self, shift: Float32, r: cutlass.Constexpr[int]) -> Float32:
        """What sums and O of another shift are to be multiplied by for row_max; 0 for -inf."""
        return ptx.exp2((shift - _shift(self.row_max[r], True)) * self.scale_log2)

    @cute.jit
    def finish(self, output: cute.Tensor, sink, has_sink: cutlass.Constexpr[bool]):
        """Divide O by the row sums; row_sum becomes the LSE (natural log). No keys: 0, -inf.

        sink is a logit in natural units, or one for each of the two rows; it joins the sum, and may
        exceed every score.
        """
        for r in cutlass.range_constexpr(2):
            total = _quad(self.row_sum[r], _add)
            maximum = self.row_max[r] * self.scale_log2
            factor = Float32(1.0)
            if cutlass.const_expr(has_sink):
                sink_log2 = _of_row(sink, r) * LOG2_E
                joint = cute.arch.fmax(maximum, sink_log2)
                shift = cutlass.select_(joint == MINUS_INFINITY, Float32(0.0), joint)
                factor = ptx.exp2(maximum - shift)
                total = ptx.fma(total, factor, ptx.exp2(sink_log2 - shift))
                maximum = joint
            empty = total == 0.0
            inverse = cutlass.select_(empty, Float32(0.0), factor * ptx.reciprocal(total))
            lse = (maximum + ptx.log2(total)) * LN2
            self.row_sum[r] = cutlass.select_(empty, Float32(MINUS_INFINITY), lse)
            for e in cutlass.range_constexpr(cute.size(output)):
                if cutlass.const_expr(accumulator_row(e) == r):
                    output[e] = output[e] * inverse


def _add(a: Float32, b: Float32) -> Float32:
    return a + b


def _of_row(sink, r: int) -> Float32:
    return sink[r] if isinstance(sink, tuple) else sink


def _shift(maximum: Float32, may_hide: bool) -> Float32:
    """What to subtract from a row's scores; 0 where all are -inf (-inf - -inf is NaN)."""
    if may_hide:
        return cutlass.select_(maximum == MINUS_INFINITY, Float32(0.0), maximum)
    return maximum


@cute.jit
def _quad(value: Float32, op: cutlass.Constexpr) -> Float32:
    """Reduce over the 4 lanes that share a row."""
    for distance in cutlass.range_constexpr(2):
        value = op(value, cute.arch.shuffle_sync_bfly(value, offset=1 << distance))
    return value


@cute.jit
def _row_max(scores: cute.Tensor, r: cutlass.Constexpr[int]) -> Float32:
    """Maximum of a thread's elements of one row, as two chains for instruction parallelism."""
    chains = [None, None]
    count = 0
    for e in cutlass.range_constexpr(cute.size(scores)):
        if cutlass.const_expr(accumulator_row(e) == r):
            c = count % 2
            chains[c] = scores[e] if chains[c] is None else cute.arch.fmax(chains[c], scores[e])
            count += 1
    return cute.arch.fmax(chains[0], chains[1])


@cute.jit
def soft_cap(scores: cute.Tensor, scale_over_cap: Float32):
    """scores = tanh(scores * scale / cap) = 1 - 2 / (e^2x + 1); the cap itself joins the scale."""
    doubled = scale_over_cap * (2.0 * LOG2_E)
    for e in cutlass.range_constexpr(cute.size(scores)):
        power = ptx.exp2(scores[e] * doubled)
        scores[e] = ptx.fma(ptx.reciprocal(power + 1.0), Float32(-2.0), Float32(1.0))


@cute.jit
def pack_operand(scores: cute.Tensor, operand: cute.Tensor, dtype: cutlass.Constexpr):
    """Round P to 16 bits into operand A of the second product; both layouts list elements alike.

    operand: int32 view of the A fragment. The accumulator of [64, 8 n] and the A operand of
    [64, 16 k] share one register order, so no data crosses lanes.
    """
    for pair in cutlass.range_constexpr(cute.size(operand)):
        operand[pair] = ptx.pack(scores[2 * pair], scores[2 * pair + 1], dtype)


@cute.jit
def any_lane(condition: Boolean) -> Boolean:
    """True in the whole warp if it is in one lane."""
    return cute.arch.vote_any_sync(condition)


__all__ = ["LN2", "LOG2_E", "MINUS_INFINITY", "Softmax", "any_lane", "pack_operand", "soft_cap"]
