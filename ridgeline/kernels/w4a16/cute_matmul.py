"""W4A16 for more rows on Hopper: packed weights as the register operand of WGMMA.

    out[m, n] = sum_k act[m, k] * round(scale[n, g(k)] * (code[n, k] - zero[n, g(k)]))  (+ bias[n])

A tile is 128 or 256 outputs x 16 to 256 rows. One producer warp brings stages of 64 or 128 inputs
by TMA: activations in WGMMA's swizzle, codes, scales and zero points as they lie in memory. Two or
four consumer warpgroups own 64 (or 2 x 64) outputs each. A lane's codes of 64 inputs are one
128-bit load (layout.py); it turns them into operand registers while the product before runs: two
sets of operand registers alternate. Weights are rounded once (`decode_step`).

Bytes a tile and 64 inputs: block_n 32 of codes, block_m 128 of activations. Bound by the tensor
cores above some 128 rows; below by issue slots and by the re-reading of activations from L2.

Work: tiles go round the persistent blocks in waves; the last, uneven waves are cut along K into
equal shares (stream-K, Osama et al. 2023), a block's share inside a tile first, the tile it
finishes last (schedule.py): sums that others leave are there before they are wanted, and are read
beside the last products. They are added in the order of k, so results do not depend on timing. Or
`split` blocks have a part of K of one tile each and add in shares, in the order of k
(cute_parts.py).

With `cast` two blocks of a cluster walk tiles of the same rows and neighbouring outputs, and each
brings half of the activations to both (TMA multicast): a tile of 128 x 128 wants 40 bytes a cycle
from L2 at the tensor cores' full rate, which is what an SM gets; shared, 24. A stage is free when
the consumers of both blocks have read it.

Scales of another dtype than the activations are used as a sum of two (high and low part, one fma),
so that a weight is still rounded once.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream

from ridgeline.kernels.w4a16 import cute_ptx as ptx
from ridgeline.kernels.w4a16 import schedule
from ridgeline.kernels.w4a16.cute_epilogue import load_bias
from ridgeline.kernels.w4a16.cute_parts import (
    add_parts,
    assist,
    finish_cluster,
    finish_parts,
    finish_told,
    fragment,
    leave_part,
    make_parts,
    open_parts,
    take_part,
    write_fragment,
)
from ridgeline.kernels.w4a16.cute_ptx import DTYPE, fake_matrix
from ridgeline.kernels.w4a16.tiles import MatmulConfig

NIBBLES = 0x000F000F
NIBBLES_HIGH = 0x00F000F0
F16_1024 = 0x64006400
F16_SIXTEENTH = 0x2C002C00
BF16_TO_HIGH = {0: 0x7F007F00, 1: 0x7D007D00}
"""2^127 and 2^123: a lower and an upper nibble, subnormal, to q 2^-6."""
BF16_64 = 0x42804280
BF16_SCALE = {0: 0x71807180, 1: 0x6F806F80}
"""2^100 and 2^96: a scale for a lower and an upper nibble, of weights 2^-33."""
BF16_MIDDLE = 0xB080B080 - (1 << 32)
"""-2^-30: eight steps down, in weights 2^-33."""
SCALE_DTYPE = {**DTYPE, "f32": cutlass.Float32}
M_GROUP = 8


@cute.jit
def row_scales(address, cfg: cutlass.Constexpr):
    """Scales of the lane's rows g and g + 8, each a list of operand words.

    Direct: factor of the nibble and what is added; else the scale (high, then low part), for bf16
    times 64."""
    kind = cfg.kind
    if cutlass.const_expr(cfg.exact_scale):
        pair = ptx.lds32(address)
        both = [ptx.repeat_half(pair, False), ptx.repeat_half(pair, True)]
        if cutlass.const_expr(cfg.direct):
            return [
                [
                    ptx.packed_mul(both[hr], ptx.constant(BF16_SCALE[hr]), kind),
                    ptx.packed_mul(both[hr], ptx.constant(BF16_MIDDLE), kind),
                ]
                for hr in range(2)
            ]
        if cutlass.const_expr(kind == "bf16"):
            return [[ptx.packed_mul(scale, ptx.constant(BF16_64), kind)] for scale in both]
        return [[scale] for scale in both]
    if cutlass.const_expr(cfg.scale == "f32"):
        values = ptx.lds64f(address)
    else:
        values = ptx.widen_pair(ptx.lds32(address), cfg.scale)
    out = []
    for hr in cutlass.range_constexpr(2):
        value = values[hr] * 64.0 if kind == "bf16" else values[hr]
        high = ptx.packed_twice(value, kind)
        rest = value - ptx.widen_pair(high, kind)[0]
        out.append([high, ptx.packed_twice(rest, kind)])
    return out


@cute.jit
def exact_codes(nibbles, offset, hr: cutlass.Constexpr, kind: cutlass.Constexpr):
    """A pair of q - zero; for bf16 over 64.

    Nibbles of rows g + 8 lie four bits higher and are worth 16 times as much.
    """
    if cutlass.const_expr(kind == "bf16"):
        return ptx.packed_fma(nibbles, ptx.constant(BF16_TO_HIGH[hr]), offset, kind)
    if cutlass.const_expr(hr == 0):
        return ptx.packed_sub(nibbles, offset, kind)
    return ptx.packed_fma(nibbles, ptx.constant(F16_SIXTEENTH), offset, kind)


@cute.jit
def decode_step(word, scales, offsets, cfg: cutlass.Constexpr):
    """The four operand registers of a word: rows g, g + 8, then the same rows 8 inputs on.

    A bf16 whose upper 8 bits are 0 is its lower 8 bits times 2^-133, exactly: a masked nibble is an
    operand as it stands, and where the scale is bf16 and the middle code 8, one fma by s 2^100 with
    -8 s 2^-33 gives the weight 2^-33, rounded once.
    """
    out = []
    for j in cutlass.range_constexpr(4):
        hr = j % 2
        half = word if j < 2 else ptx.shift_right(word, 8)
        mask = NIBBLES_HIGH if hr else NIBBLES
        scale = scales[hr]
        if cutlass.const_expr(cfg.direct):
            out.append(ptx.packed_fma(half & mask, scale[0], scale[1], cfg.kind))
        else:
            nibbles = half & mask
            if cutlass.const_expr(cfg.kind == "f16"):
                nibbles = ptx.and_or(half, mask, F16_1024)
            exact = exact_codes(nibbles, offsets[hr], hr, cfg.kind)
            if cutlass.const_expr(len(scale) == 1):
                out.append(ptx.packed_mul(exact, scale[0], cfg.kind))
            else:
                low = ptx.packed_mul(exact, scale[1], cfg.kind)
                out.append(ptx.packed_fma(exact, scale[0], low, cfg.kind))
    return out


@cute.jit
def segment(index, plan, share, at, cfg: cutlass.Constexpr):
    """The index-th piece of this block's work: (tile, first step, end step, where the share goes on
    after it); plan = (waves, steps, blocks, me), share = (its start, end and number of pieces), or
    (the tile, nothing, 1) where K is split.

    What starts inside a tile comes first, then the waves' whole tiles, then the rest of the share,
    cut where a tile ends."""
    waves, steps, blocks, me = plan
    if cutlass.const_expr(cfg.split > 1):
        rank = me % cfg.split
        return share[0], rank * steps // cfg.split, (rank + 1) * steps // cfg.split, at
    whole = index - Int32(share[0] % steps != 0)
    tile = whole * blocks + me
    begin, end, after = Int32(0), steps, at
    if whole < 0 or whole >= waves:
        tile = waves * blocks + at // steps
        begin = at % steps
        end = cutlass.min(steps, begin + share[1] - at)
        after = at + end - begin
    return tile, begin, end, after


@cute.jit
def tile_corner(tile, tiles, cfg: cutlass.Constexpr):
    """(first row of activations, first output): rows fastest, in groups that share L2; tiles =
    (along M, along N, which of the tile's `cast` neighbours along N)."""
    tiles_m, tiles_n, which = tiles
    tile_m, tile_n = Int32(0), tile
    if tiles_m > 1:
        group = tile // (M_GROUP * tiles_n)
        in_group = tile % (M_GROUP * tiles_n)
        rows = cutlass.min(M_GROUP, tiles_m - group * M_GROUP)
        tile_m, tile_n = group * M_GROUP + in_group % rows, in_group // rows
    return tile_m * cfg.block_m, (tile_n * cfg.cast + which) * cfg.block_n


@cute.jit
def make_copies(tma, tensors, smem, cfg: cutlass.Constexpr):
    """Partition activations, codes, scales and zero points (if any) into stages."""
    tiles = (
        (cfg.block_m // cfg.cast, 64),
        (cfg.block_n // 32, 256),
        (cfg.block_n // 32, 32 * cfg.stage_groups),
        (cfg.block_n // 32, 32 * cfg.stage_groups),
    )
    out = []
    for i in cutlass.range_constexpr(len(tma)):
        source = cute.local_tile(tensors[i], tiles[i], (None, None))
        target, tiled = cpasync.tma_partition(
            tma[i], 0, cute.make_layout(1), cute.group_modes(smem[i], 0, 2),
            cute.group_modes(source, 0, 2),
        )  # fmt: skip
        out.append((tma[i], tiled, target))
    if cutlass.const_expr(cfg.symmetric):
        out.append(None)
    return out


@cute.jit
def scale_column(step, cfg: cutlass.Constexpr):
    """Which tile of scales the step (a stage's inputs) needs."""
    if cutlass.const_expr(cfg.per_channel):
        return Int32(0)
    if cutlass.const_expr(cfg.packed_group <= 64 * cfg.halves):
        return step
    return step * (64 * cfg.halves) // cfg.packed_group


@cute.jit
def meeting(bars, cfg: cutlass.Constexpr):
    """Barriers of sums that this block leaves to others, and of others' that are there."""
    there = bars + 2 * cfg.stages * 8
    return there + 8, there + 16


@cute.jit
def load_weights(copies, row, step, stage, full, lane, cfg: cutlass.Constexpr):
    """Announce a stage's bytes and start its weights' copies."""
    ptx.mbar_expect(full, cfg.act_bytes + cfg.stage_bytes, Int32(lane == 0))
    cute.arch.sync_warp()
    bar = cute.make_ptr(cutlass.Int64, full, cute.AddressSpace.smem, assumed_align=8)
    atom, source, target = copies[1]
    for half in cutlass.range_constexpr(cfg.halves):
        at = cfg.halves * stage + half
        chunk = cfg.halves * step + half
        cute.copy(atom, source[None, row, chunk], target[None, at], tma_bar_ptr=bar)
    column = scale_column(step, cfg)
    atom, source, target = copies[2]
    cute.copy(atom, source[None, row, column], target[None, stage], tma_bar_ptr=bar)
    if cutlass.const_expr(not cfg.symmetric):
        atom, source, target = copies[3]
        cute.copy(atom, source[None, row, column], target[None, stage], tma_bar_ptr=bar)


@cute.jit
def load_activations(copies, row0, step, stage, full, which, cfg: cutlass.Constexpr):
    """Start a stage's activations: all of them, or half to both blocks."""
    bar = cute.make_ptr(cutlass.Int64, full, cute.AddressSpace.smem, assumed_align=8)
    atom, source, target = copies[0]
    row = row0 // cfg.block_m * cfg.cast + which
    for half in cutlass.range_constexpr(cfg.halves):
        rows = source[None, row, cfg.halves * step + half]
        into = target[None, (cfg.halves * stage + half) * cfg.cast + which]
        if cutlass.const_expr(cfg.cast > 1):
            cute.copy(atom, rows, into, tma_bar_ptr=bar, mcast_mask=cutlass.Int16(3))
        else:
            cute.copy(atom, rows, into, tma_bar_ptr=bar)


@cute.jit
def produce(work, bars, copies, scratch, lane, cfg: cutlass.Constexpr):
    """The producer warp: one stage after the other of all the block's segments.

    The weights of the first stages are asked for before the previous kernel of the stream has
    ended; activations after it has.
    """
    plan, share, tiles_mn, _ = work
    first, _, count = share
    early = Int32(0)
    if count > 0:
        tile, begin, end, _ = segment(Int32(0), plan, share, first, cfg)
        _, out0 = tile_corner(tile, tiles_mn, cfg)
        begin = begin * (2 // cfg.halves)
        early = cutlass.min(Int32(cfg.stages), end * (2 // cfg.halves) - begin)
        for i in cutlass.range(early, unroll=1):
            load_weights(copies, out0 // cfg.block_n, begin + i, i, bars + i * 8, lane, cfg)
    ptx.wait_previous_grid()
    if cutlass.const_expr(cfg.cast > 1):
        ptx.cluster_wait()
    stage, parity = Int32(0), Int32(1)
    at = first
    for index in cutlass.range(count, unroll=1):
        tile, begin, end, at = segment(index, plan, share, at, cfg)
        row0, out0 = tile_corner(tile, tiles_mn, cfg)
        per = 2 // cfg.halves
        for step in cutlass.range(begin * per, end * per, unroll=1):
            full = bars + stage * 8
            if early > 0:
                early = early - 1
            else:
                ptx.mbar_wait(bars + (cfg.stages + stage) * 8, parity)
                load_weights(copies, out0 // cfg.block_n, step, stage, full, lane, cfg)
            load_activations(copies, row0, step, stage, full, tiles_mn[2], cfg)
            stage += 1
            if stage == cfg.stages:
                stage = Int32(0)
                parity = parity ^ 1
    if cutlass.const_expr(cfg.told):
        of_tile = (plan[3] // cfg.parts * cfg.cast + tiles_mn[2], plan[3] % cfg.parts)
        open_parts(of_tile, scratch, meeting(bars, cfg)[1], lane, cfg)
    if cutlass.const_expr(cfg.split == 1 and not cfg.reallocates):
        assist(work, scratch, meeting(bars, cfg), lane, cfg)
    if cutlass.const_expr(cfg.cast > 1):
        # the other block's consumers still arrive here: end after they have
        for _ in cutlass.range(cfg.stages, unroll=1):
            ptx.mbar_wait(bars + (cfg.stages + stage) * 8, parity)
            stage += 1
            if stage == cfg.stages:
                stage = Int32(0)
                parity = parity ^ 1


@cute.jit
def load_factors(slot, place, mi: cutlass.Constexpr, cfg: cutlass.Constexpr):
    """Scales and offsets of a stage's mi-th 64 outputs, a pair for each of its groups."""
    wg, warp, lane = place
    block = (wg * cfg.row_mmas + mi) * 2 + warp // 2
    rt = warp % 2
    scale_at = slot + cfg.code_bytes + block * cfg.block_scale_bytes
    scale_at = scale_at + (lane // 4) * (cfg.scale_row // 8) + rt * (cfg.scale_row // 16)
    zero_at = slot + cfg.code_bytes + (cfg.block_n // 32) * cfg.block_scale_bytes
    zero_at = zero_at + block * cfg.block_zero_bytes + (lane // 4) * 4 + rt * 2
    return [
        (row_scales(scale_at + s * cfg.scale_row, cfg), load_offsets(zero_at + s * 32, rt, cfg))
        for s in range(cfg.stage_groups)
    ]


@cute.jit
def load_words(slot, place, cfg: cutlass.Constexpr):
    """A lane's codes of a stage: four words for 64 outputs x 64 inputs."""
    wg, warp, lane = place
    out = []
    for mi in cutlass.range_constexpr(cfg.row_mmas):
        # rows 64 (wg row_mmas + mi) + 16 warp: 32-output block, its half rt
        block = (wg * cfg.row_mmas + mi) * 2 + warp // 2
        at = slot + block * 1024 + (warp % 2) * 512 + lane * 16
        part = cfg.block_n * 32
        out.append([ptx.lds128(at + half * part) for half in range(cfg.halves)])
    return out


@cute.jit
def make_operand(words, half: cutlass.Constexpr, factors, rA, cfg: cutlass.Constexpr):
    """Codes of 64 outputs x 64 inputs to operand registers rA (16 Int32)."""
    for i in cutlass.range_constexpr(4):
        scales, offsets = factors[(half * 4 + i) * cfg.stage_groups // (4 * cfg.halves)]
        registers = decode_step(words[i], scales, offsets, cfg)
        for j in cutlass.range_constexpr(4):
            rA[i * 4 + j] = registers[j]


@cute.jit
def load_offsets(zero_at, rt, cfg: cutlass.Constexpr):
    """What `exact_codes` adds or subtracts for rows g and g + 8."""
    if cutlass.const_expr(cfg.direct):
        return [None, None]
    zeros = [Float32(8.0), Float32(8.0)]
    if cutlass.const_expr(not cfg.symmetric):
        word = ptx.lds32(zero_at - rt * 2) >> (16 * rt)
        zeros = [Float32((word >> (8 * hr)) & 0xFF) for hr in range(2)]
    if cutlass.const_expr(cfg.kind == "bf16"):
        return [ptx.packed_twice(zero * -(2.0**-6), cfg.kind) for zero in zeros]
    return [
        ptx.packed_twice(zeros[0] + 1024.0, cfg.kind),
        ptx.packed_twice(zeros[1] * -1.0 - 64.0, cfg.kind),
    ]


@cute.jit
def multiply(mma, acc, tA, tB, part, fresh, cfg: cutlass.Constexpr):
    """Issue the products of 64 inputs (half a stage) with 64 outputs, as one group."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(4):
        if cutlass.const_expr(k == 0):
            mma.set(warpgroup.Field.ACCUMULATE, fresh == 0)
        else:
            mma.set(warpgroup.Field.ACCUMULATE, True)
        cute.gemm(mma, acc, tA[None, None, k], tB[None, None, k, part], acc)
    warpgroup.commit_group()


@cute.jit
def wait_group_of(wg):
    """All threads of one consumer warpgroup."""
    cute.arch.barrier(barrier_id=1 + wg, number_of_threads=128)


@cute.jit
def write_tile(acc, place, store, corner, dst, cfg: cutlass.Constexpr):
    """Bias, rounding, transposition to shared memory in TMA's swizzle, asynchronous store.

    A warpgroup has `store_regions` of shared memory for its `row_mmas` parts."""
    bias, N, _, _, _ = dst
    atom, source, target, tile_smem = store[:4]
    wg, warp, lane = place
    row0, out0 = corner
    for mi in cutlass.range_constexpr(cfg.row_mmas):
        region = wg * cfg.store_regions + mi % cfg.store_regions
        if cutlass.const_expr(mi % cfg.store_regions == 0):
            if warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            wait_group_of(wg)
        n = out0 + (wg * cfg.row_mmas + mi) * 64 + warp * 16 + lane // 4
        low, high = load_bias(bias, n, N, cfg), load_bias(bias, n + 8, N, cfg)
        # matrix lane // 8: outputs 16 warp + 8 (matrix % 2), rows 8 (matrix // 2) of 16
        at = tile_smem + region * (cfg.block_m * 128) + (lane % 8 + (lane // 16) * 8) * 128
        at = at + (((warp * 2 + lane // 8 % 2) ^ (lane % 8)) * 16)
        for j in cutlass.range_constexpr(cfg.block_m // 16):
            v = [acc[mi][8 * j + e] * cfg.weight_factor for e in range(8)]
            packed = [
                ptx.packed_pair(v[0] + low, v[1] + low, cfg.kind),
                ptx.packed_pair(v[2] + high, v[3] + high, cfg.kind),
                ptx.packed_pair(v[4] + low, v[5] + low, cfg.kind),
                ptx.packed_pair(v[6] + high, v[7] + high, cfg.kind),
            ]
            ptx.stmatrix_x4_trans(at + j * 2048, packed)
        cute.arch.fence_proxy("async.shared", space="cta")
        wait_group_of(wg)
        if warp == 0:
            column = out0 // 64 + wg * cfg.row_mmas + mi
            cute.copy(atom, target[None, region], source[None, row0 // cfg.block_m, column])
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def make_registers(mma, cfg: cutlass.Constexpr):
    """Accumulators (as products want them, and flat) and two sets of operand registers."""
    shape = mma.partition_shape_C((64, cfg.block_m))
    acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(cfg.row_mmas)]
    flat = [cute.make_tensor(a.iterator, cute.make_layout(cfg.block_m // 2)) for a in acc]
    operand_shape = mma.partition_shape_A((64, 64))
    operands, words = [], []
    for _ in cutlass.range_constexpr(2):
        own = cute.make_rmem_tensor((16,), Int32)
        words.append(own)
        narrow = cute.recast_tensor(own, DTYPE[cfg.kind])
        operands.append(cute.make_tensor(narrow.iterator, cute.make_layout(operand_shape)))
    return acc, flat, words, operands


@cute.jit
def write_direct(acc, place, corner, dst, cfg: cutlass.Constexpr):
    """Store a tile straight from registers."""
    for f in cutlass.range_constexpr(cfg.warp_fragments):
        write_fragment(fragment(acc, f, cfg), f, place, corner, dst, cfg)


@cute.jit
def release(mbar, lane, done, cfg: cutlass.Constexpr):
    """A consumer warp: a stage has been read, for every block that fills it."""
    if cutlass.const_expr(cfg.cast > 1):
        ptx.mbar_arrive_cluster(mbar, lane, Int32(done) & Int32(lane < cfg.cast))
    else:
        ptx.mbar_arrive(mbar, Int32(done) & Int32(lane == 0))


@cute.jit
def multiply_stage(
    smem, at, registers, mma_tB, place, part: cutlass.Constexpr, cfg: cutlass.Constexpr
):
    """A consumer warpgroup's products of a stage, the part-th of a step, when it is there; at =
    (stage, phase, the stage before, whether sums start here)."""
    weights_smem, bars = smem
    stage, parity, before, fresh = at
    acc, _, words, operands = registers
    mma, tB = mma_tB
    ptx.mbar_wait(bars + stage * 8, parity)
    slot = weights_smem + stage * cfg.slot_bytes
    codes = load_words(slot, place, cfg)
    factors = [load_factors(slot, place, mi, cfg) for mi in range(cfg.row_mmas)]
    uses = cfg.halves * cfg.row_mmas
    for use in cutlass.range_constexpr(uses):
        # two sets of operand registers in turn: one is made while the other is used; waited for as
        # late as may be, behind the reading of this stage's codes
        half, mi = use // cfg.row_mmas, use % cfg.row_mmas
        turn = (part * uses + use) % 2
        if cutlass.const_expr(uses > 1):
            warpgroup.wait_group(1)
        if cutlass.const_expr(use == 1):
            # now the products of the stage before this one are done
            release(bars + (cfg.stages + before) * 8, place[2], fresh == 0, cfg)
        make_operand(codes[mi][half], half, factors[mi], words[turn], cfg)
        chunk = cfg.halves * stage + half
        starts = fresh if half == 0 else Int32(0)
        multiply(mma, acc[mi], operands[turn], tB, chunk, starts, cfg)
        if cutlass.const_expr(uses == 1):
            warpgroup.wait_group(1)
            release(bars + (cfg.stages + before) * 8, place[2], fresh == 0, cfg)


@cute.jit
def consume(work, smem, mma, tB, store, dst, scratch, place, cfg: cutlass.Constexpr):
    """A consumer warpgroup: products of all the block's segments, then their tiles."""
    plan, share, tiles_mn, _ = work
    steps = plan[1]
    bars = smem[1]
    lane = place[2]
    registers = make_registers(mma, cfg)
    flat = registers[1]
    parts = make_parts(work, scratch, place, cfg)
    taken = cute.make_rmem_tensor((cfg.block_m // 2 if cfg.takes_early else 1,), Float32)
    stage, parity = Int32(0), Int32(0)
    at = share[0]
    left, ready = meeting(bars, cfg)
    of_tile = (plan[3] // cfg.parts * cfg.cast + tiles_mn[2], plan[3] % cfg.parts)
    for index in cutlass.range(share[2], unroll=1):
        tile, begin, end, at = segment(index, plan, share, at, cfg)
        finishes_shared = Int32(begin == 0) & Int32(end < steps)
        before = Int32(0)
        for step in cutlass.range(begin, end, unroll=1):
            if cutlass.const_expr(cfg.takes_early):
                if finishes_shared > 0:
                    if step == end - 1:
                        ptx.mbar_wait(ready, 0)
                        take_part(taken, parts, Int32(1), 0, cfg)
            for part in cutlass.range_constexpr(2 // cfg.halves):
                fresh = Int32(part == 0) & Int32(step == begin)
                at_stage = (stage, parity, before, fresh)
                multiply_stage(smem, at_stage, registers, (mma, tB), place, part, cfg)
                before = stage
                stage += 1
                if stage == cfg.stages:
                    stage = Int32(0)
                    parity = parity ^ 1
        warpgroup.wait_group(0)
        release(bars + (cfg.stages + before) * 8, lane, True, cfg)
        corner = tile_corner(tile, tiles_mn, cfg)
        if cutlass.const_expr(cfg.cluster > 1):
            finish_cluster(flat, place, plan[3] % cfg.cluster, store[3:], corner, dst, cfg)
        elif cutlass.const_expr(cfg.told):
            finish_told(flat, place, of_tile, (scratch[0], ready), corner, dst, cfg)
        elif cutlass.const_expr(cfg.parts > 1):
            finish_parts(flat, place, of_tile, scratch, corner, dst, cfg)
        else:
            if begin > 0:
                leave_part(flat, parts, left, lane, cfg)
            else:
                if finishes_shared > 0:
                    add_parts(flat, taken, parts, ready, cfg)
                if cutlass.const_expr(cfg.silu_mul):
                    write_direct(flat, place, corner, dst, cfg)
                else:
                    write_tile(flat, place, store, corner, dst, cfg)
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def share_of_work(M, blocks_n, chunks, waves, head, cfg: cutlass.Constexpr):
    """((waves, steps, blocks, me), (share's start, end, pieces), `tile_corner`'s tiles, what is
    left for shares: (tiles, head)).

    With `cast`, blocks and tiles are counted in pairs."""
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    me, blocks = block // cfg.cast, grid // cfg.cast
    steps = chunks // 2
    tiles_m = (M + cfg.block_m - 1) // cfg.block_m
    width = cfg.block_n * cfg.cast
    tiles_n = (blocks_n * 32 + width - 1) // width
    plan, tiles = (waves, steps, blocks, me), (tiles_m, tiles_n, block % cfg.cast)
    if cutlass.const_expr(cfg.split > 1):
        # blocks beyond the tiles repeat the first ones, to the same bits (tiles_model.Plan)
        tile = me // cfg.split % (tiles_m * tiles_n)
        return plan, (tile, Int32(0), Int32(1)), tiles, (Int32(0), head)
    left = tiles_m * tiles_n - waves * blocks
    first, end, count = Int32(0), Int32(0), waves
    if left > 0:
        first = schedule.start_of(me, left, blocks, steps, head)
        end = schedule.start_of(me + 1, left, blocks, steps, head)
        if end > first:
            count = waves + (end - 1) // steps - first // steps + 1
    return plan, (first, end, count), tiles, (left, head)


@cute.kernel
def matmul_kernel(
    tma: tuple, tensors: tuple, layout_act: cute.ComposedLayout, pointers: tuple, sizes: tuple,
    cfg: cutlass.Constexpr,
):  # fmt: skip
    """tma, tensors = (act, words, scales[, zeros], out); pointers = (bias, out, workspace,
    counters); sizes = (M, N, 32-output blocks, chunks of 64, whole waves, schedule.py's head,
    elements between rows of out)."""
    bias, out, workspace, counters = pointers
    M, N, blocks_n, chunks, waves, head, out_stride = sizes
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
    bars = Int32(base.toint())
    there = bars + 2 * cfg.stages * 8
    dtype = DTYPE[cfg.kind]
    # [barriers | activations | output tile | weights], each part at a multiple of 1024 or 128
    sA = cute.make_tensor(
        cute.recast_ptr(base + 1024, layout_act.inner, dtype=dtype), layout_act.outer
    )
    tile_at = 1024 + cfg.stages * cfg.act_bytes
    layout_out = cute.tile_to_shape(
        warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype),
        (cfg.block_m, 64, cfg.consumers * cfg.store_regions),
        order=(0, 1, 2),
    )
    sO = cute.make_tensor(
        cute.recast_ptr(base + tile_at, layout_out.inner, dtype=dtype), layout_out.outer
    )
    weights_at = tile_at + -(-cfg.store_bytes // 1024) * 1024
    if tid == 0:
        for i in cutlass.range_constexpr(cfg.stages):
            ptx.mbar_init(bars + i * 8, 1)
            ptx.mbar_init(bars + (cfg.stages + i) * 8, cfg.consumers * 4 * cfg.cast)
        ptx.mbar_init(there, 1)
        left, ready = meeting(bars, cfg)
        ptx.mbar_init(left, cfg.consumers * 4)
        ptx.mbar_init(ready, 1)
        ptx.mbar_fence()
        if cutlass.const_expr(cfg.cluster > 1):
            own = (cfg.fragments - block % cfg.cluster + cfg.cluster - 1) // cfg.cluster
            ptx.mbar_expect(there, own * ((cfg.cluster - 1) * 512), Int32(1))
    if warp == 0:
        cpasync.prefetch_descriptor(tma[0])
        cpasync.prefetch_descriptor(tma[-1])
    cute.arch.sync_threads()
    if cutlass.const_expr(cfg.cluster * cfg.cast > 1):
        ptx.cluster_arrive()
    ptx.launch_next_grid()

    work = share_of_work(M, blocks_n, chunks, waves, head, cfg)
    if warp >= cfg.consumers * 4:
        if cutlass.const_expr(cfg.reallocates):
            cute.arch.setmaxregister_decrease(cfg.producer_registers)
        if warp == cfg.consumers * 4:
            rows = cfg.block_n // 32
            halves = cute.tile_to_shape(
                warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype),
                (cfg.block_m // cfg.cast, 64, cfg.cast * cfg.halves * cfg.stages),
                order=(0, 1, 2),
            )
            pointer = cute.recast_ptr(base + 1024, halves.inner, dtype=dtype)
            smem = [cute.make_tensor(pointer, halves.outer)]
            offsets = (0, cfg.code_bytes, cfg.code_bytes + rows * cfg.block_scale_bytes)
            widths = (256, 32 * cfg.stage_groups, 32 * cfg.stage_groups)
            types = (cutlass.Int32, SCALE_DTYPE[cfg.scale], cutlass.Uint8)
            for i in cutlass.range_constexpr(2 if cfg.symmetric else 3):
                pitch = cfg.slot_bytes // (types[i].width // 8)
                shape, steps = cfg.stages, pitch
                if cutlass.const_expr(i == 0):
                    shape, steps = (cfg.halves, cfg.stages), (rows * 256, pitch)
                layout = cute.make_layout((rows, widths[i], shape), stride=(widths[i], 1, steps))
                pointer = cute.recast_ptr(base + weights_at + offsets[i], dtype=types[i])
                smem.append(cute.make_tensor(pointer, layout))
            copies = make_copies(tma[:-1], tensors[:-1], smem, cfg)
            produce(work, bars, copies, (workspace, counters), lane, cfg)
        if cutlass.const_expr(cfg.split == 1 and cfg.reallocates):
            if warp == cfg.consumers * 4 + 1:
                ptx.wait_previous_grid()
                assist(work, (workspace, counters), meeting(bars, cfg), lane, cfg)
        if cutlass.const_expr(cfg.cluster > 1):
            ptx.cluster_wait()
    else:
        if cutlass.const_expr(cfg.reallocates):
            cute.arch.setmaxregister_increase(cfg.consumer_registers)
        ptx.wait_previous_grid()
        if cutlass.const_expr(cfg.cluster * cfg.cast > 1):
            ptx.cluster_wait()
        op = warpgroup.MmaF16BF16Op(
            dtype,
            Float32,
            (64, cfg.block_m, 16),
            warpgroup.OperandSource.RMEM,
            warpgroup.OperandMajorMode.K,
            warpgroup.OperandMajorMode.K,
        )
        mma = cute.make_tiled_mma(cute.make_mma_atom(op))
        tB = mma.make_fragment_B(mma.get_slice(0).partition_B(sA))
        gO = cute.local_tile(tensors[-1], (cfg.block_m, 64), (None, None))
        target, source = cpasync.tma_partition(
            tma[-1], 0, cute.make_layout(1), cute.group_modes(sO, 0, 2),
            cute.group_modes(gO, 0, 2),
        )  # fmt: skip
        consume(
            work, (bars + weights_at, bars), mma, tB,
            (tma[-1], source, target, bars + tile_at, there), (bias, N, out, M, out_stride),
            (workspace, counters), (warp // 4, warp % 4, lane), cfg,
        )  # fmt: skip


@cute.jit
def launch_matmul(
    act: cute.Tensor, words: cute.Tensor, scales: cute.Tensor, zeros: cute.Tensor,
    out: cute.Tensor, bias: Int64, out_at: Int64, workspace: Int64, counters: Int64,
    waves: Int32, head: Int32, blocks: Int32, stream, cfg: cutlass.Constexpr,
):  # fmt: skip
    """Launch on a stream. act [M, K], words int32 [N / 32, 4 K], scales and zeros [N / 32, 32 R],
    out [M, N], all contiguous in their last dim; zeros is any such tensor where there are none."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, DTYPE[cfg.kind])
    layout = cute.tile_to_shape(atom, (cfg.block_m, 64, cfg.halves * cfg.stages), order=(0, 1, 2))
    rows = cfg.block_n // 32
    width = 32 * cfg.stage_groups
    plain = cute.make_layout((rows, width), stride=(width, 1))
    load = cpasync.CopyBulkTensorTileG2SOp()
    cast = cpasync.CopyBulkTensorTileG2SMulticastOp() if cfg.cast > 1 else load
    box = (cfg.block_m // cfg.cast, 64)
    parts = [
        cpasync.make_tiled_tma_atom(cast, act, cute.tile_to_shape(atom, box, order=(0, 1)), box),
        cpasync.make_tiled_tma_atom(
            load, words, cute.make_layout((rows, 256), stride=(256, 1)), (rows, 256)
        ),
        cpasync.make_tiled_tma_atom(load, scales, plain, (rows, width)),
    ]
    if cutlass.const_expr(not cfg.symmetric):
        parts.append(cpasync.make_tiled_tma_atom(load, zeros, plain, (rows, width)))
    layout_out = cute.tile_to_shape(atom, (cfg.block_m, 64), order=(0, 1))
    store = cpasync.CopyBulkTensorTileS2GOp()
    parts.append(cpasync.make_tiled_tma_atom(store, out, layout_out, (cfg.block_m, 64)))
    matmul_kernel(
        tuple(part[0] for part in parts),
        tuple(part[1] for part in parts),
        layout,
        (bias, out_at, workspace, counters),
        (
            act.shape[0], out.shape[1] * (1 + cfg.silu_mul), words.shape[0],
            words.shape[1] // 256, waves, head, Int32(out.stride[0]),
        ),
        cfg,
    ).launch(
        grid=(blocks, 1, 1),
        block=(cfg.threads, 1, 1),
        cluster=(cfg.cluster * cfg.cast, 1, 1),
        smem=cfg.smem_bytes,
        stream=stream,
        use_pdl=cfg.pdl,
        min_blocks_per_mp=cfg.blocks_per_sm,
        preferred_smem_carveout=100,
    )  # fmt: skip


def trace(config: MatmulConfig, architecture: str):
    """Compile for an architecture without a GPU; the result can be called or exported."""
    dtype = DTYPE[config.kind]
    return cute.compile(
        launch_matmul,
        fake_matrix(dtype, 8),
        fake_matrix(cutlass.Int32, 256),
        fake_matrix(SCALE_DTYPE[config.scale], 32),
        fake_matrix(cutlass.Uint8, 32),
        fake_matrix(dtype, 8),
        *[Int64(0)] * 4,
        *[Int32(1)] * 3,
        make_fake_stream(),
        config,
        options=f"--enable-tvm-ffi --gpu-arch {architecture}",
    )
