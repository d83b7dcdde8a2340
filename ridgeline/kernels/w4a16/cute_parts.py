"""How Hopper's WGMMA kernel adds the parts of K of a tile that several blocks share.

Every block owns a share of the tile's fragments (16 outputs x 8 rows, a warp's quads): it sends the
others theirs, waits for its own, adds them in the order of k and writes them. In a cluster the sums
go to the owner's shared memory, where a barrier counts their bytes; otherwise through global
memory: each block moves (parts - 1) / parts of a tile each way, where a last block that adds alone
would read all of it parts times (256 KB at 64 rows in 8 parts, some 3.5 us).

Legend: f a warp's fragment, number its first one's place in the tile, place = (warpgroup, warp,
lane).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ridgeline.kernels.w4a16 import cute_ptx as ptx
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
    workspace, counters, _ = scratch
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
