"""W4A16 for few rows on Hopper where K has to be cut: a cluster of blocks adds its parts.

    out[m, n] = sum_k act[m, k] * scale[n, group] * (code[n, k] - zero[n, group])  (+ bias[n])

A block has 32 tiles n_warps outputs and a part of K, which comes in `steps` of k_warps x units
units (of 128 inputs, or a group): rings of `stages` steps of codes and `act_stages` of activations,
refilled warp by warp. Codes are asked for before griddepcontrol.wait; a small layer's lie in shared
memory whole (one step), and what is left after the wait is activations, products and sums. Bound
by the latency of that chain, in it by the activations' way from L2 (every block brings 32 bytes an
input at 16 rows), and by the warps at work (16 an SM decode as fast as memory brings codes, 8 do
not).

A warp has a unit's activations in registers for all its outputs. At the end the warps that share
outputs add their sums through shared memory, then the blocks of the cluster in each other's, a
share of the tile each; a barrier there counts the bytes, which spares the cluster's barriers and
their fences of the whole device. Order of additions: fixed by the config and K.

Codes enter mma.sync (m16n8k16) as they lie: masked nibbles are subnormal numbers, q 2^-133 in bf16
(activations are multiplied by 2^64, which keeps sums normal) and q 2^-24 in fp16; nibbles of rows
g + 8 lie four bits higher and are worth 16 times as much. The accumulator starts at minus the zero
point times the group's sum of activations, and the scale multiplies it in fp32: no weight is ever
rounded; with one-hot activations every step is exact.

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
def ask_for_weights(src, tile, unit, at, mbar, cfg: cutlass.Constexpr):
    """One thread: start the copies of 32 outputs x the units from `unit` on: codes, scales and zero
    points."""
    words, scales, zeros, chunks, groups = src
    ptx.mbar_expect(mbar, cfg.tile_bytes, Int32(1))
    block = Int64(tile) * chunks + unit * cfg.unit_chunks
    ptx.bulk_load(at, words + block * 1024, cfg.code_bytes, mbar, Int32(1))
    group = Int64(tile) * groups
    if cutlass.const_expr(not cfg.per_channel):
        group = group + unit * cfg.unit_groups
    scale_at = at + cfg.code_bytes
    ptx.bulk_load(scale_at, scales + group * cfg.scale_row, cfg.scale_bytes, mbar, Int32(1))
    if cutlass.const_expr(not cfg.symmetric):
        zero_at = scale_at + cfg.scale_bytes
        ptx.bulk_load(zero_at, zeros + group * 32, cfg.zero_bytes, mbar, Int32(1))


def box_layout(cfg, slots: int):
    """Shared-memory layout of [rows that are brought, 64 inputs, slots] in TMA's swizzle."""
    layout = tile_layout(cfg, slots)
    if cfg.box_rows == 8 * cfg.nt:
        return layout
    outer = cute.make_layout((cfg.box_rows, 64, slots), stride=(64, 1, 512 * cfg.nt))
    return cute.make_composed_layout(layout.inner, 0, outer)


@cute.jit
def partition_activations(tma, smem_base, cfg: cutlass.Constexpr):
    """(atom, tiles of the activations, slots of shared memory)."""
    atom, tensor = tma
    layout = box_layout(cfg, cfg.act_slots * cfg.unit_chunks)
    pointer = cute.recast_ptr(smem_base + cfg.dynamic_offset, layout.inner, dtype=DTYPE[cfg.kind])
    slots = cute.make_tensor(pointer, layout.outer)
    tiles = cute.local_tile(tensor, (cfg.box_rows, 64), (None, None))
    target, source = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(slots, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return atom, source, target


@cute.jit
def ask_for_activations(tiles, unit, slot, mbar, lane, cfg: cutlass.Constexpr):
    """A warp: start the copies of a unit of all rows."""
    atom, source, target = tiles
    ptx.mbar_expect(mbar, cfg.unit_chunks * cfg.act_box_bytes, Int32(lane == 0))
    cute.arch.sync_warp()
    bar = cute.make_ptr(cutlass.Int64, mbar, cute.AddressSpace.smem, assumed_align=8)
    for c in cutlass.range_constexpr(cfg.unit_chunks):
        here = target[None, slot * cfg.unit_chunks + c]
        cute.copy(atom, source[None, 0, unit * cfg.unit_chunks + c], here, tma_bar_ptr=bar)


@cute.jit
def read_activations(act_smem, lane, cfg: cutlass.Constexpr):
    """Operand registers of a unit: [8 rows][32 inputs] lists of four."""
    swizzled = (lane % 8) * 128 + ((lane // 8) ^ (lane % 8)) * 16
    out = []
    for n in cutlass.range_constexpr(cfg.nt):
        rows = []
        for pair in cutlass.range_constexpr(cfg.unit_k // 32):
            at = (swizzled ^ ((pair & 1) * 64)) + (pair >> 1) * cfg.act_chunk_bytes + n * 1024
            b = ptx.ldmatrix_x4(act_smem + at)
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
def read_unit(at, u: cutlass.Constexpr, lane, cfg: cutlass.Constexpr):
    """Codes, scales and zero points of 32 outputs x a warp's u-th unit to registers."""
    words = []
    for c in cutlass.range_constexpr(u * cfg.unit_chunks, (u + 1) * cfg.unit_chunks):
        for rt in cutlass.range_constexpr(2):
            words.append(ptx.lds128(at + (c * 2 + rt) * 512 + lane * 16))
    scale_at = at + cfg.code_bytes + (lane // 4) * (cfg.scale_row // 8)
    zero_at = at + cfg.code_bytes + cfg.scale_bytes + (lane // 4) * 4
    scales, zeros = [], []
    for s in cutlass.range_constexpr(cfg.unit_groups):
        row = 0 if cfg.per_channel else u * cfg.unit_groups + s
        scales.append(load_scales(scale_at + row * cfg.scale_row, cfg))
        zeros.append(None if cfg.symmetric else load_zeros(zero_at + row * 32, cfg))
    return words, scales, zeros


@cute.jit
def multiply_unit(tot, first: cutlass.Constexpr, read, acts, sums, cfg: cutlass.Constexpr):
    """Products of what `read_unit` read, added to tot from `first` on."""
    words, scales, zeros = read
    nt = cfg.nt
    for f in cutlass.range_constexpr(cfg.unit_k // cfg.flush_k):
        row = 0 if cfg.per_channel else f
        acc = [[group_start(sums[f][n], zeros[row], rt, cfg) for n in range(nt)] for rt in range(2)]
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
        for rt in cutlass.range_constexpr(2):
            low, high = scales[row][2 * rt], scales[row][2 * rt + 1]
            for n in cutlass.range_constexpr(nt):
                j = first + (rt * nt + n) * 4
                tot[j] = tot[j] + low * acc[rt][n][0]
                tot[j + 1] = tot[j + 1] + low * acc[rt][n][1]
                tot[j + 2] = tot[j + 2] + high * acc[rt][n][2]
                tot[j + 3] = tot[j + 3] + high * acc[rt][n][3]


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

    `there` is the barrier that counts what the cluster's blocks have sent."""
    warp, lane, rank = place
    of_warp = cfg.tiles * 2 * cfg.nt
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(-(-cfg.fragments // cfg.num_warps)):
        f = i * cfg.num_warps + warp
        if f < cfg.fragments:
            own, inside = f // of_warp, f % of_warp
            at = codes + own * (cfg.k_warps * cfg.warp_bytes)
            at = at + inside // (2 * cfg.nt) * cfg.slot_bytes
            at = at + (inside % (2 * cfg.nt)) * 512 + lane * 16
            total = add_parts(at, cfg.warp_bytes, cfg.k_warps)
            if cutlass.const_expr(cfg.cluster > 1):
                to = received + (rank * cfg.share + f // cfg.cluster) * 512 + lane * 16
                ptx.sts128f_async(to, there, f % cfg.cluster, total)
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
    """[a warp's tiles of each stage | activations there | activations read | sums there]; returns
    the last three's addresses."""
    act_full = smem + cfg.code_barriers * 8
    act_empty = act_full + cfg.act_slots * 8
    there = act_empty + cfg.act_slots * 8
    # a barrier a thread: one after the other they would be some 40 instructions of latency
    threads = 32 * cfg.num_warps
    for turn in cutlass.range_constexpr(-(-cfg.barriers // threads)):
        i = turn * threads + tid
        if i < cfg.barriers:
            count = Int32(1)
            if i >= cfg.code_barriers + cfg.act_slots:
                if i < cfg.code_barriers + 2 * cfg.act_slots:
                    count = Int32(cfg.n_warps)
            ptx.mbar_init(smem + i * 8, count)
            ptx.mbar_fence()
            if cutlass.const_expr(cfg.cluster > 1):
                if i == cfg.barriers - 1:
                    own = (cfg.fragments - rank + cfg.cluster - 1) // cfg.cluster
                    ptx.mbar_expect(there, own * (cfg.cluster * 512), Int32(1))
    cute.arch.sync_threads()
    return act_full, act_empty, there


@cute.jit
def store_sums(tot, first: cutlass.Constexpr, at, lane, cfg: cutlass.Constexpr):
    """A warp's sums of 32 outputs into the place of codes that every lane has read."""
    cute.arch.sync_warp()
    for f in cutlass.range_constexpr(2 * cfg.nt):
        ptx.sts128f(at + f * 512 + lane * 16, [tot[first + 4 * f + e] for e in range(4)])


@cute.jit
def one_step(s, tot, mine, where, acts_of, src, cfg: cutlass.Constexpr):
    """Products of a step; asks for what its places hold next.

    mine = (a warp's codes, their barriers); where = (its first tile, its first unit, k_warp,
    n_warp, lane); acts_of = (first slot, barriers of slots there, read, TMA's tiles)."""
    codes, bars = mine
    tile, unit0, k_warp, n_warp, lane = where
    acts_at, act_full, act_empty, act_tiles = acts_of
    stage, phase = s % cfg.stages, (s // cfg.stages) % 2
    act_stage, turn = s % cfg.act_stages, (s // cfg.act_stages) % 2
    slot0 = (k_warp * cfg.act_stages + act_stage) * cfg.units
    step_units = cfg.k_warps * cfg.units
    for u in cutlass.range_constexpr(cfg.units):
        full, empty = act_full + (slot0 + u) * 8, act_empty + (slot0 + u) * 8
        ptx.mbar_wait(full, turn)
        acts = read_activations(acts_at + (slot0 + u) * cfg.act_slot_bytes, lane, cfg)
        if cutlass.const_expr(cfg.steps > cfg.act_stages):
            cute.arch.sync_warp()
            ptx.mbar_arrive(empty, Int32(lane == 0))
        sums = group_sums(acts, cfg)
        for t in cutlass.range_constexpr(cfg.tiles):
            place = stage * cfg.tiles + t
            if cutlass.const_expr(u == 0):
                ptx.mbar_wait(bars + place * 8, phase)
            read = read_unit(codes + place * cfg.slot_bytes, u, lane, cfg)
            if cutlass.const_expr(u == cfg.refill_unit):
                cute.arch.sync_warp()
                if s + cfg.stages < cfg.steps:
                    with cute.arch.elect_one():
                        at = codes + place * cfg.slot_bytes
                        coming = unit0 + (s + cfg.stages) * step_units
                        ask_for_weights(src, tile + t, coming, at, bars + place * 8, cfg)
            multiply_unit(tot, t * 8 * cfg.nt, read, acts, sums, cfg)
        if cutlass.const_expr(cfg.steps > cfg.act_stages):
            if n_warp == 0:
                if s + cfg.act_stages < cfg.steps:
                    ptx.mbar_wait(empty, turn)
                    later = unit0 + (s + cfg.act_stages) * step_units + u
                    ask_for_activations(act_tiles, later, slot0 + u, full, lane, cfg)


@cute.kernel
def stream_kernel(tma: tuple, pointers: tuple, sizes: tuple, cfg: cutlass.Constexpr):
    """tma = (atom, tensor) of the activations; pointers = (words, scales, zeros, out, bias);
    sizes = (M, N, chunks, groups, elements between rows of out)."""
    words, scales, zeros, out, bias = pointers
    M, N, chunks, groups, out_stride = sizes
    tid, _, _ = cute.arch.thread_idx()
    column, rank, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    k_warp, n_warp = warp % cfg.k_warps, warp // cfg.k_warps
    smem_base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
    smem = Int32(smem_base.toint())
    act_full, act_empty, there = init_barriers(smem, tid, rank, cfg)
    if cutlass.const_expr(cfg.cluster > 1):
        ptx.cluster_arrive()
    ptx.launch_next_grid()

    tile0 = column * (cfg.n_warps * cfg.tiles)
    tile = tile0 + n_warp * cfg.tiles
    step_units = cfg.k_warps * cfg.units
    unit0 = rank * (cfg.steps * step_units) + k_warp * cfg.units
    codes = smem + cfg.codes_offset
    mine = codes + warp * cfg.warp_bytes
    bars = smem + warp * (cfg.stages * cfg.tiles * 8)
    src = (words, scales, zeros, chunks, groups)
    with cute.arch.elect_one():
        for d in cutlass.range_constexpr(cfg.stages):
            for t in cutlass.range_constexpr(cfg.tiles):
                i = d * cfg.tiles + t
                at = mine + i * cfg.slot_bytes
                ask_for_weights(src, tile + t, unit0 + d * step_units, at, bars + i * 8, cfg)
    ptx.wait_previous_grid()
    act_tiles = partition_activations(tma, smem_base, cfg)
    if n_warp == 0:
        for d in cutlass.range_constexpr(cfg.act_stages):
            for u in cutlass.range_constexpr(cfg.units):
                slot = (k_warp * cfg.act_stages + d) * cfg.units + u
                unit = unit0 + d * step_units + u
                ask_for_activations(act_tiles, unit, slot, act_full + slot * 8, lane, cfg)
    if cutlass.const_expr(cfg.cluster > 1):
        ptx.cluster_wait()

    tot = cute.make_rmem_tensor((8 * cfg.nt * cfg.tiles,), Float32)
    for i in cutlass.range_constexpr(8 * cfg.nt * cfg.tiles):
        tot[i] = Float32(0.0)
    where = (tile, unit0, k_warp, n_warp, lane)
    acts_of = (smem + cfg.dynamic_offset, act_full, act_empty, act_tiles)
    if cutlass.const_expr(cfg.steps == 1):
        one_step(Int32(0), tot, (mine, bars), where, acts_of, src, cfg)
    else:
        for s in cutlass.range(cfg.steps, unroll=1):
            one_step(s, tot, (mine, bars), where, acts_of, src, cfg)
    for t in cutlass.range_constexpr(cfg.tiles):
        store_sums(tot, t * 8 * cfg.nt, mine + t * cfg.slot_bytes, lane, cfg)
    dst = (out, bias, M, N, out_stride)
    finish(codes, smem + cfg.received_offset, there, (warp, lane, rank), tile0, dst, cfg)


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
    tma = cpasync.make_tiled_tma_atom(load, rows, one, (cfg.box_rows, 64))
    stream_kernel(
        (tma[0], tma[1]),
        (words, scales, zeros, out, bias),
        (M, N, chunks, groups, out_stride),
        cfg,
    ).launch(
        grid=(columns, cfg.cluster, 1),
        block=(cfg.num_warps * 32, 1, 1),
        cluster=(1, cfg.cluster, 1),
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
