"""How Hopper's WGMMA kernel adds the parts of K of a tile that several blocks share.

Blocks that have equal parts of K and end together: every block owns a share of the tile's fragments
(16 outputs x 8 rows, a warp's quads): it sends the others theirs, waits for its own, adds them in
the order of k and writes them. In a cluster the sums go to the owner's shared memory, where a
barrier counts their bytes; otherwise through global memory: each block moves (parts - 1) / parts of
a tile each way, where a last block that adds alone would read all of it parts times (256 KB at 64
rows in 8 parts, some 3.5 us). Up to 16 rows a sum there says itself that it has come (the idea of
NCCL's LL protocol, whose words carry a flag; here a word is its own): store, fence, counter, look
at the counter and load are five ways to L2 one after the other, store and load two. With more rows
marking the places as empty costs what that saves.

Blocks with uneven shares (schedule.py): all but the one with a tile's first steps leave their sums
in a place of their own long before it ends, and it adds them alone. A warp that does not multiply
tells and waits (`assist`).

Legend: f a warp's fragment, number its first one's place in the tile, place = (warpgroup, warp,
lane).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ridgeline.kernels.w4a16 import cute_ptx as ptx
from ridgeline.kernels.w4a16 import schedule
from ridgeline.kernels.w4a16.cute_epilogue import write_rows


@cute.jit
def write_fragment(values, f: cutlass.Constexpr, place, corner, dst, cfg: cutlass.Constexpr):
    """Store a lane's part of the f-th 16 outputs x 8 rows of its warp."""
    bias, N, out, M, stride = dst
    wg, warp, lane = place
    region = wg * cfg.row_mmas + f // (cfg.block_m // 8)
    m = corner[0] + f % (cfg.block_m // 8) * 8 + 2 * (lane % 4)
    scaled = [value * cfg.weight_factor for value in values]
    write_rows(scaled, corner[1] + region * 64 + warp * 16, lane, m, (out, bias, M, N, stride), cfg)


@cute.jit
def fragment(acc, f: cutlass.Constexpr, cfg: cutlass.Constexpr):
    """The four sums of a lane in the f-th fragment of its warp."""
    per_mma = cfg.block_m // 8
    return [acc[f // per_mma][4 * (f % per_mma) + e] for e in range(4)]


@cute.jit
def in_order(own, rank, others, cfg: cutlass.Constexpr):
    """Sum of all blocks' quads, others[rank] replaced by this block's."""
    total = None
    for part in cutlass.range_constexpr(cfg.split):
        values = []
        for e in cutlass.range_constexpr(4):
            value = others[part][e]
            if rank == part:
                value = own[e]
            values.append(value)
        if cutlass.const_expr(part == 0):
            total = values
        else:
            total = [total[e] + values[e] for e in range(4)]
    return total


@cute.jit
def finish_cluster(acc, place, rank, received, corner, dst, cfg: cutlass.Constexpr):
    """Add the cluster's parts of a tile in order of k, every block a share of the fragments;
    received = (where the others' come to, the barrier that counts them)."""
    wg, warp, lane = place
    at, there = received
    number = (wg * 4 + warp) * cfg.warp_fragments
    share = -(-cfg.fragments // cfg.cluster) * 512
    for f in cutlass.range_constexpr(cfg.warp_fragments):
        owner, index = (number + f) % cfg.cluster, (number + f) // cfg.cluster
        if owner != rank:
            to = at + rank * share + index * 512 + lane * 16
            ptx.sts128f_async(to, there, owner, fragment(acc, f, cfg))
    ptx.mbar_wait(there, 0)
    for f in cutlass.range_constexpr(cfg.warp_fragments):
        if (number + f) % cfg.cluster == rank:
            first = at + (number + f) // cfg.cluster * 512 + lane * 16
            others = [ptx.lds128f(first + part * share) for part in range(cfg.cluster)]
            total = in_order(fragment(acc, f, cfg), rank, others, cfg)
            write_fragment(total, f, place, corner, dst, cfg)


@cute.jit
def finish_parts(acc, place, of_tile, scratch, corner, dst, cfg: cutlass.Constexpr):
    """The same through global memory; of_tile = (tile, which part).

    A warp waits for the same warp of the tile's other blocks: a counter goes up to `parts` as they
    have stored, and on to 2 parts, which is 0, as they have seen it."""
    wg, warp, lane = place
    workspace, counters = scratch
    tile, rank = of_tile
    mine = wg * 4 + warp
    number = mine * cfg.warp_fragments
    base = workspace + Int64(tile) * (cfg.parts * cfg.fragments * 512) + lane * 16
    for f in cutlass.range_constexpr(cfg.warp_fragments):
        if (number + f) % cfg.parts != rank:
            to = base + (rank * cfg.fragments + number + f) * 512
            ptx.stg128f(to, fragment(acc, f, cfg))
    cute.arch.sync_warp()
    leader = Int32(lane == 0)
    counter = counters + Int64(tile * (4 * cfg.consumers) + mine) * 4
    ptx.arrive_counter(counter, 2 * cfg.parts - 1, leader)
    ptx.wait_counter(counter, cfg.parts, leader)
    cute.arch.sync_warp()
    ptx.leave_counter(counter, 2 * cfg.parts - 1, leader)
    for f in cutlass.range_constexpr(cfg.warp_fragments):
        if (number + f) % cfg.parts == rank:
            first = base + (number + f) * 512
            others = [
                ptx.ldg128f(first + part * (cfg.fragments * 512), Int32(rank != part))
                for part in range(cfg.parts)
            ]
            total = in_order(fragment(acc, f, cfg), rank, others, cfg)
            write_fragment(total, f, place, corner, dst, cfg)


@cute.jit
def open_parts(of_tile, scratch, ready, lane, cfg: cutlass.Constexpr):
    """The producer warp, when all has been asked for: mark the places where other blocks' sums come
    to this one as empty, tell it, and tell this block when all others have (`ready`), so that no
    fence and no counter comes between products and sums."""
    workspace, counters = scratch
    tile, rank = of_tile
    base = workspace + Int64(tile) * (cfg.parts * cfg.fragments * 512) + lane * 16
    for f in cutlass.range(rank, cfg.fragments, cfg.parts, unroll=1):
        for part in cutlass.range_constexpr(cfg.parts):
            if part != rank:
                ptx.stg128_empty(base + (part * cfg.fragments + f) * 512)
    cute.arch.sync_warp()
    leader = Int32(lane == 0)
    counter = counters + Int64(tile) * 4
    # up to `parts` as places are marked, and on to 2 parts, which is 0, as that has been seen
    ptx.tell_counter(counter, 2 * cfg.parts - 1, leader)
    ptx.wait_counter(counter, cfg.parts, leader)
    ptx.leave_counter(counter, 2 * cfg.parts - 1, leader)
    ptx.mbar_arrive(ready, leader)


@cute.jit
def finish_told(acc, place, of_tile, meet, corner, dst, cfg: cutlass.Constexpr):
    """`finish_parts` between places that `open_parts` has marked; meet = (workspace, ready).

    Whoever waits reads the words until they are there: no fence, no counter and no second way to
    memory behind the sums."""
    wg, warp, lane = place
    workspace, ready = meet
    tile, rank = of_tile
    number = (wg * 4 + warp) * cfg.warp_fragments
    base = workspace + Int64(tile) * (cfg.parts * cfg.fragments * 512) + lane * 16
    ptx.mbar_wait(ready, 0)
    for f in cutlass.range_constexpr(cfg.warp_fragments):
        if (number + f) % cfg.parts != rank:
            to = base + (rank * cfg.fragments + number + f) * 512
            ptx.stg128f_told(to, fragment(acc, f, cfg))
    for f in cutlass.range_constexpr(cfg.warp_fragments):
        if (number + f) % cfg.parts == rank:
            first = base + (number + f) * 512
            others = ptx.wait_told(first, cfg.fragments * 512, cfg.parts, rank)
            total = in_order(fragment(acc, f, cfg), rank, others, cfg)
            write_fragment(total, f, place, corner, dst, cfg)


@cute.jit
def make_parts(work, scratch, place, cfg: cutlass.Constexpr):
    """Where a lane leaves and takes sums: (place of a block's sums 0, bytes between blocks' places,
    this block's number, counter of the tile it leaves sums of, of the one it finishes, how many
    leave sums of that one)."""
    plan, share, tiles_mn, (left, head) = work
    _, steps, blocks, me = plan
    workspace, counters = scratch
    wg, warp, lane = place
    which = tiles_mn[2]
    own = wg * 4 + warp
    pitch = cfg.cast * (cfg.fragments * 512)
    base = workspace + which * (cfg.fragments * 512) + own * (cfg.warp_fragments * 512) + lane * 16
    leaves, finishes = share[0] // steps, (share[1] - 1) // steps
    others, start = Int32(0), share[1]
    end = cutlass.min((finishes + 1) * steps, left * steps)
    while start < end:
        others = others + 1
        start = schedule.start_of(me + 1 + others, left, blocks, steps, head)
    at = [counters + Int64(tile * cfg.cast + which) * 4 for tile in (leaves, finishes)]
    return base, pitch, me, at[0], at[1], others


@cute.jit
def leave_part(acc, parts, left, lane, cfg: cutlass.Constexpr):
    """Store a warp's sums of a tile that another block finishes; `assist` tells it."""
    base, pitch, me, _, _, _ = parts
    for f in cutlass.range_constexpr(cfg.warp_fragments):
        ptx.stg128f(base + Int64(me) * pitch + f * 512, fragment(acc, f, cfg))
    cute.arch.sync_warp()
    ptx.mbar_arrive(left, Int32(lane == 0))


@cute.jit
def assist(work, scratch, meet, lane, cfg: cutlass.Constexpr):
    """A warp that does not multiply: tell other blocks of the sums that this one leaves, and this
    one of theirs, so that no fence and no look at a counter (a thousand clocks each) comes between
    products; meet = (barrier of sums that are left, of others' that are there)."""
    plan, share, _, _ = work
    first, end, _ = share
    steps = plan[1]
    parts = make_parts(work, scratch, (Int32(0), Int32(0), lane), cfg)
    leader = Int32(lane == 0)
    if end > first:
        if first % steps != 0:
            ptx.mbar_wait(meet[0], 0)
            ptx.tell_counter(parts[3], 1 << 20, leader)
        if end % steps != 0:
            if end // steps * steps >= first:
                ptx.wait_counter(parts[4], parts[5], leader)
                ptx.leave_counter(parts[4], parts[5], leader)
                ptx.mbar_arrive(meet[1], leader)


@cute.jit
def take_part(values, parts, after, first: cutlass.Constexpr, cfg: cutlass.Constexpr):
    """Load the warp's fragments from `first` on of the sums that the block `after` this one left:
    as many as `values` holds."""
    base, pitch, me, _, _, _ = parts
    at = base + Int64(me + after) * pitch + first * 512
    for f in cutlass.range_constexpr(cute.size(values) // 4):
        quad = ptx.ldg128f(at + f * 512)
        for e in cutlass.range_constexpr(4):
            values[4 * f + e] = quad[e]


@cute.jit
def add_parts(acc, taken, parts, there, cfg: cutlass.Constexpr):
    """Add the others' sums in the order of k; `taken` holds the first other's if they are taken
    early; `there` is the barrier of all."""
    others = parts[5]
    per_mma = cfg.block_m // 8
    if cutlass.const_expr(cfg.takes_early):
        for i in cutlass.range_constexpr(4 * per_mma):
            acc[0][i] = acc[0][i] + taken[i]
    else:
        ptx.mbar_wait(there, 0)
    count = min(per_mma, 16)
    values = cute.make_rmem_tensor((4 * count,), Float32)
    for after in cutlass.range(1 + cfg.takes_early, others + 1, unroll=1):
        for first in cutlass.range_constexpr(0, cfg.warp_fragments, count):
            take_part(values, parts, after, first, cfg)
            for i in cutlass.range_constexpr(4 * count):
                mi, at = first // per_mma, 4 * (first % per_mma) + i
                acc[mi][at] = acc[mi][at] + values[i]
