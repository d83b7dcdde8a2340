"""W4A16 for many rows (M > 32) on Hopper: packed weights as the register operand of WGMMA.

    out[m, n] = sum_k act[m, k] * round(scale[n, group] * (code[n, k] - zero[n, group]))  (+ bias[n])

A tile is 128 or 256 outputs x 64, 128 or 256 rows. One producer warp brings stages of 64 inputs:
activations by TMA in WGMMA's swizzle, codes and scales by bulk copies of consecutive bytes. Two
consumer warpgroups own 64 (or 2 x 64) outputs each. A lane's codes of a stage are one 128-bit load
(layout.py); it turns them into operand registers, exactly (q - zero) then one rounding by the scale,
while the product of the stage before runs: two sets of operand registers alternate.

Bytes a tile and stage: block_n 32 of codes, block_m 128 of activations. Bound by the tensor cores
above some 128 rows, by the re-reading of activations from L2 below (hence 256 outputs a tile there).

Work: tiles go round the persistent blocks in waves; the last, uneven waves are cut along K into
equal shares (stream-K, Osama et al. 2023). A tile's shares are added in the order of k by the block
that finishes last, so results do not depend on timing.

Scales of another dtype than the activations are used as a sum of two (high and low part, one fma),
so that a weight is still rounded once.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from ridgeline.kernels.w4a16 import cute_ptx as ptx
from ridgeline.kernels.w4a16.config import MatmulConfig

NIBBLES = 0x000F000F
BASE = {"bf16": 0x43004300, "f16": 0x64006400}
BASE_VALUE = {"bf16": 128.0, "f16": 1024.0}
OFFSET_SYMMETRIC = {"bf16": 0x43084308, "f16": 0x64086408}
DTYPE = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16}
CONSUMERS = 2
M_GROUP = 8


@cute.jit
def row_scales(address, cfg: cutlass.Constexpr):
    """Scales of the lane's rows g and g + 8, each a list of operand words (high, then low part)."""
    kind = cfg.kind
    if cutlass.const_expr(cfg.exact_scale):
        pair = ptx.lds32(address)
        return [[ptx.repeat_half(pair, False)], [ptx.repeat_half(pair, True)]]
    if cutlass.const_expr(cfg.scale == "f32"):
        values = ptx.lds64f(address)
    else:
        values = ptx.widen_pair(ptx.lds32(address), cfg.scale)
    out = []
    for value in values:
        high = ptx.packed_twice(value, kind)
        rest = value - ptx.widen_pair(high, kind)[0]
        out.append([high, ptx.packed_twice(rest, kind)])
    return out


@cute.jit
def decode_step(word, scales, offsets, kind: cutlass.Constexpr):
    """The four operand registers of a word: rows g, g + 8, then the same rows 8 inputs on."""
    out = []
    for j in cutlass.range_constexpr(4):
        shifted = word if j == 0 else ptx.shift_right(word, 4 * j)
        exact = ptx.packed_sub(ptx.and_or(shifted, NIBBLES, BASE[kind]), offsets[j % 2], kind)
        scale = scales[j % 2]
        if cutlass.const_expr(len(scale) == 1):
            out.append(ptx.packed_mul(exact, scale[0], kind))
        else:
            low = ptx.packed_mul(exact, scale[1], kind)
            out.append(ptx.packed_fma(exact, scale[0], low, kind))
    return out


@cute.jit
def segment(index, plan, first, share, cfg: cutlass.Constexpr):
    """The index-th piece of this block's work: (tile, first step, end step, position after it).

    Whole tiles of the waves come first; then the block's share [first, first + share) of the steps
    of the remaining tiles, cut where a tile ends.
    """
    waves, steps, blocks, me = plan
    tile = index * blocks + me
    begin, end, after = Int32(0), steps, first
    if index >= waves:
        tile = waves * blocks + first // steps
        begin = first % steps
        end = cutlass.min(steps, begin + share)
        after = first + (end - begin)
    return tile, begin, end, after


@cute.jit
def tile_corner(tile, tiles_m, tiles_n, cfg: cutlass.Constexpr):
    """(first row of activations, first output): rows fastest, in groups that share L2."""
    group = tile // (M_GROUP * tiles_n)
    in_group = tile % (M_GROUP * tiles_n)
    rows = cutlass.min(M_GROUP, tiles_m - group * M_GROUP)
    tile_m = group * M_GROUP + in_group % rows
    return tile_m * cfg.block_m, (in_group // rows) * cfg.block_n


@cute.jit
def produce(work, smem, tma_act, mA, sA, src, lane, cfg: cutlass.Constexpr):
    """The producer warp: one stage after the other of all the block's segments."""
    plan, first_share, tiles_mn = work
    words, scales, zeros, blocks_n, chunks, groups = src
    weights_smem, bars = smem
    first, share, count = first_share
    stage, parity = Int32(0), Int32(1)
    index, left = Int32(0), share
    gA = cute.local_tile(mA, (cfg.block_m, 64), (None, None))
    tA, tgA = cpasync.tma_partition(
        tma_act, 0, cute.make_layout(1), cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
    )
    at = first
    for index in cutlass.range(count, unroll=1):
        tile, begin, end, after = segment(index, plan, at, left, cfg)
        left = left - (after - at)
        at = after
        row0, out0 = tile_corner(tile, tiles_mn[0], tiles_mn[1], cfg)
        block0 = out0 // 32
        num_blocks = cutlass.min(cfg.block_n // 32, blocks_n - block0)
        mine = Int32(lane < num_blocks)
        block = Int64(block0 + lane)
        for step in cutlass.range(2 * begin, 2 * end, unroll=1):
            full = bars + stage * 8
            ptx.mbar_wait(bars + (cfg.stages + stage) * 8, parity)
            slot = weights_smem + stage * cfg.slot_bytes
            extra = cfg.block_scale_bytes + cfg.block_zero_bytes
            ptx.mbar_expect(full, cfg.act_bytes + num_blocks * (1024 + extra), Int32(lane == 0))
            cute.arch.sync_warp()
            ptx.bulk_load(
                slot + lane * 1024, words + (block * chunks + step) * 1024, 1024, full, mine
            )
            group = block * groups
            if cutlass.const_expr(not cfg.per_channel):
                if cutlass.const_expr(cfg.packed_group == 32):
                    group = group + step * 2
                else:
                    group = group + step * 64 // cfg.packed_group
            scale_slot = slot + cfg.code_bytes + lane * cfg.block_scale_bytes
            ptx.bulk_load(
                scale_slot, scales + group * cfg.scale_row, cfg.block_scale_bytes, full, mine
            )
            if cutlass.const_expr(not cfg.symmetric):
                zero_slot = (
                    slot + cfg.code_bytes + (cfg.block_n // 32) * cfg.block_scale_bytes
                    + lane * cfg.block_zero_bytes
                )
                ptx.bulk_load(zero_slot, zeros + group * 32, cfg.block_zero_bytes, full, mine)
            cute.copy(
                tma_act,
                tgA[None, row0 // cfg.block_m, step],
                tA[None, stage],
                tma_bar_ptr=cute.make_ptr(
                    cutlass.Int64, full, cute.AddressSpace.smem, assumed_align=8
                ),
            )
            stage += 1
            if stage == cfg.stages:
                stage = Int32(0)
                parity = parity ^ 1


@cute.jit
def load_operand(slot, place, rA, cfg: cutlass.Constexpr):
    """Codes of a stage to operand registers rA (Int32, 16 a WGMMA row block)."""
    wg, warp, lane = place
    for mi in cutlass.range_constexpr(cfg.row_mmas):
        # rows 64 (wg row_mmas + mi) + 16 warp: 32-output block, its half rt
        block = (wg * cfg.row_mmas + mi) * 2 + warp // 2
        rt = warp % 2
        w = ptx.lds128(slot + block * 1024 + rt * 512 + lane * 16)
        scale_at = slot + cfg.code_bytes + block * cfg.block_scale_bytes
        scale_at = scale_at + (lane // 4) * (cfg.scale_row // 8) + rt * (cfg.scale_row // 16)
        zero_at = slot + cfg.code_bytes + (cfg.block_n // 32) * cfg.block_scale_bytes
        zero_at = zero_at + block * cfg.block_zero_bytes + (lane // 4) * 4 + rt * 2
        scales, offsets = [], []
        for s in cutlass.range_constexpr(cfg.stage_groups):
            scales.append(row_scales(scale_at + s * cfg.scale_row, cfg))
            offsets.append(load_offsets(zero_at + s * 32, rt, cfg))
        for i in cutlass.range_constexpr(4):
            s = (i // 2) if cfg.stage_groups == 2 else 0
            registers = decode_step(w[i], scales[s], offsets[s], cfg.kind)
            for j in cutlass.range_constexpr(4):
                rA[mi * 16 + i * 4 + j] = registers[j]


@cute.jit
def load_offsets(zero_at, rt, cfg: cutlass.Constexpr):
    """Zero points of rows g and g + 8 (two bytes of an aligned word)."""
    if cutlass.const_expr(cfg.symmetric):
        offset = ptx.ones_operand(OFFSET_SYMMETRIC[cfg.kind])
        return [offset, offset]
    word = ptx.lds32(zero_at - rt * 2) >> (16 * rt)
    return [
        ptx.packed_twice(Float32((word >> (8 * j)) & 0xFF) + BASE_VALUE[cfg.kind], cfg.kind)
        for j in range(2)
    ]


@cute.jit
def multiply(mma, acc, tA, tB, stage, fresh, cfg: cutlass.Constexpr):
    """Issue the products of one stage, as one group."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(4):
        for mi in cutlass.range_constexpr(cfg.row_mmas):
            if cutlass.const_expr(k == 0):
                mma.set(warpgroup.Field.ACCUMULATE, fresh == 0)
            else:
                mma.set(warpgroup.Field.ACCUMULATE, True)
            cute.gemm(mma, acc[mi], tA[mi][None, None, k], tB[None, None, k, stage], acc[mi])
    warpgroup.commit_group()


@cute.jit
def share_out(acc, place, workspace, slot, cfg: cutlass.Constexpr):
    """Leave a partial tile in the workspace."""
    thread = place[0] * 128 + place[1] * 32 + place[2]
    per_mma = cfg.block_m // 2
    base = workspace + Int64(slot) * (cfg.block_n * cfg.block_m * 4) + thread * 16
    for mi in cutlass.range_constexpr(cfg.row_mmas):
        for j in cutlass.range_constexpr(per_mma // 4):
            values = [acc[mi][4 * j + e] for e in range(4)]
            ptx.stg128f(base + (mi * (per_mma // 4) + j) * 4096, values)


@cute.jit
def gather_parts(acc, place, workspace, parts, cfg: cutlass.Constexpr):
    """Sum of all parts of a tile in order of k; parts = (first block, how many)."""
    block_first, num_parts = parts
    thread = place[0] * 128 + place[1] * 32 + place[2]
    per_mma = cfg.block_m // 2
    for mi in cutlass.range_constexpr(cfg.row_mmas):
        for i in cutlass.range_constexpr(per_mma):
            acc[mi][i] = Float32(0.0)
    for part in cutlass.range(num_parts, unroll=1):
        slot = 2 * (block_first + part) + Int32(part == 0)
        base = workspace + Int64(slot) * (cfg.block_n * cfg.block_m * 4) + thread * 16
        for mi in cutlass.range_constexpr(cfg.row_mmas):
            for j in cutlass.range_constexpr(per_mma // 4):
                values = ptx.ldg128f(base + (mi * (per_mma // 4) + j) * 4096)
                for e in cutlass.range_constexpr(4):
                    acc[mi][4 * j + e] = acc[mi][4 * j + e] + values[e]


@cute.jit
def write_tile(acc, place, tile_smem, corner, dst, cfg: cutlass.Constexpr):
    """Bias, rounding, transposition through shared memory, 16-byte stores."""
    out, bias, M, N, stride = dst
    wg, warp, lane = place
    row0, out0 = corner
    has_bias = Int32(bias != 0)
    for mi in cutlass.range_constexpr(cfg.row_mmas):
        first = (wg * cfg.row_mmas + mi) * 64 + warp * 16
        n = out0 + first + lane // 4
        low = ptx.load_narrow(bias + Int64(n) * 2, cfg.kind, has_bias & Int32(n < N))
        high = ptx.load_narrow(bias + Int64(n + 8) * 2, cfg.kind, has_bias & Int32(n + 8 < N))
        # matrix lane // 8: outputs first + 8 (matrix % 2), rows 8 (matrix // 2) of the pair
        at = tile_smem + (lane % 8 + (lane // 16) * 8) * cfg.out_pitch
        at = at + (first + (lane // 8 % 2) * 8) * 2
        for j in cutlass.range_constexpr(cfg.block_m // 16):
            v = [acc[mi][8 * j + e] for e in range(8)]
            packed = [
                ptx.packed_pair(v[0] + low, v[1] + low, cfg.kind),
                ptx.packed_pair(v[2] + high, v[3] + high, cfg.kind),
                ptx.packed_pair(v[4] + low, v[5] + low, cfg.kind),
                ptx.packed_pair(v[6] + high, v[7] + high, cfg.kind),
            ]
            ptx.stmatrix_x4_trans(at + j * 16 * cfg.out_pitch, packed)
    cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * 128)
    thread = wg * 128 + warp * 32 + lane
    per_row = cfg.block_n // 8
    n = out0 + (thread % per_row) * 8
    for i in cutlass.range_constexpr(cfg.block_m * per_row // (CONSUMERS * 128)):
        m = i * (CONSUMERS * 128 // per_row) + thread // per_row
        values = ptx.lds128(tile_smem + m * cfg.out_pitch + (thread % per_row) * 16)
        keep = Int32(row0 + m < M) & Int32(n < N)
        ptx.stg128(out + (Int64(row0 + m) * stride + n) * 2, values, keep)
    cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * 128)


@cute.jit
def share_start(block, total, blocks):
    """First step of a block's share of the remaining tiles."""
    return (block * total) // blocks


@cute.jit
def consume(work, smem, mma, tB, dst, scratch, place, cfg: cutlass.Constexpr):
    """A consumer warpgroup: products of all the block's segments, then their tiles."""
    plan, first_share, tiles_mn = work
    waves, steps, blocks, me = plan
    weights_smem, bars, tile_smem, flag = smem
    workspace, counters = scratch
    first, share, count = first_share
    wg, warp, lane = place
    shape = mma.partition_shape_C((64, cfg.block_m))
    acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(cfg.row_mmas)]
    flat = [cute.make_tensor(a.iterator, cute.make_layout(cfg.block_m // 2)) for a in acc]
    operand_shape = mma.partition_shape_A((64, 64))
    operands, words = [], []
    for _ in cutlass.range_constexpr(2):
        both = cute.make_rmem_tensor((16 * cfg.row_mmas,), Int32)
        words.append(both)
        views = []
        for mi in cutlass.range_constexpr(cfg.row_mmas):
            part = cute.make_tensor(both.iterator + mi * 16, cute.make_layout(16))
            narrow = cute.recast_tensor(part, DTYPE[cfg.kind])
            views.append(cute.make_tensor(narrow.iterator, cute.make_layout(operand_shape)))
        operands.append(views)
    stage, parity = Int32(0), Int32(0)
    at, left = first, share
    remaining = waves * blocks
    for index in cutlass.range(count, unroll=1):
        tile, begin, end, after = segment(index, plan, at, left, cfg)
        left = left - (after - at)
        at = after
        release = Int32(0)
        for step in cutlass.range(begin, end, unroll=1):
            for half in cutlass.range_constexpr(2):
                ptx.mbar_wait(bars + stage * 8, parity)
                load_operand(weights_smem + stage * cfg.slot_bytes, place, words[half], cfg)
                fresh = Int32(0)
                if cutlass.const_expr(half == 0):
                    fresh = Int32(step == begin)
                multiply(mma, acc, operands[half], tB, stage, fresh, cfg)
                warpgroup.wait_group(1)
                # the products of the stage before this one are done
                before = stage - 1
                if before < 0:
                    before = before + cfg.stages
                started = Int32(step > begin) if half == 0 else Int32(1)
                ptx.mbar_arrive(
                    bars + (cfg.stages + before) * 8, started & Int32(lane == 0)
                )
                release = stage
                stage += 1
                if stage == cfg.stages:
                    stage = Int32(0)
                    parity = parity ^ 1
        warpgroup.wait_group(0)
        ptx.mbar_arrive(bars + (cfg.stages + release) * 8, Int32(lane == 0))
        corner = tile_corner(tile, tiles_mn[0], tiles_mn[1], cfg)
        whole = Int32(1)
        if end - begin < steps:
            total = (tiles_mn[0] * tiles_mn[1] - remaining) * steps
            start = (tile - remaining) * steps
            b0 = owner(start, total, blocks)
            b1 = owner(start + steps - 1, total, blocks)
            mine = 2 * me + Int32(begin == 0)
            share_out(flat, place, workspace, mine, cfg)
            cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * 128)
            thread = wg * 128 + warp * 32 + lane
            old = ptx.arrive_counter(
                counters + Int64(tile - remaining) * 4, b1 - b0, Int32(thread == 0)
            )
            ptx.sts32(flag, old, Int32(thread == 0))
            cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS * 128)
            old = ptx.lds32(flag)
            whole = Int32(old == b1 - b0)
            if whole != 0:
                gather_parts(flat, place, workspace, (b0, b1 - b0 + 1), cfg)
        if whole != 0:
            write_tile(flat, place, tile_smem, corner, dst, cfg)


@cute.jit
def owner(position, total, blocks):
    """The block whose share of the remaining steps holds a position."""
    block = (position * blocks) // total
    while share_start(block + 1, total, blocks) <= position:
        block = block + 1
    while share_start(block, total, blocks) > position:
        block = block - 1
    return block


@cute.kernel
def matmul_kernel(
    tma_act, mA, layout_act: cute.ComposedLayout, pointers: tuple, sizes: tuple,
    cfg: cutlass.Constexpr,
):  # fmt: skip
    """pointers = (words, scales, zeros, out, bias, workspace, counters); sizes = (M, N, out stride,
    32-output blocks, chunks of 64, groups, whole waves)."""
    words, scales, zeros, out, bias, workspace, counters = pointers
    M, N, out_stride, blocks_n, chunks, groups, waves = sizes
    tid, _, _ = cute.arch.thread_idx()
    me, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
    smem = Int32(base.toint())
    bars = smem
    flag = smem + 2 * cfg.stages * 8
    sA = cute.make_tensor(
        cute.recast_ptr(base + 1024, layout_act.inner, dtype=DTYPE[cfg.kind]), layout_act.outer
    )
    weights_smem = smem + 1024 + cfg.stages * cfg.act_bytes
    tile_smem = weights_smem + cfg.stages * cfg.slot_bytes
    if tid == 0:
        for i in cutlass.range_constexpr(cfg.stages):
            ptx.mbar_init(bars + i * 8, 1)
            ptx.mbar_init(bars + (cfg.stages + i) * 8, CONSUMERS * 4)
        ptx.mbar_fence()
    cute.arch.sync_threads()
    ptx.launch_next_grid()

    steps = chunks // 2
    tiles_m = (M + cfg.block_m - 1) // cfg.block_m
    tiles_n = (blocks_n * 32 + cfg.block_n - 1) // cfg.block_n
    total = (tiles_m * tiles_n - waves * blocks) * steps
    first = share_start(me, total, blocks)
    share = share_start(me + 1, total, blocks) - first
    count = waves
    if share > 0:
        count = waves + (first + share - 1) // steps - first // steps + 1
    work = ((waves, steps, blocks, me), (first, share, count), (tiles_m, tiles_n))
    if warp >= CONSUMERS * 4:
        cute.arch.setmaxregister_decrease(40)
        if warp == CONSUMERS * 4:
            ptx.wait_previous_grid()
            src = (words, scales, zeros, blocks_n, chunks, groups)
            produce(work, (weights_smem, bars), tma_act, mA, sA, src, lane, cfg)
    else:
        cute.arch.setmaxregister_increase(232)
        ptx.wait_previous_grid()
        op = warpgroup.MmaF16BF16Op(
            DTYPE[cfg.kind],
            Float32,
            (64, cfg.block_m, 16),
            warpgroup.OperandSource.RMEM,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
        )
        mma = cute.make_tiled_mma(cute.make_mma_atom(op))
        tB = mma.make_fragment_B(mma.get_slice(0).partition_B(sA))
        place = (warp // 4, warp % 4, lane)
        consume(
            work, (weights_smem, bars, tile_smem, flag), mma, tB, (out, bias, M, N, out_stride),
            (workspace, counters), place, cfg,
        )  # fmt: skip


@cute.jit
def launch_matmul(
    act: cute.Tensor, words: Int64, scales: Int64, zeros: Int64, out: Int64, bias: Int64,
    workspace: Int64, counters: Int64, N: Int32, out_stride: Int32, blocks_n: Int32,
    chunks: Int32, groups: Int32, waves: Int32, blocks: Int32, stream, cfg: cutlass.Constexpr,
):  # fmt: skip
    """Launch on a stream. act [M, K] contiguous in K; the rest device addresses and sizes."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, DTYPE[cfg.kind])
    layout = cute.tile_to_shape(atom, (cfg.block_m, 64, cfg.stages), order=(0, 1, 2))
    tma_act, mA = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(),
        act,
        cute.slice_(layout, (None, None, 0)),
        (cfg.block_m, 64),
    )
    matmul_kernel(
        tma_act, mA, layout,
        (words, scales, zeros, out, bias, workspace, counters),
        (act.shape[0], N, out_stride, blocks_n, chunks, groups, waves),
        cfg,
    ).launch(
        grid=(blocks, 1, 1),
        block=(CONSUMERS * 128 + 128, 1, 1),
        smem=cfg.smem_bytes,
        stream=stream,
        use_pdl=cfg.pdl,
        min_blocks_per_mp=1,
    )  # fmt: skip
