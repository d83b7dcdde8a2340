"""W4A16 for few rows on Hopper where K has to be cut: a cluster of blocks adds its parts.

    out[m, n] = sum_k act[m, k] * scale[n, group] * (code[n, k] - zero[n, group])  (+ bias[n])

A block has 32 tiles n_warps outputs and a part of K, which comes in steps of k_warps units (of 128
inputs, or a group): rings of `stages` steps of codes and `act_stages` of activations, refilled warp
by warp. Codes are asked for before griddepcontrol.wait; small layers lie in the rings whole, and
what is left after the wait is activations, products and sums. Bound by the latency of that chain
and by the warps at work (16 an SM decode as fast as memory brings codes, 8 do not), not by bytes:
5.6 us for the 8.4 MB of 4096 x 4096 at 16 rows, one H200, 2026-11-30.

A warp has a unit's activations in registers for all its outputs. At the end the warps that share
outputs add their sums through shared memory, then the blocks of the cluster in each other's, a
share of the tile each. Order of additions: fixed by the config and K.

Codes enter mma.sync (m16n8k16) as they lie: masked nibbles are subnormal numbers, q 2^-133 in bf16
(activations are multiplied by 2^64, which keeps sums normal) and q 2^-24 in fp16; nibbles of rows
g + 8 lie four bits higher and are worth 16 times as much. The accumulator starts at minus the zero
point times the group's sum of activations, and the scale multiplies it in fp32: no weight is ever
rounded; with one-hot activations every step is exact.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream

from ridgeline.kernels.w4a16 import cute_ptx as ptx
from ridgeline.kernels.w4a16.cute_decode import (
    ONES,
    decode_word,
    load_scales,
    partition_activations,
    tile_layout,
)
from ridgeline.kernels.w4a16.cute_epilogue import write_rows
from ridgeline.kernels.w4a16.cute_ptx import DTYPE, fake_matrix
from ridgeline.kernels.w4a16.tiles import StreamConfig

BF16_2_64 = 0x5F805F80
UNIT = {"bf16": 0x00010001, "f16": ONES["f16"]}
"""What the activations are summed against: 2^-133, of which a bf16 code is a multiple, or 1."""


@cute.jit
def ask_for_weights(src, tile, unit, at, mbar, cfg: cutlass.Constexpr):
    """One thread: start the copies of 32 outputs x a unit: codes, scales and zero points."""
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


@cute.jit
def ask_for_activations(tiles, unit, slot, mbar, lane, cfg: cutlass.Constexpr):
    """A warp: start the copies of a unit of all rows; what does not exist arrives as zeros."""
    atom, source, target = tiles
    ptx.mbar_expect(mbar, cfg.unit_chunks * cfg.act_chunk_bytes, Int32(lane == 0))
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
def start(sums, zeros, rt: cutlass.Constexpr, cfg: cutlass.Constexpr):
    """Accumulator that a group starts from: the offset of every code times the sum."""
    s0, s1 = sums
    if cutlass.const_expr(cfg.symmetric):
        return [s0, s1, s0 * 16.0, s1 * 16.0]
    z_low, z_high = zeros[2 * rt], zeros[2 * rt + 1]
    return [s0 * z_low, s1 * z_low, s0 * z_high, s1 * z_high]


@cute.jit
def scales_of(address, cfg: cutlass.Constexpr):
    """A lane's four row scales as fp32, times what codes (and activations) are small by."""
    scales = load_scales(address, cfg)
    if cutlass.const_expr(cfg.kind == "bf16"):
        low, high = float(2.0**69), float(2.0**65)
        return [scales[0] * low, scales[1] * high, scales[2] * low, scales[3] * high]
    return scales


@cute.jit
def zeros_of(address):
    """A lane's four row offsets, those of rows g + 8 times 16."""
    word = ptx.lds32(address)
    zeros = [Float32((word >> (8 * j)) & 0xFF) for j in range(4)]
    return [zeros[0], zeros[1] * 16.0, zeros[2], zeros[3] * 16.0]


@cute.jit
def read_unit(at, lane, cfg: cutlass.Constexpr):
    """Codes, scales and zero points of 32 outputs x a unit to registers."""
    words = []
    for c in cutlass.range_constexpr(cfg.unit_chunks):
        for rt in cutlass.range_constexpr(2):
            words.append(ptx.lds128(at + (c * 2 + rt) * 512 + lane * 16))
    scale_at = at + cfg.code_bytes + (lane // 4) * (cfg.scale_row // 8)
    zero_at = at + cfg.code_bytes + cfg.scale_bytes + (lane // 4) * 4
    scales, zeros = [], []
    for s in cutlass.range_constexpr(cfg.unit_groups):
        scales.append(scales_of(scale_at + s * cfg.scale_row, cfg))
        zeros.append(None if cfg.symmetric else zeros_of(zero_at + s * 32))
    return words, scales, zeros


@cute.jit
def multiply_unit(tot, first: cutlass.Constexpr, read, acts, sums, cfg: cutlass.Constexpr):
    """Products of what `read_unit` read, added to tot from `first` on."""
    words, scales, zeros = read
    nt = cfg.nt
    for f in cutlass.range_constexpr(cfg.unit_k // cfg.flush_k):
        row = 0 if cfg.per_channel else f
        acc = [[start(sums[f][n], zeros[row], rt, cfg) for n in range(nt)] for rt in range(2)]
        for pair in cutlass.range_constexpr(cfg.flush_k // 32):
            for half in cutlass.range_constexpr(2):
                step = f * (cfg.flush_k // 16) + pair * 2 + half
                for rt in cutlass.range_constexpr(2):
                    # "f16": nibbles stay where they are
                    a = decode_word(words[(step // 4) * 2 + rt][step % 4], "f16")
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
def finish(codes, received, place, tile0, dst, cfg: cutlass.Constexpr):
    """Add the warps' sums, then the cluster's blocks'; every block writes a share of the tile."""
    warp, lane, rank = place
    of_warp = cfg.tiles * 2 * cfg.nt
    cute.arch.sync_threads()
    if cutlass.const_expr(cfg.cluster > 1):
        ptx.cluster_wait()
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
                ptx.sts128f_cluster(to, f % cfg.cluster, total)
            else:
                write_fragment(total, f, tile0, lane, dst, cfg)
    if cutlass.const_expr(cfg.cluster > 1):
        ptx.cluster_arrive()
        ptx.cluster_wait()
        for i in cutlass.range_constexpr(-(-cfg.share // cfg.num_warps)):
            j = i * cfg.num_warps + warp
            f = j * cfg.cluster + rank
            if f < cfg.fragments:
                total = add_parts(received + j * 512 + lane * 16, cfg.share * 512, cfg.cluster)
                write_fragment(total, f, tile0, lane, dst, cfg)


@cute.jit
def init_barriers(smem, tid, cfg: cutlass.Constexpr):
    """[a warp's tiles of each stage | activations there | activations read]; returns the last
    two's addresses."""
    act_full = smem + cfg.num_warps * cfg.stages * cfg.tiles * 8
    act_empty = act_full + cfg.k_warps * cfg.act_stages * 8
    if tid == 0:
        for i in cutlass.range_constexpr(
            cfg.num_warps * cfg.stages * cfg.tiles + cfg.k_warps * cfg.act_stages
        ):
            ptx.mbar_init(smem + i * 8, 1)
        for i in cutlass.range_constexpr(cfg.k_warps * cfg.act_stages):
            ptx.mbar_init(act_empty + i * 8, cfg.n_warps)
        ptx.mbar_fence()
    cute.arch.sync_threads()
    return act_full, act_empty


@cute.kernel
def stream_kernel(tma: tuple, pointers: tuple, sizes: tuple, cfg: cutlass.Constexpr):
    """tma = (atom, tensor) of the activations; pointers = (words, scales, zeros, out, bias);
    sizes = (M, N, chunks, groups, elements between rows of out, steps of a block)."""
    words, scales, zeros, out, bias = pointers
    M, N, chunks, groups, out_stride, steps = sizes
    tid, _, _ = cute.arch.thread_idx()
    column, rank, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    k_warp, n_warp = warp % cfg.k_warps, warp // cfg.k_warps
    smem_base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
    smem = Int32(smem_base.toint())
    act_full, act_empty = init_barriers(smem, tid, cfg)
    if cutlass.const_expr(cfg.cluster > 1):
        ptx.cluster_arrive()
    ptx.launch_next_grid()

    tile0 = column * (cfg.n_warps * cfg.tiles)
    tile = tile0 + n_warp * cfg.tiles
    unit0 = rank * steps * cfg.k_warps + k_warp
    codes = smem + cfg.codes_offset
    mine = codes + warp * cfg.warp_bytes
    bars = smem + warp * (cfg.stages * cfg.tiles * 8)
    src = (words, scales, zeros, chunks, groups)
    for d in cutlass.range_constexpr(cfg.stages):
        if d < steps:
            with cute.arch.elect_one():
                for t in cutlass.range_constexpr(cfg.tiles):
                    i = d * cfg.tiles + t
                    at = mine + i * cfg.slot_bytes
                    ask_for_weights(src, tile + t, unit0 + d * cfg.k_warps, at, bars + i * 8, cfg)
    ptx.wait_previous_grid()
    act_tiles = partition_activations(tma, smem_base, cfg)
    slot0 = k_warp * cfg.act_stages
    if n_warp == 0:
        for d in cutlass.range_constexpr(cfg.act_stages):
            if d < steps:
                bar = act_full + (slot0 + d) * 8
                ask_for_activations(act_tiles, unit0 + d * cfg.k_warps, slot0 + d, bar, lane, cfg)

    tot = cute.make_rmem_tensor((8 * cfg.nt * cfg.tiles,), Float32)
    for i in cutlass.range_constexpr(8 * cfg.nt * cfg.tiles):
        tot[i] = Float32(0.0)
    stage, phase = Int32(0), Int32(0)
    for s in cutlass.range(steps, unroll=1):
        slot = slot0 + s % cfg.act_stages
        full, empty, turn = act_full + slot * 8, act_empty + slot * 8, (s // cfg.act_stages) % 2
        ptx.mbar_wait(full, turn)
        acts = read_activations(smem + cfg.dynamic_offset + slot * cfg.act_slot_bytes, lane, cfg)
        cute.arch.sync_warp()
        ptx.mbar_arrive(empty, Int32(lane == 0))
        if n_warp == 0:
            if s + cfg.act_stages < steps:
                ptx.mbar_wait(empty, turn)
                later = unit0 + (s + cfg.act_stages) * cfg.k_warps
                ask_for_activations(act_tiles, later, slot, full, lane, cfg)
        sums = group_sums(acts, cfg)
        coming = unit0 + (s + cfg.stages) * cfg.k_warps
        for t in cutlass.range_constexpr(cfg.tiles):
            place = stage * cfg.tiles + t
            ptx.mbar_wait(bars + place * 8, phase)
            read = read_unit(mine + place * cfg.slot_bytes, lane, cfg)
            cute.arch.sync_warp()
            if s + cfg.stages < steps:
                with cute.arch.elect_one():
                    at = mine + place * cfg.slot_bytes
                    ask_for_weights(src, tile + t, coming, at, bars + place * 8, cfg)
            multiply_unit(tot, t * 8 * cfg.nt, read, acts, sums, cfg)
        stage += 1
        if stage == cfg.stages:
            stage = Int32(0)
            phase = phase ^ 1
    # the sums take the place of codes that every lane has read
    cute.arch.sync_warp()
    for f in cutlass.range_constexpr(cfg.tiles * 2 * cfg.nt):
        at = mine + f // (2 * cfg.nt) * cfg.slot_bytes + f % (2 * cfg.nt) * 512 + lane * 16
        ptx.sts128f(at, [tot[4 * f + e] for e in range(4)])
    dst = (out, bias, M, N, out_stride)
    finish(codes, smem + cfg.received_offset, (warp, lane, rank), tile0, dst, cfg)


@cute.jit
def launch_stream(
    words: Int64, scales: Int64, zeros: Int64, out: Int64, bias: Int64, M: Int32, N: Int32,
    chunks: Int32, groups: Int32, out_stride: Int32, columns: Int32, steps: Int32, rows, stream,
    cfg: cutlass.Constexpr,
):  # fmt: skip
    """Launch on a stream; arguments are device addresses and sizes, `columns` blocks along the
    outputs, and the activations [M, K] as a tensor."""
    one = cute.slice_(tile_layout(cfg, 1), (None, None, 0))
    load = cpasync.CopyBulkTensorTileG2SOp()
    tma = cpasync.make_tiled_tma_atom(load, rows, one, (8 * cfg.nt, 64))
    stream_kernel(
        (tma[0], tma[1]),
        (words, scales, zeros, out, bias),
        (M, N, chunks, groups, out_stride, steps),
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
        *[Int32(1)] * 7,
        fake_matrix(DTYPE[config.kind], 8),
        make_fake_stream(),
        config,
        options=f"--enable-tvm-ffi --gpu-arch {architecture}",
    )
