"""Tiles of packed heads: whose queries their rows are, which blocks of keys they see, in parts.

The heads of a group times the queries of a sequence are the rows of its tiles: row r is query
r // group of head r % group (of the group), so that few queries still fill the 64 rows of a WGMMA
and every key is read once a group. Source: FlashAttention-3's PackGQA.

The visited blocks of a tile may be cut into `num_splits` parts of neighbours, one a block of
threads: Flash-Decoding (Dao et al., 2023). The last part has at least one block, others may be
empty. Plain arithmetic on integers of either world, as blocks.py.
"""

from __future__ import annotations

from typing import Any

from ridgeline.kernels.attention.cute.blocks import BlockRange, Integer, block_range


def packed_range(
    rows: tuple[Any, int, Any],
    block: int,
    lengths: tuple[Any, Any, Any | None],
    window: tuple[Any | None, Any | None],
    integer: Any = Integer,
) -> BlockRange:
    """Blocks of `block` keys that a tile of packed rows visits.

    rows is (first packed row, number of rows, group); lengths is (S, T, leftpad), leftpad None
    where no key is missing at the front; window as block_range's, bounded on the left with leftpad.
    """
    first_row, num_rows, group = rows
    seqlen_q, seqlen_k, leftpad = lengths
    first = first_row // group
    last = integer.minimum(
        (first_row + num_rows - 1) // group, integer.maximum(seqlen_q - 1, first)
    )
    blocks = block_range(first, last - first + 1, block, (seqlen_q, seqlen_k), window, integer)
    if leftpad is None:
        return blocks
    begin = integer.maximum(blocks.begin, integer.minimum(leftpad // block, blocks.end - 1))
    full_end = integer.maximum(blocks.full_end, begin)
    full_begin = integer.maximum(blocks.full_begin, (leftpad + block - 1) // block)
    full_begin = integer.minimum(integer.maximum(full_begin, begin), full_end)
    return BlockRange(begin=begin, full_begin=full_begin, full_end=full_end, end=blocks.end)


def split_range(
    blocks: BlockRange, split: Any, num_splits: Any, integer: Any = Integer
) -> tuple[BlockRange, Any]:
    """(blocks, how many) of one part; a part without blocks gives a range that must not be read."""
    count = blocks.end - blocks.begin
    begin = blocks.begin + count * split // num_splits
    end = blocks.begin + count * (split + 1) // num_splits
    part = BlockRange(begin, begin, begin, integer.maximum(end, begin + 1))
    return blocks.inside(part, integer), end - begin
