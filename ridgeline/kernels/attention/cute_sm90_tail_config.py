"""Whether cutting the last tiles of a Hopper forward along their keys pays, and how; needs no DSL.

The schedule is cute/tail.py's. Times are in key blocks: what one block of keys takes in a tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.core.arch import Arch
from ridgeline.kernels.attention.cute.tail import MOST_UNITS, Tail, tail
from ridgeline.kernels.attention.cute_sm90_config import (
    REGISTERS,
    ForwardConfig,
    ForwardTraits,
    forward_traits,
    rows_per_block,
    why_invalid,
)
from ridgeline.kernels.attention.problem import AttentionProblem

VECTOR = 4
"""fp32 of a 16-byte access."""
WARPGROUP_THREADS = 128
QUEUE_WORDS = 2
"""Of the work queue, in front of the counters of pieces."""
LEAST_GAIN = 0.005
"""Of the time; less is not worth a second kernel."""

FLOPS_PER_CYCLE = 4096
EXPONENTIALS_PER_CYCLE = 16
START_CYCLES = 3500
"""What a tile or a piece costs beside its blocks: head dim 128 without a mask takes 1.04 times as
long a block at 32 of them as at 128, and 1.15 at 8 (docs/log/attention_hopper.md, H200)."""
BYTES_PER_CYCLE = 32
"""Between L2 and a multiprocessor while all are at it; assumed, not measured."""
COUNT_CYCLES = 2500
"""To wait for a piece's stores, and to count it; assumed."""
ASK_CYCLES = 1000
"""Until the first bytes of a piece to be merged are there; assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """In key blocks."""

    start: float
    """A tile's or a piece's, beside its blocks."""
    write: float
    """To write a piece down and count it."""
    merge: float
    """For each piece of a tile, at its end."""


def costs(traits: ForwardTraits, config: ForwardConfig) -> Costs:
    """A block takes its products and half of its exponentials, the rest of which lies under them:
    within 8 % of what head dims 64 and 128 take."""
    rows = rows_per_block(config)
    pairs = rows * config.block_k
    products = 2 * pairs * (traits.head_dim + traits.head_dim_v) / FLOPS_PER_CYCLE
    block = products + pairs / EXPONENTIALS_PER_CYCLE / 2
    copy = 4 * rows * traits.head_dim_v / BYTES_PER_CYCLE
    return Costs(
        start=START_CYCLES / block,
        write=(copy + COUNT_CYCLES) / block,
        merge=(copy + ASK_CYCLES) / block,
    )


def plain_time(num_tiles: int, num_units: int, blocks: int, cost: Costs) -> float:
    """Until the last of num_tiles equal tiles has ended, each of `blocks` key blocks."""
    return -(-num_tiles // num_units) * (blocks + cost.start)


def split_time(cut: Tail, num_units: int, cost: Costs) -> float:
    """The same with the last ones cut. Ranges that do not fit the tiles evenly hold two pieces, and
    one tile has a piece more."""
    time = cut.whole // num_units * (cut.blocks + cost.start)
    if cut.left == 0:
        return time
    even = cut.ranges % cut.left == 0
    pieces = -(-cut.ranges // cut.left) + (0 if even else 1)
    longest = -(-cut.left * cut.blocks // cut.ranges)
    held = 1 if even else 2
    if pieces == 1:
        return time + longest + cost.start
    return time + longest + held * (cost.start + cost.write) + pieces * cost.merge


def best_tail(num_tiles: int, num_units: int, blocks: int, cost: Costs) -> Tail:
    """The number of ranges that takes the least time: one a multiprocessor, or fewer that fit the
    tiles evenly, as few pieces are merged sooner."""
    left = num_tiles % num_units
    counts = {num_units, *range(2 * left, num_units + 1, left)} if left else {0}
    tails = [tail(num_tiles, num_units, blocks, count) for count in sorted(counts)]
    return min(tails, key=lambda cut: split_time(cut, num_units, cost))


def tail_of(problem: AttentionProblem, config: ForwardConfig, arch: Arch) -> Tail:
    """How the last tiles of a dense problem are cut, whether that pays or not."""
    num_tiles = -(-problem.seqlen_q // rows_per_block(config)) * problem.heads * problem.batch
    blocks = -(-problem.seqlen_k // config.block_k)
    cost = costs(forward_traits(problem), config)
    return best_tail(num_tiles, arch.num_units, blocks, cost)


def pays(cut: Tail, num_units: int, cost: Costs) -> bool:
    """Whether cutting the last tiles takes less time by more than LEAST_GAIN: never of none."""
    plain = plain_time(cut.whole + cut.left, num_units, cut.blocks, cost)
    return split_time(cut, num_units, cost) < (1 - LEAST_GAIN) * plain


def settled(problem: AttentionProblem, config: ForwardConfig, arch: Arch) -> ForwardConfig:
    """The tile config without `split_tail` where it is not valid or does not pay."""
    if not config.split_tail:
        return config
    traits = forward_traits(problem)
    if why_invalid(config, traits) is None and _fits(problem, config, arch):
        cut = tail_of(problem, config, arch)
        if pays(cut, arch.num_units, costs(traits, config)):
            return config
    return replace(config, split_tail=False)


def _fits(problem: AttentionProblem, config: ForwardConfig, arch: Arch) -> bool:
    """Whether the kernel's products of counts are int32: a length of 15 million keys is not."""
    blocks = -(-problem.seqlen_k // config.block_k)
    return arch.num_units <= MOST_UNITS and blocks * arch.num_units**2 < 2**31


def pieces_row(config: ForwardConfig, traits: ForwardTraits) -> tuple[int, int, int]:
    """Of a piece in the fp32 workspace: (warpgroups, vectors, numbers of a warpgroup's vector). A
    thread writes its part of O, then its two rows' maxima and sums."""
    vectors = traits.head_dim_v // 2 // VECTOR + 1
    return config.num_warpgroups, vectors, WARPGROUP_THREADS * VECTOR


def pieces_shape(cut: Tail, config: ForwardConfig, traits: ForwardTraits) -> tuple[int, ...]:
    """Of the workspace: every place's row."""
    return cut.places(), *pieces_row(config, traits)


def counter_words(num_units: int) -> int:
    """int32 that suffice for every launch: the work queue's, and one a place and warpgroup."""
    return QUEUE_WORDS + 2 * num_units * max(REGISTERS)
