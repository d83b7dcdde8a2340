"""The tiles of packed sequences as a list, longest first, made on the device.

A grid of (longest sequence) x (batch) starts a program for every tile that any sequence could
have; with mixed lengths most of them leave at once and the long sequences' tiles start among the
last. Here a program is started for each tile that there can be, at most rows / BLOCK + batch, and
reads which one it is:

    entry = (sequence, tile), ordered by the tiles that it meets, most first; (-1, 0) past the end

Heads go in groups whose keys and values fit the L2 cache; inside a group the heads of a tile start
side by side, so that the last to start are the shortest tiles of all its heads.
The place of a tile is counted, not sorted: tiles with more work, then ties by sequence. Rows of the
tensor behind the last sequence are one more sequence (number B) of used length 0, so that every row
is written and nothing has to be cleared beforehand. Nothing is read on the host: no sync.

Bytes: 4 (B + 1) a program, 8 an entry; bound by launch latency (some 3 us on an H200).
Source: longest-processing-time order is Graham's (1969); for packed attention FlashAttention-3
sorts whole sequences in a kernel of its own. The order of single tiles by counting is our own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def list_tiles(
    entries,
    starts,
    other_starts,
    batch,
    rows,
    capacity,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    LANES: tl.constexpr,
):
    """Grid (batch + 1): the places of one sequence's tiles.

    starts int32 [batch + 1] are of the tiled side, other_starts of the other; rows is the tiled
    tensor's length. KIND says how a tile's work varies inside its sequence: "rising" (queries under
    a right bound), "falling" (keys under one), "flat" (neither).
    """
    b = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    start = tl.load(starts + b)
    end = tl.load(starts + b + 1, mask=b < batch, other=rows)
    ordered = (start >= 0) & (start <= end) & (end <= rows)
    tl.device_assert(ordered, "attention: cu_seqlens must not decrease or exceed the tensor")
    num = tl.cdiv(end - start, BLOCK)
    mine = _work_before(starts, other_starts, b, end - start, batch, BLOCK, KIND)
    for first in range(0, num, LANES):
        tile = first + lanes
        index = num - 1 - tile if KIND == "falling" else tile
        place = tl.zeros((LANES,), tl.int32)
        for from_b in range(0, batch + 1, LANES):
            other = from_b + lanes
            here = other <= batch
            low = tl.load(starts + other, mask=here, other=0)
            high = tl.load(starts + other + 1, mask=other < batch, other=rows)
            tiles = tl.where(here, tl.cdiv(high - low, BLOCK), 0)
            work = _work_before(starts, other_starts, other, high - low, batch, BLOCK, KIND)
            if KIND == "flat":
                ahead = (work > mine) | ((work == mine) & (other < b))
                place += tl.sum(tl.where(ahead, tiles, 0), 0)
            else:
                # tiles of `other` with more work than work + index, and one of as much
                same = (mine + index)[:, None] - work[None, :]
                more = tl.maximum(tiles[None, :] - tl.maximum(same + 1, 0), 0)
                tie = (same >= 0) & (same < tiles[None, :]) & (other < b)[None, :]
                place += tl.sum(more + tie.to(tl.int32), 1)
        if KIND == "flat":
            place += index
        inside = tile < num
        tl.store(entries + 2 * place, b + lanes * 0, mask=inside)
        tl.store(entries + 2 * place + 1, tile, mask=inside)
    if b == batch:
        total = tl.cast(0, tl.int32)
        for from_b in range(0, batch + 1, LANES):
            other = from_b + lanes
            low = tl.load(starts + other, mask=other <= batch, other=0)
            high = tl.load(starts + other + 1, mask=other < batch, other=rows)
            total += tl.sum(tl.where(other <= batch, tl.cdiv(high - low, BLOCK), 0), 0)
        for place in range(total, capacity, LANES):
            tl.store(entries + 2 * (place + lanes), -1, mask=place + lanes < capacity)
            tl.store(entries + 2 * (place + lanes) + 1, 0, mask=place + lanes < capacity)


@triton.jit
def _work_before(starts, other_starts, b, length, batch, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Tiles of the other side that a sequence's first (counted) tile meets beyond its own place."""
    work = length * 0
    if KIND != "falling":
        low = tl.load(other_starts + b, mask=b < batch, other=0)
        high = tl.load(other_starts + b + 1, mask=b < batch, other=0)
        work = tl.cdiv(high - low, BLOCK)
        if KIND == "rising":
            work = tl.where(b < batch, work - tl.cdiv(length, BLOCK), -(2**20))
    return tl.where(b < batch, work, -(2**20))


@triton.jit
def tile_of(c, REVERSED: tl.constexpr):
    """(tile, head, sequence) of this program: from the list, or by the grid (tiles, heads, batch).

    Listed, the grid is flat: groups of heads, in a group tile by tile, for each its heads. So the
    longest tiles of all heads of a group start first, while their keys still share the L2 cache.
    """
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if c.tiles is not None:
        tile, h, b = listed(c, tile)
    elif REVERSED:  # longest first: the last wave is short ones
        tile = tl.num_programs(0) - 1 - tile
    return tile, h, b


@triton.jit
def listed(c, place):
    """`tile_of` a place in the list's flat grid."""
    in_group = c.num_tiles * c.head_group
    in_head = place % in_group
    h = place // in_group * c.head_group + in_head % c.head_group
    entry = c.tiles + 2 * (in_head // c.head_group)
    return tl.load(entry + 1), h, tl.load(entry)
