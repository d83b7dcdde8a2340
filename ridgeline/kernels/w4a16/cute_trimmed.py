"""W4A16 on Hopper for 256 rows where tiles of two units do not fill the multiprocessors.

    out[m, n] = sum_k act[m, k] * round(scale[n, g(k)] * (code[n, k] - 8))  (+ bias[n])

A unit is 64 outputs, what a WGMMA has. 112 tiles of two units and all rows (14336 outputs) leave 20
of 132 multiprocessors idle; cut along K they fill all, but a part's way through memory costs as
much as is won. Here the second unit of each tile is trimmed to three quarters of the rows, and the
last quarter of six tiles' second units is one block's work on a multiprocessor that was left:
7/8 of the time at the tensor cores, no sums between blocks, every weight of a trimmed unit decoded
twice. (At 128 rows it loses, 31.6 us for 23.1: a product of 32 rows takes as long as one of 64.)

Whole units are the first half of the outputs, trimmed ones the second: block t < tiles computes
units t and tiles + t, block tiles + y the last quarter of the rows of units tiles + 6 y to
tiles + 6 y + 5. The loop over stages and the way of the sums out are those of cute_matmul.py; a
block of three quarters and one of quarters are the same code with other constants (tiles_trimmed).

Bytes to a multiprocessor a step of 128 inputs at 256 rows: 64 KB of activations and 8 of codes, or
16 and 24. Bound by the tensor cores, and in the blocks of six units by the making of operands.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream

from ridgeline.kernels.w4a16 import cute_ptx as ptx
from ridgeline.kernels.w4a16.cute_matmul import (
    SCALE_DTYPE,
    load_activations,
    make_registers,
    multiply_stage,
    release,
    scale_column,
    write_tile,
)
from ridgeline.kernels.w4a16.cute_ptx import DTYPE, fake_matrix
from ridgeline.kernels.w4a16.tiles_trimmed import REST_UNITS, TrimmedConfig

UNIT = 64


def swizzled(kind: str, rows: int, slots: int, pitch: int):
    """Shared-memory layout of [rows, 64 inputs, slots] in TMA's swizzle, slots `pitch` rows
    apart."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, DTYPE[kind])
    shape = ((8, rows // 8), (64, 1), (1, slots))
    stride = ((64, 512), (1, 0), (0, pitch * 64))
    return cute.make_composed_layout(atom.inner, 0, cute.make_layout(shape, stride=stride))


@cute.jit
def partition(tma, source, target):
    """(atom, tiles of global memory, places of shared memory)."""
    into, tiles = cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(source, 0, 2)
    )
    return tma, tiles, into


@cute.jit
def make_copies(tma, tensors, base, cfg: cutlass.Constexpr):
    """Activations, codes and scales, partitioned into stages; codes and scales unit by unit."""
    units, groups = cfg.block_n // UNIT, 32 * cfg.stage_groups
    weights_at = 1024 + cfg.stages * cfg.act_bytes + -(-cfg.store_bytes // 1024) * 1024
    layout = swizzled(cfg.kind, cfg.block_m, cfg.halves * cfg.stages, cfg.block_m)
    pointer = cute.recast_ptr(base + 1024, layout.inner, dtype=DTYPE[cfg.kind])
    act = cute.make_tensor(pointer, layout.outer)
    out = [partition(tma[0], cute.local_tile(tensors[0], (cfg.block_m, 64), (None, None)), act)]
    shape = (2, 256, (units, cfg.halves, cfg.stages))
    stride = (256, 1, (512, units * 512, cfg.slot_bytes // 4))
    pointer = cute.recast_ptr(base + weights_at, dtype=cutlass.Int32)
    words = cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
    out.append(partition(tma[1], cute.local_tile(tensors[1], (2, 256), (None, None)), words))
    dtype = SCALE_DTYPE[cfg.scale]
    shape = (2, groups, (units, cfg.stages))
    stride = (groups, 1, (2 * groups, cfg.slot_bytes // (dtype.width // 8)))
    pointer = cute.recast_ptr(base + (weights_at + cfg.code_bytes), dtype=dtype)
    scales = cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
    out.append(partition(tma[2], cute.local_tile(tensors[2], (2, groups), (None, None)), scales))
    return out


@cute.jit
def load_units(copies, first, apart, where, lane, cfg: cutlass.Constexpr):
    """Announce a stage's bytes and start its weights' copies, of units from `first` on that lie
    `apart`; where = (step in stages, stage, barrier)."""
    step, stage, full = where
    units = cfg.block_n // UNIT
    ptx.mbar_expect(full, cfg.act_bytes + cfg.stage_bytes, Int32(lane == 0))
    cute.arch.sync_warp()
    bar = cute.make_ptr(cutlass.Int64, full, cute.AddressSpace.smem, assumed_align=8)
    column = scale_column(step, cfg)
    for u in cutlass.range_constexpr(units):
        unit = first + u * apart
        atom, source, target = copies[1]
        for half in cutlass.range_constexpr(cfg.halves):
            at = u + units * (cfg.halves * stage + half)
            cute.copy(
                atom, source[None, unit, cfg.halves * step + half], target[None, at],
                tma_bar_ptr=bar,
            )  # fmt: skip
        atom, source, target = copies[2]
        cute.copy(
            atom, source[None, unit, column], target[None, u + units * stage], tma_bar_ptr=bar
        )


@cute.jit
def produce(copies, units, row0, sizes, bars, lane, cfg: cutlass.Constexpr):
    """The producer warp: all stages; weights of the first before the previous kernel has ended.

    units = (the first, how far apart); sizes = (stages of K in all)."""
    first, apart = units
    early = cutlass.min(Int32(cfg.stages), sizes)
    for i in cutlass.range(early, unroll=1):
        load_units(copies, first, apart, (i, i, bars + i * 8), lane, cfg)
    ptx.wait_previous_grid()
    stage, parity = Int32(0), Int32(1)
    for step in cutlass.range(sizes, unroll=1):
        full = bars + stage * 8
        if step >= cfg.stages:
            ptx.mbar_wait(bars + (cfg.stages + stage) * 8, parity)
            load_units(copies, first, apart, (step, stage, full), lane, cfg)
        load_activations(copies, row0, step, stage, full, 0, cfg)
        stage += 1
        if stage == cfg.stages:
            stage = Int32(0)
            parity = parity ^ 1


@cute.jit
def consume(steps, smem, tma_out, corner, dst, place, cfg: cutlass.Constexpr):
    """A consumer warpgroup: its units' products, then their way out; smem = (its start as a
    pointer, barriers, rows of a stage of activations, where its output lies and its region)."""
    base, bars, pitch, tile_at = smem
    dtype = DTYPE[cfg.kind]
    op = warpgroup.MmaF16BF16Op(
        dtype,
        Float32,
        (UNIT, cfg.block_m, 16),
        warpgroup.OperandSource.RMEM,
        warpgroup.OperandMajorMode.K,
        warpgroup.OperandMajorMode.K,
    )
    mma = cute.make_tiled_mma(cute.make_mma_atom(op))
    layout = swizzled(cfg.kind, cfg.block_m, cfg.halves * cfg.stages, pitch)
    act = cute.make_tensor(cute.recast_ptr(base + 1024, layout.inner, dtype=dtype), layout.outer)
    tB = mma.make_fragment_B(mma.get_slice(0).partition_B(act))
    regions = cfg.consumers * cfg.store_regions
    layout = swizzled(cfg.kind, cfg.block_m, regions, cfg.block_m)
    there = cute.make_tensor(
        cute.recast_ptr(base + tile_at, layout.inner, dtype=dtype), layout.outer
    )
    atom, out = tma_out
    tiles = cute.local_tile(out, (cfg.block_m, UNIT), (None, None))
    _, source, target = partition(atom, tiles, there)
    # where this block's weights start: behind activations and output of its kind
    weights_smem = bars + 1024 + cfg.stages * pitch * 128 * cfg.halves + smem_store(cfg, pitch)
    registers = make_registers(mma, cfg)
    stage, parity, before = Int32(0), Int32(0), Int32(0)
    for step in cutlass.range(steps, unroll=1):
        for part in cutlass.range_constexpr(2 // cfg.halves):
            fresh = Int32(part == 0) & Int32(step == 0)
            at = (stage, parity, before, fresh)
            multiply_stage((weights_smem, bars), at, registers, (mma, tB), place, part, cfg)
            before = stage
            stage += 1
            if stage == cfg.stages:
                stage = Int32(0)
                parity = parity ^ 1
    warpgroup.wait_group(0)
    for mi in cutlass.range_constexpr(cfg.row_mmas):
        for i in cutlass.range_constexpr(cfg.block_m // 2):
            registers[1][mi][i] = ptx.settled(registers[1][mi][i])
    release(bars + (cfg.stages + before) * 8, place[2], True, cfg)
    store = (atom, source, target, bars + tile_at)
    write_tile(registers[1], place, store, corner, dst, cfg)
    cute.arch.cp_async_bulk_wait_group(0, read=True)


def smem_store(cfg, pitch: int) -> int:
    """Shared memory of a block's output, of whole units where `pitch` is more than cfg.block_m."""
    bytes_there = cfg.consumers * cfg.store_regions * pitch * 128
    return -(-bytes_there // 1024) * 1024


@cute.jit
def prologue(bars, tid, cfg: cutlass.Constexpr):
    """Barriers; then the next kernel may start."""
    if tid == 0:
        for i in cutlass.range_constexpr(cfg.stages):
            ptx.mbar_init(bars + i * 8, 1)
            ptx.mbar_init(bars + (cfg.stages + i) * 8, cfg.consumers * 4)
        ptx.mbar_fence()
    cute.arch.sync_threads()
    ptx.launch_next_grid()


@cute.kernel
def trimmed_kernel(
    tma: tuple, tensors: tuple, pointers: tuple, sizes: tuple, cfg: cutlass.Constexpr
):
    """tma, tensors = (act, act of the rest, words, scales, out of whole units, of trimmed ones, of
    the rest); pointers = (bias, out); sizes = (M, N, tiles, chunks, elements between rows)."""
    bias, out = pointers
    M, N, tiles, chunks, out_stride = sizes
    tid, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    lane = tid % 32
    base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=1024)
    bars = Int32(base.toint())
    dst = (bias, N, out, M, out_stride)
    place = (warp // 4, warp % 4, lane)
    whole, trimmed, rest = cfg.whole, cfg.trimmed, cfg.rest
    per_step = 2 // whole.halves
    steps = chunks // 2
    if warp == 0:
        cpasync.prefetch_descriptor(tma[2])
    if block < tiles:
        prologue(bars, tid, whole)
        if warp >= 8:
            cute.arch.setmaxregister_decrease(whole.producer_registers)
            if warp == 8:
                four = (tma[0], tma[2], tma[3]), (tensors[0], tensors[2], tensors[3])
                copies = make_copies(*four, base, whole)
                produce(copies, (block, tiles), Int32(0), steps * per_step, bars, lane, whole)
        else:
            cute.arch.setmaxregister_increase(whole.consumer_registers)
            ptx.wait_previous_grid()
            tile_at = 1024 + whole.stages * whole.act_bytes
            if warp < 4:
                corner = (Int32(0), block * UNIT)
                smem = (base, bars, whole.block_m, tile_at)
                consume(steps, smem, (tma[4], tensors[4]), corner, dst, place, whole)
            else:
                # its region lies where a whole unit's would: behind the first warpgroup's
                shift = (whole.block_m - trimmed.block_m) * 128
                corner = (Int32(0), (tiles + block - 1) * UNIT)
                smem = (base, bars, whole.block_m, tile_at + shift)
                consume(steps, smem, (tma[5], tensors[5]), corner, dst, place, trimmed)
    else:
        prologue(bars, tid, rest)
        first = tiles + (block - tiles) * REST_UNITS
        row0 = Int32(3 * rest.block_m)
        if warp >= 8:
            cute.arch.setmaxregister_decrease(rest.producer_registers)
            if warp == 8:
                four = (tma[1], tma[2], tma[3]), (tensors[1], tensors[2], tensors[3])
                copies = make_copies(*four, base, rest)
                produce(copies, (first, Int32(1)), row0, steps * per_step, bars, lane, rest)
        else:
            cute.arch.setmaxregister_increase(rest.consumer_registers)
            ptx.wait_previous_grid()
            corner = (row0, first * UNIT)
            smem = (base, bars, rest.block_m, 1024 + rest.stages * rest.act_bytes)
            consume(steps, smem, (tma[6], tensors[6]), corner, dst, place, rest)


@cute.jit
def launch_trimmed(
    act: cute.Tensor, words: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, bias: Int64,
    out_at: Int64, tiles: Int32, blocks: Int32, stream, cfg: cutlass.Constexpr,
):  # fmt: skip
    """Launch on a stream. act [M, K], words int32 [N / 32, 4 K], scales [N / 32, 32 R], out [M, N],
    all contiguous in their last dim; `tiles` of two units, `blocks` in all."""
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    whole, trimmed, rest = cfg.whole, cfg.trimmed, cfg.rest
    width = 32 * whole.stage_groups
    parts = []
    for tile in (whole, rest):
        box = cute.slice_(swizzled(cfg.kind, tile.block_m, 1, 1), (None, None, 0))
        parts.append(cpasync.make_tiled_tma_atom(load, act, box, (tile.block_m, 64)))
    plain = cute.make_layout((2, 256), stride=(256, 1))
    parts.append(cpasync.make_tiled_tma_atom(load, words, plain, (2, 256)))
    plain = cute.make_layout((2, width), stride=(width, 1))
    parts.append(cpasync.make_tiled_tma_atom(load, scales, plain, (2, width)))
    for tile in (whole, trimmed, rest):
        box = cute.slice_(swizzled(cfg.kind, tile.block_m, 1, 1), (None, None, 0))
        parts.append(cpasync.make_tiled_tma_atom(store, out, box, (tile.block_m, 64)))
    trimmed_kernel(
        tuple(part[0] for part in parts),
        tuple(part[1] for part in parts),
        (bias, out_at),
        (act.shape[0], out.shape[1], tiles, words.shape[1] // 256, Int32(out.stride[0])),
        cfg,
    ).launch(
        grid=(blocks, 1, 1),
        block=(384, 1, 1),
        smem=cfg.smem_bytes,
        stream=stream,
        use_pdl=cfg.pdl,
        min_blocks_per_mp=1,
        preferred_smem_carveout=100,
    )


def trace(config: TrimmedConfig, architecture: str):
    """Compile for an architecture without a GPU; the result can be called or exported."""
    dtype = DTYPE[config.kind]
    return cute.compile(
        launch_trimmed,
        fake_matrix(dtype, 8),
        fake_matrix(cutlass.Int32, 256),
        fake_matrix(SCALE_DTYPE[config.scale], 32),
        fake_matrix(dtype, 8),
        *[Int64(0)] * 2,
        *[Int32(1)] * 2,
        make_fake_stream(),
        config,
        options=f"--enable-tvm-ffi --gpu-arch {architecture}",
    )
