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
