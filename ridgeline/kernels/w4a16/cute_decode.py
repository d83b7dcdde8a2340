"""W4A16 for few rows (M <= 16) on Hopper: stream the packed words once, nothing else waits.

    out[m, n] = sum_k act[m, k] * scale[n, group] * (code[n, k] - zero[n, group])  (+ bias[n])

Bound by bytes: N K / 2 of codes and 2 N R of scales. A block walks tiles of 32 outputs; its compute
warps split K among them (and among gridDim.y blocks), so each warp owns a range of inputs for the
whole launch and keeps its activations and their group sums in shared memory. Each warp has its own
ring of bulk copies (2 KiB of codes and their scales a stage) and refills it itself: between warps
there is no barrier in the loop. Partial sums go to one more warp through shared memory, which adds
them in a fixed order and writes the tile.

A code enters mma.sync (m16n8k16, weights as A) without being converted:
- bf16: the nibble becomes the low mantissa bits of 128, so the operand is 128 + q, exactly; or
  (`raw`) it stays a subnormal, q 2^-133 and 16 times that, and a warp's activations are multiplied
  by 2^64 where they lie, as they are summed;
- fp16: the nibble stays a subnormal, q 2^-24 for rows g and q 2^-20 for rows g + 8 (their nibble
  sits four bits higher and needs no shift).
The accumulator starts at -(128 + zero) (or -zero) times the group's sum of activations, and the
scale multiplies it once a group in fp32: zero points are exact and no weight is ever rounded.
With one-hot activations every step is exact, so the result is the dequantized weight, rounded once.

The ring is filled before griddepcontrol.wait, which hides launch, drain and activations behind the
previous kernel of the stream: weights must not be written by that kernel.

Order of additions: fixed by (K, warps, splits), never by M or timing.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream

from ridgeline.kernels.w4a16 import cute_ptx as ptx
from ridgeline.kernels.w4a16.cute_epilogue import write_rows
from ridgeline.kernels.w4a16.cute_ptx import DTYPE, fake_matrix
from ridgeline.kernels.w4a16.tiles import DecodeConfig

ROWS = 32
NIBBLES = 0x000F000F
NIBBLES_HIGH = 0x00F000F0
BF16_128 = 0x43004300
MAX_SLOTS = 256
ONES = {"bf16": 0x3F803F80, "f16": 0x3C003C00}
BF16_2_64 = 0x5F805F80
BF16_UNIT = 0x00010001
"""2^-133, of which a subnormal code is a multiple."""


@cute.jit
def decode_word(word, subnormal: cutlass.Constexpr):
    """The four operand registers that a word holds."""
    if cutlass.const_expr(not subnormal):
        return [
            ptx.and_or(word, NIBBLES, BF16_128),
            ptx.and_or(ptx.shift_right(word, 4), NIBBLES, BF16_128),
            ptx.and_or(ptx.shift_right(word, 8), NIBBLES, BF16_128),
            ptx.and_or(ptx.shift_right(word, 12), NIBBLES, BF16_128),
        ]
    upper = ptx.shift_right(word, 8)
    return [
        word & NIBBLES,
        word & NIBBLES_HIGH,
        upper & NIBBLES,
        upper & NIBBLES_HIGH,
    ]


@cute.jit
def group_start(sums, zeros, rt: cutlass.Constexpr, cfg: cutlass.Constexpr):
    """Accumulator that a group starts from: minus the offset of every code times the sum."""
    s0, s1 = sums
    if cutlass.const_expr(cfg.symmetric):
        if cutlass.const_expr(not cfg.subnormal):
            return [s0, s1, s0, s1]
        return [s0, s1, s0 * 16.0, s1 * 16.0]
    z_low, z_high = zeros[2 * rt], zeros[2 * rt + 1]
    return [s0 * z_low, s1 * z_low, s0 * z_high, s1 * z_high]


@cute.jit
def load_scales(address, cfg: cutlass.Constexpr):
    """A lane's four row scales as fp32, times what sums are too small by."""
    if cutlass.const_expr(cfg.scale == "f32"):
        scales = ptx.lds128f(address)
    else:
        w0, w1 = ptx.lds64(address)
        scales = ptx.widen_pair(w0, cfg.scale) + ptx.widen_pair(w1, cfg.scale)
    if cutlass.const_expr(cfg.subnormal):
        low, high = cfg.code_factors
        return [scales[0] * low, scales[1] * high, scales[2] * low, scales[3] * high]
    return scales


@cute.jit
def load_zeros(address, cfg: cutlass.Constexpr):
    """A lane's four row offsets: 128 + zero, or zero (x 16 for rows g + 8) of subnormal codes."""
    word = ptx.lds32(address)
    zeros = [Float32((word >> (8 * j)) & 0xFF) for j in range(4)]
    if cutlass.const_expr(not cfg.subnormal):
        return [z + 128.0 for z in zeros]
    return [zeros[0], zeros[1] * 16.0, zeros[2], zeros[3] * 16.0]


@cute.jit
def issue_stage(state, slot_addr, mbar, src, cfg: cutlass.Constexpr):
    """Let one thread start the copies of a stage: its codes, scales and zero points; state =
    (tile, unit) to fetch, or past the end.

    Elected, not a lane under a predicate: that becomes a loop over lanes, six instructions a copy.
    """
    tile, unit = state
    words, scales, zeros, tiles, chunks, groups = src
    if tile < tiles:
        with cute.arch.elect_one():
            ptx.mbar_expect(mbar, cfg.stage_bytes, Int32(1))
            block = Int64(tile) * chunks + unit * cfg.stage_chunks
            ptx.bulk_load(slot_addr, words + block * 1024, cfg.code_bytes, mbar, Int32(1))
            group = Int64(tile) * groups
            if cutlass.const_expr(not cfg.per_channel):
                group = group + unit * cfg.stage_groups
            at = slot_addr + cfg.code_bytes
            ptx.bulk_load(at, scales + group * cfg.scale_row, cfg.scale_bytes, mbar, Int32(1))
            if cutlass.const_expr(not cfg.symmetric):
                at = slot_addr + cfg.code_bytes + cfg.scale_bytes
                ptx.bulk_load(at, zeros + group * 32, cfg.zero_bytes, mbar, Int32(1))


@cute.jit
def load_activations(act, act_smem, pitch, mbar, lane, rows, cfg: cutlass.Constexpr):
    """Bring the warp's inputs of every row to shared memory, zeros behind the last input."""
    M, K, stride, k0, span = rows
    have = cutlass.min(cutlass.max(K - k0, 0), span)
    ptx.mbar_expect(mbar, have * 2 * M, Int32(lane == 0))
    cute.arch.sync_warp()
    if have > 0:
        with cute.arch.elect_one():
            for m in cutlass.range(0, M, 1, unroll=1):
                source = act + (Int64(m) * stride + k0) * 2
                ptx.bulk_load_kept(act_smem + m * pitch, source, have * 2, mbar, Int32(1))
    pad = (span - have) // 8
    for j in cutlass.range(lane, pad * M, 32, unroll=1):
        ptx.sts128_zero(act_smem + (j // pad) * pitch + (have + (j % pad) * 8) * 2)
    ptx.mbar_wait(mbar, 0)
    cute.arch.sync_warp()


def tile_layout(cfg, slots: int):
    """Shared-memory layout of [8 nt rows, 64 inputs, slots] in TMA's swizzle."""
    kind = warpgroup.SmemLayoutAtomKind.K_SW128
    atom = warpgroup.make_smem_layout_atom(kind, DTYPE[cfg.kind])
    return cute.tile_to_shape(atom, (8 * cfg.nt, 64, slots), order=(0, 1, 2))


@cute.jit
def partition_activations(tma, smem_base, cfg: cutlass.Constexpr):
    """(atom, tiles of the activations, slots of shared memory)."""
    atom, tensor = tma
    layout = tile_layout(cfg, MAX_SLOTS)
    pointer = cute.recast_ptr(smem_base + cfg.dynamic_offset, layout.inner, dtype=DTYPE[cfg.kind])
    slots = cute.make_tensor(pointer, layout.outer)
    tiles = cute.local_tile(tensor, (8 * cfg.nt, 64), (None, None))
    target, source = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(slots, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    return atom, source, target


@cute.jit
def load_activation_tiles(tiles, mbar, lane, span, cfg: cutlass.Constexpr):
    """Bring the warp's inputs by TMA, 64 inputs of all rows a copy; span = (first chunk, how many,
    first slot). Rows and inputs that do not exist arrive as zeros."""
    atom, source, target = tiles
    first, count, slot = span
    ptx.mbar_expect(mbar, count * cfg.act_chunk_bytes, Int32(lane == 0))
    cute.arch.sync_warp()
    bar = cute.make_ptr(cutlass.Int64, mbar, cute.AddressSpace.smem, assumed_align=8)
    for c in cutlass.range(count, unroll=1):
        cute.copy(atom, source[None, 0, first + c], target[None, slot + c], tma_bar_ptr=bar)
    ptx.mbar_wait(mbar, 0)
    cute.arch.sync_warp()


@cute.jit
def act_address(lane_base, step, cfg: cutlass.Constexpr):
    """Where a lane's ldmatrix row of the step-th 32 inputs lies."""
    if cutlass.const_expr(cfg.lean):
        return (lane_base ^ ((step & 1) * 64)) + (step >> 1) * cfg.act_chunk_bytes
    return lane_base + step * 64


@cute.jit
def sum_group(act_at, group, ones, cfg: cutlass.Constexpr):
    """Sum of a group's activations by a product with ones: two independent chains.

    With `raw` the activations are multiplied in their place."""
    chains = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
    for pair in cutlass.range_constexpr(cfg.flush_k // 32):
        at = act_address(act_at, group * (cfg.flush_k // 32) + pair, cfg)
        b = ptx.ldmatrix_x4(at)
        if cutlass.const_expr(cfg.raw):
            b = [ptx.packed_mul(x, ptx.constant(BF16_2_64), cfg.kind) for x in b]
            ptx.stmatrix_x4(at, b)
        for half in cutlass.range_constexpr(2):
            chains[half] = ptx.mma_16816(
                ones, b[2 * half], b[2 * half + 1], chains[half], cfg.kind == "bf16"
            )
    return [chains[0][e] + chains[1][e] for e in range(2)]


@cute.jit
def sum_groups(act_lane, sum_smem, lane, num_groups, cfg: cutlass.Constexpr):
    """Group sums of the warp's activations, times what `group_start` wants."""
    ones = [ptx.constant(BF16_UNIT if cfg.raw else ONES[cfg.kind])] * 4
    for group in cutlass.range(num_groups, unroll=1):
        for n in cutlass.range_constexpr(cfg.nt):
            s0, s1 = sum_group(act_lane[n], group, ones, cfg)
            where = sum_smem + (group * 8 * cfg.nt + n * 8 + 2 * (lane % 4)) * 4
            ptx.sts64f(where, [s0 * cfg.sum_factor, s1 * cfg.sum_factor], Int32(lane < 4))
    cute.arch.sync_warp()


@cute.jit
def read_stage(slot_addr, lane, cfg: cutlass.Constexpr):
    """Read a stage into registers; returns what `multiply_stage` needs."""
    words = []
    for c in cutlass.range_constexpr(cfg.stage_chunks):
        for rt in cutlass.range_constexpr(2):
            words.append(ptx.lds128(slot_addr + (c * 2 + rt) * 512 + lane * 16))
    scale_at = slot_addr + cfg.code_bytes + (lane // 4) * (cfg.scale_row // 8)
    zero_at = slot_addr + cfg.code_bytes + cfg.scale_bytes + (lane // 4) * 4
    scales, zeros = [], []
    for s in cutlass.range_constexpr(cfg.stage_groups):
        scales.append(load_scales(scale_at + s * cfg.scale_row, cfg))
        if cutlass.const_expr(not cfg.symmetric):
            zeros.append(load_zeros(zero_at + s * 32, cfg))
        else:
            zeros.append(None)
    return words, scales, zeros


@cute.jit
def multiply_stage(tot, stage, act_lane, sum_lane, unit, cfg: cutlass.Constexpr):
    """All products of a stage: per group, codes times activations, then the scale."""
    words, scales, zeros = stage
    nt = cfg.nt
    for f in cutlass.range_constexpr(cfg.stage_flushes):
        group = 0 if cfg.per_channel else f
        base = unit * cfg.stage_flushes + f
        sums = [ptx.lds64f(sum_lane + (base * 8 * nt + n * 8) * 4) for n in range(nt)]
        acc = [[group_start(sums[n], zeros[group], rt, cfg) for n in range(nt)] for rt in range(2)]
        for pair in cutlass.range_constexpr(cfg.flush_k // 32):
            at = base * (cfg.flush_k // 32) + pair
            b = [ptx.ldmatrix_x4(act_address(act_lane[n], at, cfg)) for n in range(nt)]
            for half in cutlass.range_constexpr(2):
                step = f * (cfg.flush_k // 16) + pair * 2 + half
                for rt in cutlass.range_constexpr(2):
                    a = decode_word(words[(step // 4) * 2 + rt][step % 4], cfg.subnormal)
                    for n in cutlass.range_constexpr(nt):
                        acc[rt][n] = ptx.mma_16816(
                            a, b[n][2 * half], b[n][2 * half + 1], acc[rt][n], cfg.kind == "bf16"
                        )
        for rt in cutlass.range_constexpr(2):
            low, high = scales[group][2 * rt], scales[group][2 * rt + 1]
            for n in cutlass.range_constexpr(nt):
                at = (rt * nt + n) * 4
                tot[at] = tot[at] + low * acc[rt][n][0]
                tot[at + 1] = tot[at + 1] + low * acc[rt][n][1]
                tot[at + 2] = tot[at + 2] + high * acc[rt][n][2]
                tot[at + 3] = tot[at + 3] + high * acc[rt][n][3]


@cute.jit
def write_fragment(values, f: cutlass.Constexpr, tile, lane, dst, cfg: cutlass.Constexpr):
    """Bias, rounding and the store of one 16 x 8 fragment."""
    out, bias, M, N, stride = dst
    block = tile * 2 + f // cfg.nt
    m = (f % cfg.nt) * 8 + 2 * (lane % 4)
    write_rows(values, block * 16, lane, m, (out, bias, M, N, stride), cfg)


@cute.jit
def combine_splits(src, tile, lane, dst, num_splits, cfg: cutlass.Constexpr):
    """Add the partial sums of all splits in order, and write the tile."""
    frags = 2 * cfg.nt
    total = cute.make_rmem_tensor((4 * frags,), Float32)
    for j in cutlass.range_constexpr(4 * frags):
        total[j] = Float32(0.0)
    for s in cutlass.range(num_splits, unroll=2):
        parts = [ptx.ldg128f(src + (s * frags + f) * 512) for f in range(frags)]
        for f in cutlass.range_constexpr(frags):
            for j in cutlass.range_constexpr(4):
                total[4 * f + j] = total[4 * f + j] + parts[f][j]
    for f in cutlass.range_constexpr(frags):
        write_fragment([total[4 * f + j] for j in range(4)], f, tile, lane, dst, cfg)


@cute.jit
def exchange_halves(sums, rank, meet, tile, lane, dst, cfg: cutlass.Constexpr):
    """Send the cluster's other block its fragments (every second), take ours from it, write them;
    meet = (where they come to, the barrier that counts them, its phase).

    Two places a reducer are enough: the other block sends a tile's sums after it has ours of the
    tile before, and we sent those when the one before that was read."""
    at, there, phase = meet
    for f in cutlass.range_constexpr(2 * cfg.nt):
        if f % 2 != rank:
            ptx.sts128f_async(at + f // 2 * 512 + lane * 16, there, 1 - rank, sums[f])
    ptx.mbar_expect(there, cfg.nt * 512, Int32(lane == 0))
    ptx.mbar_wait(there, phase)
    for f in cutlass.range_constexpr(2 * cfg.nt):
        if f % 2 == rank:
            other = ptx.lds128f(at + f // 2 * 512 + lane * 16)
            both = [sums[f][e] + other[e] for e in range(4)]
            write_fragment(both, f, tile, lane, dst, cfg)
    cute.arch.sync_warp()


@cute.jit
def reduce_tile(tile, red, empty, lane, dst, split, meet, cfg: cutlass.Constexpr):
    """Add the warps' partial sums in order; with splits, the last block to arrive adds theirs, or
    (a cluster) each block half."""
    workspace, counters, num_splits = split
    _, rank, _ = cute.arch.block_idx()
    frags = 2 * cfg.nt
    sums = []
    for f in cutlass.range_constexpr(frags):
        total = ptx.lds128f(red + f * 512 + lane * 16)
        for w in cutlass.range_constexpr(1, cfg.warps):
            part = ptx.lds128f(red + (w * frags + f) * 512 + lane * 16)
            total = [total[j] + part[j] for j in range(4)]
        sums.append(total)
    cute.arch.sync_warp()
    ptx.mbar_arrive(empty, Int32(lane == 0))
    if cutlass.const_expr(cfg.cluster > 1):
        exchange_halves(sums, rank, meet, tile, lane, dst, cfg)
    elif num_splits == 1:
        for f in cutlass.range_constexpr(frags):
            write_fragment(sums[f], f, tile, lane, dst, cfg)
    else:
        base = workspace + Int64(tile) * num_splits * (frags * 512) + lane * 16
        for f in cutlass.range_constexpr(frags):
            ptx.stg128f(base + (rank * frags + f) * 512, sums[f])
        cute.arch.sync_warp()
        old = ptx.arrive_counter(counters + Int64(tile) * 4, num_splits - 1, Int32(lane == 0))
        old = cute.arch.shuffle_sync(old, 0)
        cute.arch.sync_warp()
        if old == num_splits - 1:
            combine_splits(base, tile, lane, dst, num_splits, cfg)


@cute.kernel
def decode_kernel(
    tma: tuple, pointers: tuple, sizes: tuple, strides: tuple, smem_plan: tuple,
    cfg: cutlass.Constexpr,
):  # fmt: skip
    """tma = (atom, tensor) of the activations if lean, else ().

    pointers = (words, scales, zeros, act, out, bias, workspace, counters); sizes = (M, N, K, tiles,
    chunks, groups); strides = (act, out) in elements; smem_plan = (bytes between rows of
    activations, most stages of K a warp).
    """
    words, scales, zeros, act, out, bias, workspace, counters = pointers
    M, N, K, tiles, chunks, groups = sizes
    act_stride, out_stride = strides
    pitch, max_units = smem_plan
    tid, _, _ = cute.arch.thread_idx()
    first, rank, _ = cute.arch.block_idx()
    step, num_splits, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32

    smem_base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
    smem = Int32(smem_base.toint())
    ring_bar, full, empty, act_bar = cfg.barrier_offsets()
    if tid == 0:
        for i in cutlass.range_constexpr(cfg.warps * cfg.stages):
            ptx.mbar_init(smem + ring_bar + i * 8, 1)
        for i in cutlass.range_constexpr(cfg.warps):
            ptx.mbar_init(smem + act_bar + i * 8, 1)
        for i in cutlass.range_constexpr(cfg.full_barriers):
            ptx.mbar_init(smem + full + i * 8, cfg.warps)
        for i in cutlass.range_constexpr(cfg.red_buffers):
            ptx.mbar_init(smem + empty + i * 8, 1)
        if cutlass.const_expr(cfg.cluster > 1):
            for i in cutlass.range_constexpr(2 * cfg.reducers):
                ptx.mbar_init(smem + cfg.there_offset + i * 8, 1)
        ptx.mbar_fence()
    cute.arch.sync_threads()
    if cutlass.const_expr(cfg.cluster > 1):
        ptx.cluster_arrive()
    ptx.launch_next_grid()

    red = smem + cfg.red_offset
    num_tiles = (tiles - first + step - 1) // step
    if warp >= cfg.warps:
        ptx.wait_previous_grid()
        if cutlass.const_expr(cfg.cluster > 1):
            ptx.cluster_wait()
        dst = (out, bias, M, N, out_stride)
        split = (workspace, counters, num_splits)
        for j in cutlass.range(warp - cfg.warps, num_tiles, cfg.reducers, unroll=1):
            # A barrier is waited on by one warp only: a parity says nothing two phases ahead.
            turn = (j // cfg.full_barriers) % 2
            ptx.mbar_wait(smem + full + (j % cfg.full_barriers) * 8, turn)
            buf = j % cfg.red_buffers
            sums = red + buf * cfg.red_bytes
            use = j // cfg.reducers
            place = (warp - cfg.warps) * 2 + use % 2
            received = smem + cfg.received_offset + place * (cfg.nt * 512)
            meet = (received, smem + cfg.there_offset + place * 8, use // 2 % 2)
            tile = first + j * step
            reduce_tile(tile, sums, smem + empty + buf * 8, lane, dst, split, meet, cfg)
    else:
        units = chunks // cfg.stage_chunks
        workers = num_splits * cfg.warps
        me = rank * cfg.warps + warp
        unit0 = (me * units) // workers
        count = ((me + 1) * units) // workers - unit0
        ring = smem + cfg.ring_offset + warp * (cfg.stages * cfg.slot_bytes)
        bars = smem + ring_bar + warp * (cfg.stages * 8)
        src = (words, scales, zeros, tiles, chunks, groups)
        # what to fetch next; tile runs past `tiles` at the end
        fetch_tile, fetch_unit = first, Int32(0)
        if count == 0:
            fetch_tile = tiles
        for i in cutlass.range_constexpr(cfg.stages):
            issue_stage(
                (fetch_tile, unit0 + fetch_unit),
                ring + i * cfg.slot_bytes,
                bars + i * 8,
                src,
                cfg,
            )
            fetch_unit += 1
            if fetch_unit >= count:
                fetch_unit = Int32(0)
                fetch_tile += step
        if cutlass.const_expr(cfg.lean):
            cpasync.prefetch_descriptor(tma[0])
        ptx.wait_previous_grid()
        dynamic = smem + cfg.dynamic_offset
        act_mbar = smem + act_bar + warp * 8
        if cutlass.const_expr(cfg.lean):
            per_warp = max_units * cfg.stage_chunks
            span = (unit0 * cfg.stage_chunks, count * cfg.stage_chunks, warp * per_warp)
            act_tiles = partition_activations(tma, smem_base, cfg)
            load_activation_tiles(act_tiles, act_mbar, lane, span, cfg)
            act_smem = dynamic + warp * per_warp * cfg.act_chunk_bytes
            sum_smem = dynamic + cfg.warps * per_warp * cfg.act_chunk_bytes
            swizzled = (lane % 8) * 128 + ((lane // 8) ^ (lane % 8)) * 16
            act_lane = [act_smem + n * 1024 + swizzled for n in range(cfg.nt)]
        else:
            sum_smem = dynamic
            act_smem = dynamic + cfg.warps * (max_units * cfg.unit_sum_bytes) + warp * M * pitch
            rows = (M, K, act_stride, unit0 * cfg.stage_k, count * cfg.stage_k)
            load_activations(act, act_smem, pitch, act_mbar, lane, rows, cfg)
            act_lane = [
                act_smem + cutlass.min(n * 8 + lane % 8, M - 1) * pitch + (lane // 8) * 16
                for n in range(cfg.nt)
            ]
        sum_smem = sum_smem + warp * (max_units * cfg.unit_sum_bytes)
        sum_groups(act_lane, sum_smem, lane, count * cfg.stage_flushes, cfg)
        sum_lane = sum_smem + (lane % 4) * 8

        tot = cute.make_rmem_tensor((8 * cfg.nt,), Float32)
        slot, phase = Int32(0), Int32(0)
        for j in cutlass.range(num_tiles, unroll=1):
            for i in cutlass.range_constexpr(8 * cfg.nt):
                tot[i] = Float32(0.0)
            for unit in cutlass.range(count, unroll=1):
                ptx.mbar_wait(bars + slot * 8, phase)
                stage = read_stage(ring + slot * cfg.slot_bytes, lane, cfg)
                cute.arch.sync_warp()
                issue_stage(
                    (fetch_tile, unit0 + fetch_unit),
                    ring + slot * cfg.slot_bytes,
                    bars + slot * 8,
                    src,
                    cfg,
                )
                fetch_unit += 1
                if fetch_unit >= count:
                    fetch_unit = Int32(0)
                    fetch_tile += step
                slot += 1
                if slot == cfg.stages:
                    slot = Int32(0)
                    phase = phase ^ 1
                multiply_stage(tot, stage, act_lane, sum_lane, unit, cfg)
            buf = j % cfg.red_buffers
            parity = (j // cfg.red_buffers) % 2
            ptx.mbar_wait(smem + empty + buf * 8, parity ^ 1)
            mine = red + buf * cfg.red_bytes + warp * (2 * cfg.nt * 512) + lane * 16
            for f in cutlass.range_constexpr(2 * cfg.nt):
                ptx.sts128f(mine + f * 512, [tot[4 * f + e] for e in range(4)])
            cute.arch.sync_warp()
            ptx.mbar_arrive(smem + full + (j % cfg.full_barriers) * 8, Int32(lane == 0))


@cute.jit
def launch_decode(
    words: Int64,
    scales: Int64,
    zeros: Int64,
    act: Int64,
    out: Int64,
    bias: Int64,
    workspace: Int64,
    counters: Int64,
    M: Int32,
    N: Int32,
    K: Int32,
    tiles: Int32,
    chunks: Int32,
    groups: Int32,
    act_stride: Int32,
    out_stride: Int32,
    pitch: Int32,
    max_units: Int32,
    blocks: Int32,
    splits: Int32,
    rows,
    stream,
    cfg: cutlass.Constexpr,
):
    """Launch on a stream; arguments are device addresses and sizes, and the activations [M, K] as
    a tensor if lean (else None)."""
    tma = ()
    if cutlass.const_expr(cfg.lean):
        one = cute.slice_(tile_layout(cfg, 1), (None, None, 0))
        load = cpasync.CopyBulkTensorTileG2SOp()
        part = cpasync.make_tiled_tma_atom(load, rows, one, (8 * cfg.nt, 64))
        tma = (part[0], part[1])
    decode_kernel(
        tma,
        (words, scales, zeros, act, out, bias, workspace, counters),
        (M, N, K, tiles, chunks, groups),
        (act_stride, out_stride),
        (pitch, max_units),
        cfg,
    ).launch(
        grid=(blocks, splits, 1),
        block=((cfg.warps + cfg.reducers) * 32, 1, 1),
        cluster=(1, cfg.cluster, 1),
        smem=cfg.smem_bytes,
        stream=stream,
        use_pdl=cfg.pdl,
        min_blocks_per_mp=cfg.blocks_per_sm,
        preferred_smem_carveout=100,
    )


def trace(config: DecodeConfig, architecture: str):
    """Compile for an architecture without a GPU; the result can be called or exported."""
    return cute.compile(
        launch_decode,
        *[Int64(0)] * 8,
        *[Int32(1)] * 12,
        fake_matrix(DTYPE[config.kind], 8) if config.lean else None,
        make_fake_stream(),
        config,
        options=f"--enable-tvm-ffi --gpu-arch {architecture}",
    )
