"""Which blocks of keys a tile of queries visits, and which of them need a mask.

A tile holds query rows [first_row, first_row + rows). With shift = T - S, row i sees the keys
    i + shift - left <= j <= i + shift + right,   0 <= j < T
so the tile visits key blocks [begin, end), at least one, the last always with a mask, and skips
the mask in [full_begin, full_end), begin <= full_begin <= full_end < end.
Plain arithmetic on integers of either world: Python's (tests) or the device's (`Integer`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

UNBOUNDED = 1 << 29
"""A window side that never cuts, small enough that sums of three stay inside int32."""
CLUSTER = 16
"""Blocks of keys that are counted together."""
LANES = 32
"""Of a warp."""
AHEAD = 176
"""Blocks of keys, beside those whose rows meet its own, between one and the one that prepares or
finishes its rows: more than run at once (132) and a cluster, so that nobody waits."""


@dataclass(frozen=True)
class BlockRange:
    """Blocks that a tile visits. Of keys, for a tile of queries: at least one, all masked if it
    sees no key. `query_range` gives blocks of queries for a tile of keys."""

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any

    def inside(self, outer: BlockRange, integer: Any = None) -> BlockRange:
        """This range where it may leave the outer one: rows behind a sequence's end see blocks
        that its tile does not have. At least one block is left, the last with a mask."""
        integer = integer or Integer
        begin = integer.maximum(integer.minimum(self.begin, outer.end - 1), outer.begin)
        end = integer.maximum(integer.minimum(self.end, outer.end), begin + 1)
        full_end = integer.maximum(integer.minimum(self.full_end, end - 1), begin)
        full_begin = integer.minimum(integer.maximum(self.full_begin, begin), full_end)
        return BlockRange(begin=begin, full_begin=full_begin, full_end=full_end, end=end)


@dataclass(frozen=True)
class Walk:
    """What the order of additions to dQ depends on, beside the window."""

    num_key_blocks: Any
    """Of the sequence."""
    num_query_blocks: Any
    shift: Any
    """T - S."""
    block_q: int
    block_k: int
    together: Any
    """Whether all blocks of keys of a head run at once; read only without a mask."""
    integer: Any
    """min, max and select of the integers above."""
    down: Any = None
    """Causal: whether this head's blocks start with the first keys and walk down the queries; None
    where that is not compiled in."""


@dataclass(frozen=True)
class Integer:
    """min, max and floor division, for Python's integers; the device passes its own."""

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return min(a, b)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return max(a, b)

    @staticmethod
    def choose(condition: Any, a: Any, b: Any) -> Any:
        return a if condition else b


@dataclass(frozen=True)
class KeyOrder:
    """The numbering of the backward's blocks of keys, with as many queries as keys where it says
    who works on whose rows.

    Section of heads after section, inside it the first keys of all heads first (causal: the longest
    walks). Of a causal window the last `span` blocks of each head have shorter walks: they come
    after all others and fill the end, when some multiprocessors have run out of work.

    The rows of a block are the queries at its keys. They are met, their dQ added to, by blocks of
    the same head: `lead` after it at most (without a mask; else 0) and `span` before it. So block n
    may prepare the rows of block n + lag (zeros in dQ, statistics), and adds itself when all that
    it meets are prepared; and it may finish the rows of block n - delay, when all that met them
    have ended: in all of that only lower numbers are waited for.
    """

    num_key_blocks: Any
    """Of a head."""
    num_heads: Any
    """Of keys and values."""
    num_batches: Any
    heads_per_section: Any
    span: Any
    """Blocks of keys behind its own whose rows see a block's keys."""
    short: Any
    """Of a head's blocks, those that come last: span or all of a window, else none."""
    lead: Any = 0
    """Blocks of keys before its own whose rows see a block's keys."""

    def units(self) -> Any:
        return self.num_heads * self.num_batches

    def num_tiles(self) -> Any:
        return self.units() * self.num_key_blocks

    def num_long(self) -> Any:
        return self.units() * (self.num_key_blocks - self.short)

    def lag(self) -> Any:
        """Between a number and the one whose rows it prepares."""
        return self.span * self.heads_per_section + AHEAD

    def delay(self) -> Any:
        """Between a number and the one whose rows it finishes."""
        return self.lead * self.heads_per_section + AHEAD

    def coordinates(self, number: Any, integer: Any = Integer) -> tuple[Any, Any, Any]:
        """(block of keys, head, batch) of a number."""
        choose = integer.choose
        long, num_long = self.num_key_blocks - self.short, self.num_long()
        behind = number >= num_long
        inside = number - choose(behind, num_long, 0)
        per_section = choose(behind, self.short, long) * self.heads_per_section
        section = inside // per_section
        first = section * self.heads_per_section
        width = integer.minimum(self.heads_per_section, self.units() - first)
        inside = inside - section * per_section
        row = inside // width
        unit = first + inside - row * width
        batch = unit // self.num_heads
        return row + choose(behind, long, 0), unit - batch * self.num_heads, batch

    def _number(self, block: Any, head: Any, batch: Any, integer: Any) -> Any:
        """Of a block that is none of the short ones."""
        long = self.num_key_blocks - self.short
        unit = batch * self.num_heads + head
        first = unit // self.heads_per_section * self.heads_per_section
        width = integer.minimum(self.heads_per_section, self.units() - first)
        return first * long + block * width + unit - first

    def prepared_before(self, block: Any, head: Any, batch: Any, integer: Any = Integer) -> Any:
        """Whether a block's rows are prepared by nobody in the main kernel."""
        late = block >= self.num_key_blocks - self.short
        return late | (self._number(block, head, batch, integer) < self.lag())

    def finished_after(self, block: Any, head: Any, batch: Any, integer: Any = Integer) -> Any:
        """Whether a block's rows are finished by nobody in the main kernel."""
        late = block >= self.num_key_blocks - self.short
        number = self._number(block, head, batch, integer)
        return late | (number >= self.num_tiles() - self.delay())

    def preparing(self, number: Any, integer: Any = Integer) -> tuple[Any, Any]:
        """Clusters [begin, end) of numbers that must have prepared their rows before one adds."""
        least, most = integer.minimum, integer.maximum
        lag, section = self.lag(), self.heads_per_section
        last = least(number + self.span * section, self.num_long() - 1) - lag
        begin = most(number - self.lead * section - lag, 0) // CLUSTER
        return begin, (most(last + 1, 0) + CLUSTER - 1) // CLUSTER

    def adding(self, number: Any, integer: Any = Integer) -> tuple[Any, Any]:
        """Clusters [begin, end) of numbers that must have ended before a number's rows are
        finished."""
        section = self.heads_per_section
        last = integer.minimum(number + self.lead * section, self.num_long() - 1)
        begin = integer.maximum(number - self.span * section, 0) // CLUSTER
        return begin, (last + CLUSTER) // CLUSTER

    def num_clusters(self) -> Any:
        return (self.num_tiles() + CLUSTER - 1) // CLUSTER


def key_order(
    sizes: tuple[Any, Any, Any],
    heads_per_section: Any,
    bounds: tuple[Any | None, bool],
    integer: Any = Integer,
) -> KeyOrder:
    """sizes: blocks of keys of a head, heads of keys, batches; bounds: of a causal window, the
    blocks behind a block's own whose queries see its keys (None where it is unbounded), and whether
    the mask is causal."""
    span, causal = bounds
    if span is None:
        all_others = sizes[0] - 1
        return KeyOrder(*sizes, heads_per_section, all_others, 0, 0 if causal else all_others)
    return KeyOrder(*sizes, heads_per_section, span, integer.minimum(span, sizes[0]))


def window_span(window_left: Any, block_k: int) -> Any:
    """Blocks of keys behind one whose queries see its keys, in a causal window of as many queries
    as keys."""
    return (window_left + block_k - 1) // block_k


def block_range(
    first_row: Any,
    rows: int,
    block: int,
    lengths: tuple[Any, Any],
    window: tuple[Any | None, Any | None],
    integer: Any = Integer,
) -> BlockRange:
    """Blocks of `block` keys that `rows` queries from `first_row` visit.

    lengths is (S, T); window is (left, right), None where that side is not compiled in.
    All divisions are of numbers that were clamped at 0 first, so truncation is floor.
    """
    seqlen_q, seqlen_k = lengths
    left, right = window
    shift = seqlen_k - seqlen_q
    end_key, full_end_key = seqlen_k, seqlen_k
    if right is not None:
        end_key = integer.minimum(seqlen_k, first_row + rows + shift + right)
        full_end_key = integer.minimum(seqlen_k, first_row + 1 + shift + right)
    end = (integer.maximum(end_key, 0) + block - 1) // block
    full_end = integer.maximum(full_end_key, 0) // block
    begin, full_begin = 0, 0
    if left is not None:
        begin = integer.maximum(first_row + shift - left, 0) // block
        last_start = integer.maximum(first_row + rows - 1 + shift - left, 0)
        full_begin = (last_start + block - 1) // block
    # At least one block, so that the pipelines need no case for a tile that sees no key.
    end = integer.maximum(end, begin + 1)
    full_end = integer.maximum(integer.minimum(full_end, end - 1), begin)
    full_begin = integer.minimum(integer.maximum(full_begin, begin), full_end)
    return BlockRange(begin=begin, full_begin=full_begin, full_end=full_end, end=end)


def turn(
    key_block: Any, query_block: Any, walk: Walk, window: tuple[Any | None, Any | None]
) -> Any:
    """How many blocks of keys add to a block of queries before this one, in deterministic order.

    Under a mask the last keys that are seen come first: walks start at the diagonal, so that is
    the order in which they come by, and blocks must start in it. Without a mask and with all blocks
    of a head running at once (together), walks start spread over the queries, and again the order
    is that in which they come by; else it is that of the blocks' numbers, in which they start. So
    it is for a causal walk down: no mask hides the keys before.
    """
    left, right = window
    last = walk.num_key_blocks - 1
    if right is not None:
        last_query = (query_block + 1) * walk.block_q - 1 + walk.shift + right
        from_last = walk.integer.minimum(last, last_query // walk.block_k) - key_block
        if walk.down is None:
            return from_last
        return walk.integer.choose(walk.down, key_block, from_last)
    if left is not None:
        return last - key_block
    # Block n starts at query block n * num_query_blocks // num_key_blocks.
    reached = (query_block + 1) * walk.num_key_blocks + walk.num_query_blocks - 1
    in_order = reached // walk.num_query_blocks - 1 - key_block
    wrapped = in_order + walk.num_key_blocks
    in_order = walk.integer.choose(in_order < 0, wrapped, in_order)
    return walk.integer.choose(walk.together, in_order, key_block)


def query_range(
    first_key: Any,
    keys: int,
    block: int,
    lengths: tuple[Any, Any],
    window: tuple[Any | None, Any | None],
    integer: Any = Integer,
) -> BlockRange:
    """Blocks of `block` queries that see any of `keys` keys from `first_key`: the backward's walk.

    Key j is seen by the queries j - shift - right <= i <= j - shift + left, 0 <= i < S. Blocks
    [full_begin, full_end) need no mask for the diagonal or the window; unlike a forward tile's,
    both ranges may be empty, and this one may reach beyond the other.
    """
    seqlen_q, seqlen_k = lengths
    left, right = window
    shift = seqlen_k - seqlen_q
    last_key = first_key + keys - 1
    begin, full_begin = 0, 0
    if right is not None:
        begin = integer.maximum(first_key - shift - right, 0) // block
        full_begin = (integer.maximum(last_key - shift - right, 0) + block - 1) // block
    end_query, full_end_query = seqlen_q, seqlen_q + block - 1
    if left is not None:
        end_query = integer.minimum(seqlen_q, last_key - shift + left + 1)
        full_end_query = integer.minimum(full_end_query, first_key - shift + left + 1)
    end = (integer.maximum(end_query, 0) + block - 1) // block
    end = integer.maximum(end, begin)
    full_end = integer.maximum(full_end_query, 0) // block
    return BlockRange(begin=begin, full_begin=full_begin, full_end=full_end, end=end)


def sampled(low: Any, high: Any, lane: Any, integer: Any = Integer) -> Any:
    """Which of the sequences [low, high) a lane looks at, in a search by a whole warp; lanes behind
    the end look at the last one."""
    stride = (high - low + LANES - 1) // LANES
    return integer.minimum(low + lane * stride, high - 1)


def narrowed(low: Any, high: Any, begun: Any, integer: Any = Integer) -> tuple[Any, Any]:
    """The sequences [low, high) that are left when so many lanes, the first ones, have found one
    that begins no later than what is searched. To 32 sequences one round finds it."""
    stride = (high - low + LANES - 1) // LANES
    low = integer.minimum(low + integer.maximum(begun - 1, 0) * stride, high - 1)
    return low, integer.minimum(low + stride, high)
