"""W4A16 for few rows on Hopper where K has to be cut: a cluster of blocks adds its parts.

    out[m, n] = sum_k act[m, k] * scale[n, group] * (code[n, k] - zero[n, group])  (+ bias[n])

A block has 32 tiles n_warps outputs and k_warps x units units of K (of 128 inputs, or a group), all
of which lie in its shared memory. Codes are asked for before griddepcontrol.wait; what is left
after it is activations, products and sums. Bound by the latency of that chain, in it by the
activations' way from L2 (every block brings 32 bytes an input at 16 rows; with `cast` two blocks of
neighbouring outputs share the way), and by the warps at work.

Where two blocks fit a multiprocessor the next layer's codes come beside, if every multiprocessor
has a block of each layer: columns are repeated to that end (config.py). With `held` they do with
64 outputs and half of K at 16 rows: half of the codes wait in registers, and half of the
activations come where those lay.

A warp has a unit's activations in registers for all its outputs, all units' if they fit. At the end
the warps that share outputs add their sums through shared memory, then the blocks of the cluster in
each other's, a share of the tile each; a barrier there counts the bytes, which spares the cluster's
barriers and their fences of the whole device. Order of additions: fixed by the config and K.

Codes enter mma.sync (m16n8k16) as they lie: masked nibbles are subnormal numbers, q 2^-133 in bf16
(activations are multiplied by 2^64, which keeps sums normal) and q 2^-24 in fp16; nibbles of rows
g + 8 lie four bits higher and are worth 16 times as much. Minus the zero point times the group's
sum of activations joins a group's products at the end, and the scale multiplies them in fp32: no
weight is ever rounded; with one-hot activations every step is exact.

Of 8 rows that TMA brings at once those that do not exist cost as much time as they were wanted:
boxes of 1, 2 and 4 rows leave the others' shared memory as it is; sums never cross rows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream

from ridgeline.kernels.w4a16 import cute_ptx as ptx
from ridgeline.kernels.w4a16.cute_decode import (
    BF16_2_64,
    BF16_UNIT,
    ONES,
    decode_word,
    group_start,
    load_scales,
    load_zeros,
    tile_layout,
)
from ridgeline.kernels.w4a16.cute_epilogue import write_rows
from ridgeline.kernels.w4a16.cute_ptx import DTYPE, fake_matrix
from ridgeline.kernels.w4a16.tiles_stream import StreamConfig

UNIT = {"bf16": BF16_UNIT, "f16": ONES["f16"]}
"""What the activations are summed against: a code's unit in bf16, or 1."""


@cute.jit
def ask_for_weights(src, tile, unit, place, mbar, cfg: cutlass.Constexpr):
    """One thread: start the copies of 32 outputs x a warp's units from `unit` on: codes, scales and
    zero points; place = (where codes come to, where scales do)."""
    words, scales, zeros, chunks, groups = src
    ptx.mbar_expect(mbar, cfg.tile_bytes, Int32(1))
    block = Int64(tile) * chunks + unit * cfg.unit_chunks
    ptx.bulk_load(place[0], words + block * 1024, cfg.code_bytes, mbar, Int32(1))
    group = Int64(tile) * groups
    if cutlass.const_expr(not cfg.per_channel):
        group = group + unit * cfg.unit_groups
    ptx.bulk_load(place[1], scales + group * cfg.scale_row, cfg.scale_bytes, mbar, Int32(1))
    if cutlass.const_expr(not cfg.symmetric):
        zero_at = place[1] + cfg.scale_bytes
        ptx.bulk_load(zero_at, zeros + group * 32, cfg.zero_bytes, mbar, Int32(1))


def box_layout(cfg, slots: int):
    """Shared-memory layout of [rows that a copy brings, 64 inputs, slots] in TMA's swizzle."""
    outer = cute.make_layout(
        (cfg.box_rows, 64, slots), stride=(64, 1, cfg.act_chunk_bytes // (2 * cfg.cast))
    )
    return cute.make_composed_layout(tile_layout(cfg, 1).inner, 0, outer)


@cute.jit
def partition_activations(tma, smem_base, cfg: cutlass.Constexpr):
    """(atom, tiles of the activations, places of shared memory from `dynamic_offset` on)."""
    atom, tensor = tma
    bytes_there = cfg.factors_offset - cfg.dynamic_offset
    layout = box_layout(cfg, bytes_there * cfg.cast // cfg.act_chunk_bytes)
    pointer = cute.recast_ptr(smem_base + cfg.dynamic_offset, layout.inner, dtype=DTYPE[cfg.kind])
    slots = cute.make_tensor(pointer, layout.outer)
    tiles = cute.local_tile(tensor, (cfg.box_rows, 64), (None, None))
    target, source = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(slots, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return atom, source, target


@cute.jit
def act_places(warp, u: cutlass.Constexpr, cfg: cutlass.Constexpr):
    """Where the chunks of 64 inputs of a k-warp's u-th unit of activations lie, from
    `dynamic_offset` on."""
    if cutlass.const_expr(cfg.held and u > 0):
        first = cfg.act_slots * cfg.act_slot_bytes + warp * (cfg.tiles * cfg.slot_bytes)
        of_unit = cfg.unit_chunks * 1024
        at = [c * cfg.act_chunk_bytes for c in range(cfg.unit_chunks)]
        return [first + i // of_unit * cfg.slot_bytes + i % of_unit for i in at]
    slot = warp if cfg.held else warp * cfg.units + u
    first = slot * cfg.act_slot_bytes
    return [first + c * cfg.act_chunk_bytes for c in range(cfg.unit_chunks)]


@cute.jit
def ask_for_activations(tiles, unit, places, mbar, who, cfg: cutlass.Constexpr):
    """A warp: start the copies of a unit of all rows, or of half of them to two blocks; who =
    (lane, which of the two, the cluster's blocks that get them)."""
    atom, source, target = tiles
    lane, which, mask = who
    ptx.mbar_expect(mbar, cfg.act_unit_bytes, Int32(lane == 0))
    cute.arch.sync_warp()
    bar = cute.make_ptr(cutlass.Int64, mbar, cute.AddressSpace.smem, assumed_align=8)
    for c in cutlass.range_constexpr(cfg.unit_chunks):
        into = target[None, places[c] // (cfg.act_chunk_bytes // cfg.cast) + which]
        rows = source[None, which, unit * cfg.unit_chunks + c]
        if cutlass.const_expr(cfg.cast > 1):
            cute.copy(atom, rows, into, tma_bar_ptr=bar, mcast_mask=mask)
        else:
            cute.copy(atom, rows, into, tma_bar_ptr=bar)


@cute.jit
def read_activations(places, lane, cfg: cutlass.Constexpr):
    """Operand registers of a unit whose chunks of 64 inputs lie at `places`: [8 rows][32 inputs]
    lists of four."""
    swizzled = (lane % 8) * 128 + ((lane // 8) ^ (lane % 8)) * 16
    out = []
    for n in cutlass.range_constexpr(cfg.nt):
        rows = []
        for pair in cutlass.range_constexpr(cfg.unit_k // 32):
            at = places[pair >> 1] + (swizzled ^ ((pair & 1) * 64)) + n * 1024
            b = ptx.ldmatrix_x4(at)
            if cutlass.const_expr(cfg.kind == "bf16"):
                b = [ptx.packed_mul(x, ptx.constant(BF16_2_64), cfg.kind) for x in b]
            rows.append(b)
        out.append(rows)
    return out


@cute.jit
def group_sums(acts, cfg: cutlass.Constexpr):
    """Minus the sums of every group's activations in units of a code: [group][8 rows] pairs."""
    ones = [ptx.constant(UNIT[cfg.kind])] * 4
    out = []
    for group in cutlass.range_constexpr(cfg.unit_k // cfg.flush_k):
        per_row = []
        for n in cutlass.range_constexpr(cfg.nt):
            chains = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
            for pair in cutlass.range_constexpr(cfg.flush_k // 32):
                b = acts[n][group * (cfg.flush_k // 32) + pair]
                for half in cutlass.range_constexpr(2):
                    chains[half] = ptx.mma_16816(
                        ones, b[2 * half], b[2 * half + 1], chains[half], cfg.kind == "bf16"
                    )
            per_row.append([(chains[0][e] + chains[1][e]) * cfg.sum_factor for e in range(2)])
        out.append(per_row)
    return out


@cute.jit
def read_codes(at, u: cutlass.Constexpr, lane, cfg: cutlass.Constexpr):
    """Codes of 32 outputs x a warp's u-th unit to registers."""
    words = []
    for c in cutlass.range_constexpr(u * cfg.unit_chunks, (u + 1) * cfg.unit_chunks):
        for rt in cutlass.range_constexpr(2):
            words.append(ptx.lds128(at + (c * 2 + rt) * 512 + lane * 16))
    return words


@cute.jit
def read_factors(at, u: cutlass.Constexpr, lane, cfg: cutlass.Constexpr):
    """Scales and zero points of 32 outputs x a warp's u-th unit."""
    scale_at = at + (lane // 4) * (cfg.scale_row // 8)
    zero_at = at + cfg.scale_bytes + (lane // 4) * 4
    scales, zeros = [], []
    for s in cutlass.range_constexpr(cfg.unit_groups):
        row = 0 if cfg.per_channel else u * cfg.unit_groups + s
        scales.append(load_scales(scale_at + row * cfg.scale_row, cfg))
        zeros.append(None if cfg.symmetric else load_zeros(zero_at + row * 32, cfg))
    return scales, zeros


@cute.jit
def multiply_unit(tot, words, factors, acts, sums, cfg: cutlass.Constexpr):
    """tot (None at first) with the products of a unit; the groups' offsets join at the end, so that
    no product waits for them."""
    scales, zeros = factors
    nt = cfg.nt
    for f in cutlass.range_constexpr(cfg.unit_k // cfg.flush_k):
        row = 0 if cfg.per_channel else f
        acc = [[[Float32(0.0)] * 4 for _ in range(nt)] for _ in range(2)]
        for pair in cutlass.range_constexpr(cfg.flush_k // 32):
            for half in cutlass.range_constexpr(2):
                step = f * (cfg.flush_k // 16) + pair * 2 + half
                for rt in cutlass.range_constexpr(2):
                    a = decode_word(words[(step // 4) * 2 + rt][step % 4], True)
                    for n in cutlass.range_constexpr(nt):
                        b = acts[n][f * (cfg.flush_k // 32) + pair]
                        acc[rt][n] = ptx.mma_16816(
                            a, b[2 * half], b[2 * half + 1], acc[rt][n], cfg.kind == "bf16"
                        )
        before, tot = tot, []
        for rt in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(nt):
                offset = group_start(sums[f][n], zeros[row], rt, cfg)
                for e in cutlass.range_constexpr(4):
                    value = (acc[rt][n][e] + offset[e]) * scales[row][2 * rt + e // 2]
                    if cutlass.const_expr(before is not None):
                        value = before[(rt * nt + n) * 4 + e] + value
                    tot.append(value)
    return tot


@cute.jit
def add_parts(first, stride: cutlass.Constexpr, count: cutlass.Constexpr):
    """Sum of `count` quads of shared memory, in order."""
    total = ptx.lds128f(first)
    for i in cutlass.range_constexpr(1, count):
        part = ptx.lds128f(first + i * stride)
        total = [total[e] + part[e] for e in range(4)]
    return total


@cute.jit
def write_fragment(values, f, tile0, lane, dst, cfg: cutlass.Constexpr):
    """Bias, rounding and the store of the block's f-th fragment of 16 outputs x 8 rows."""
    block = tile0 * 2 + f // cfg.nt
    m = (f % cfg.nt) * 8 + 2 * (lane % 4)
    write_rows(values, block * 16, lane, m, dst, cfg)


@cute.jit
def finish(codes, received, there, place, tile0, dst, cfg: cutlass.Constexpr):
    """Add the warps' sums, then the cluster's blocks'; every block writes a share of the tile.

    `there` is the barrier that counts what the cluster's blocks have sent; rank = (along K, which
    of `cast` blocks)."""
    warp, lane, (rank, which) = place
    of_warp = cfg.tiles * 2 * cfg.nt
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(-(-cfg.fragments // cfg.num_warps)):
        f = i * cfg.num_warps + warp
        if f < cfg.fragments:
            own, inside = f // of_warp, f % of_warp
            at = codes + own * (cfg.k_warps * cfg.tiles * cfg.slot_bytes)
            at = at + inside // (2 * cfg.nt) * cfg.slot_bytes
            at = at + (inside % (2 * cfg.nt)) * 512 + lane * 16
            total = add_parts(at, cfg.tiles * cfg.slot_bytes, cfg.k_warps)
            if cutlass.const_expr(cfg.cluster > 1):
                to = received + (rank * cfg.share + f // cfg.cluster) * 512 + lane * 16
                ptx.sts128f_async(to, there, f % cfg.cluster * cfg.cast + which, total)
            else:
                write_fragment(total, f, tile0, lane, dst, cfg)
    if cutlass.const_expr(cfg.cluster > 1):
        for i in cutlass.range_constexpr(-(-cfg.share // cfg.num_warps)):
            j = i * cfg.num_warps + warp
            f = j * cfg.cluster + rank
            if f < cfg.fragments:
                ptx.mbar_wait(there, 0)
                total = add_parts(received + j * 512 + lane * 16, cfg.share * 512, cfg.cluster)
                write_fragment(total, f, tile0, lane, dst, cfg)


@cute.jit
def init_barriers(smem, tid, rank, cfg: cutlass.Constexpr):
    """[a warp's tiles there | its units of activations there | sums there]; returns the last two's
    addresses."""
    acts = smem + cfg.code_barriers * 8
    there = acts + cfg.act_barriers * 8
    # a barrier a thread: one after the other they would be some 40 instructions of latency
    threads = 32 * cfg.num_warps
    for turn in cutlass.range_constexpr(-(-cfg.barriers // threads)):
        i = turn * threads + tid
        if i < cfg.barriers:
            ptx.mbar_init(smem + i * 8, Int32(1))
            ptx.mbar_fence()
            if cutlass.const_expr(cfg.cluster > 1):
                if i == cfg.barriers - 1:
                    own = (cfg.fragments - rank + cfg.cluster - 1) // cfg.cluster
                    ptx.mbar_expect(there, own * (cfg.cluster * 512), Int32(1))
    cute.arch.sync_threads()
    return acts, there


@cute.jit
def store_sums(tot, at, lane, cfg: cutlass.Constexpr):
    """A warp's sums of 32 outputs into the place of codes that every lane has read."""
    cute.arch.sync_warp()
    for f in cutlass.range_constexpr(2 * cfg.nt):
        ptx.sts128f(at + f * 512 + lane * 16, tot[4 * f : 4 * f + 4])


@cute.jit
def unit_of(u: cutlass.Constexpr, acts_of, k_warp, lane, cfg: cutlass.Constexpr):
    """A warp's u-th unit of activations, and its groups' sums, when it is there."""
    at, bars = acts_of
    ptx.mbar_wait(bars + (k_warp * cfg.units + u) * 8, 0)
    acts = read_activations([at + i for i in act_places(k_warp, u, cfg)], lane, cfg)
    return acts, group_sums(acts, cfg)


@cute.jit
def multiply_all(mine, acts_of, held, k_warp, lane, cfg: cutlass.Constexpr):
    """All of a warp's products, sums to the codes' place; mine = (its codes, scales, barriers),
    held = codes of the first unit, a list a tile, or None."""
    codes, factors, bars = mine
    if cutlass.const_expr(cfg.reads_first):
        units = [unit_of(u, acts_of, k_warp, lane, cfg) for u in range(cfg.units)]
        for t in cutlass.range_constexpr(cfg.tiles):
            ptx.mbar_wait(bars + t * 8, 0)
            at, tot = codes + t * cfg.slot_bytes, None
            words = [read_codes(at, u, lane, cfg) for u in range(cfg.units)]
            for u in cutlass.range_constexpr(cfg.units):
                scales = read_factors(factors + t * cfg.factor_bytes, u, lane, cfg)
                tot = multiply_unit(tot, words[u], scales, *units[u], cfg)
            store_sums(tot, at, lane, cfg)
    else:
        totals = [None] * cfg.tiles
        for u in cutlass.range_constexpr(cfg.units):
            acts, sums = unit_of(u, acts_of, k_warp, lane, cfg)
            for t in cutlass.range_constexpr(cfg.tiles):
                at = codes + t * cfg.slot_bytes
                if cutlass.const_expr(cfg.held and u == 0):
                    words = held[t]
                else:
                    if cutlass.const_expr(u == 0):
                        ptx.mbar_wait(bars + t * 8, 0)
                    words = read_codes(at, u, lane, cfg)
                scales = read_factors(factors + t * cfg.factor_bytes, u, lane, cfg)
                totals[t] = multiply_unit(totals[t], words, scales, acts, sums, cfg)
                if cutlass.const_expr(u == cfg.units - 1):
                    store_sums(totals[t], at, lane, cfg)


@cute.kernel
def stream_kernel(tma: tuple, pointers: tuple, sizes: tuple, cfg: cutlass.Constexpr):
    """tma = (atom, tensor) of the activations; pointers = (words, scales, zeros, out, bias);
    sizes = (M, N, chunks, groups, elements between rows of out)."""
    words, scales, zeros, out, bias = pointers
    M, N, chunks, groups, out_stride = sizes
    tid, _, _ = cute.arch.thread_idx()
    column, rank, _ = cute.arch.block_idx()
    which = column % cfg.cast
    # columns beyond the outputs repeat the first ones, to the same bits (config.stream_plan)
    column = column % ((N + cfg.block_n - 1) // cfg.block_n)
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    k_warp, n_warp = warp % cfg.k_warps, warp // cfg.k_warps
    smem_base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
    smem = Int32(smem_base.toint())
    acts_bar, there = init_barriers(smem, tid, rank, cfg)
    if cutlass.const_expr(cfg.cluster * cfg.cast > 1 and not cfg.held):
        ptx.cluster_arrive()
    ptx.launch_next_grid()

    tile0 = column * (cfg.n_warps * cfg.tiles)
    tile = tile0 + n_warp * cfg.tiles
    unit0 = (rank * cfg.k_warps + k_warp) * cfg.units
    codes = smem + cfg.codes_offset
    mine = (
        codes + warp * (cfg.tiles * cfg.slot_bytes),
        smem + cfg.factors_offset + warp * (cfg.tiles * cfg.factor_bytes),
        smem + warp * (cfg.tiles * 8),
    )
    src = (words, scales, zeros, chunks, groups)
    with cute.arch.elect_one():
        for t in cutlass.range_constexpr(cfg.tiles):
            place = (mine[0] + t * cfg.slot_bytes, mine[1] + t * cfg.factor_bytes)
            ask_for_weights(src, tile + t, unit0, place, mine[2] + t * 8, cfg)
    if warp == 0:
        cpasync.prefetch_descriptor(tma[0])
    held = None
    if cutlass.const_expr(cfg.held):
        held = []
        for t in cutlass.range_constexpr(cfg.tiles):
            ptx.mbar_wait(mine[2] + t * 8, 0)
            held.append(read_codes(mine[0] + t * cfg.slot_bytes, 0, lane, cfg))
        cute.arch.sync_warp()
        if cutlass.const_expr(cfg.cluster * cfg.cast > 1):
            # the other block's copies come where these codes lay
            ptx.cluster_arrive_releasing()
    ptx.wait_previous_grid()
    if cutlass.const_expr(cfg.cast > 1):
        ptx.cluster_wait()
    act_tiles = partition_activations(tma, smem_base, cfg)
    if n_warp == 0:
        who = (lane, which, cutlass.Int16(Int32((1 << cfg.cast) - 1) << (rank * cfg.cast)))
        for u in cutlass.range_constexpr(cfg.units):
            places = act_places(k_warp, u, cfg)
            bar = acts_bar + (k_warp * cfg.units + u) * 8
            ask_for_activations(act_tiles, unit0 + u, places, bar, who, cfg)
    if cutlass.const_expr(cfg.cluster > 1 and cfg.cast == 1):
        ptx.cluster_wait()
    multiply_all(mine, (smem + cfg.dynamic_offset, acts_bar), held, k_warp, lane, cfg)
    dst = (out, bias, M, N, out_stride)
    place = (warp, lane, (rank, which))
    finish(codes, smem + cfg.received_offset, there, place, tile0, dst, cfg)


@cute.jit
def launch_stream(
    words: Int64, scales: Int64, zeros: Int64, out: Int64, bias: Int64, M: Int32, N: Int32,
    chunks: Int32, groups: Int32, out_stride: Int32, columns: Int32, rows, stream,
    cfg: cutlass.Constexpr,
):  # fmt: skip
    """Launch on a stream; arguments are device addresses and sizes, `columns` blocks along the
    outputs, and the activations [M, K] as a tensor."""
    one = cute.slice_(box_layout(cfg, 1), (None, None, 0))
    load = cpasync.CopyBulkTensorTileG2SOp()
    if cutlass.const_expr(cfg.cast > 1):
        load = cpasync.CopyBulkTensorTileG2SMulticastOp()
    tma = cpasync.make_tiled_tma_atom(load, rows, one, (cfg.box_rows, 64))
    stream_kernel(
        (tma[0], tma[1]),
        (words, scales, zeros, out, bias),
        (M, N, chunks, groups, out_stride),
        cfg,
    ).launch(
        grid=(columns, cfg.cluster, 1),
        block=(cfg.num_warps * 32, 1, 1),
        cluster=(cfg.cast, cfg.cluster, 1),
        smem=cfg.smem_bytes,
        stream=stream,
        use_pdl=cfg.pdl,
        min_blocks_per_mp=cfg.blocks_per_sm,
        preferred_smem_carveout=100,
    )


def trace(config: StreamConfig, architecture: str):
    """Compile for an architecture without a GPU; the result can be called or exported."""
    return cute.compile(
        launch_stream,
        *[Int64(0)] * 5,
        *[Int32(1)] * 6,
        fake_matrix(DTYPE[config.kind], 8),
        make_fake_stream(),
        config,
        options=f"--enable-tvm-ffi --gpu-arch {architecture}",
    )
