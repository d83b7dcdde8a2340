"""Tile configs of the W4A16 GPU kernels: pure functions of the layer, the rows and the device."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.kernels.w4a16.schedule import head_steps
from ridgeline.kernels.w4a16.tiles import (
    KIND,
    SCALE_KIND,
    DecodeConfig,
    MatmulConfig,
)
from ridgeline.kernels.w4a16.tiles_model import MATMUL_TILES, Plan, Tile, tile_of
from ridgeline.kernels.w4a16.tiles_stream import StreamConfig
from ridgeline.kernels.w4a16.tiles_trimmed import REST_UNITS, TrimmedConfig

if TYPE_CHECKING:
    import torch

    from ridgeline.core.arch import Arch
    from ridgeline.kernels.w4a16.layout import PackedW4
    from ridgeline.kernels.w4a16.problem import W4A16Problem

DECODE_ROWS = 16
"""Most rows of the decode kernel; above 8 on large layers, and above it on all, WGMMA is faster."""
_DECODE_BYTES = 60e6
"""Codes of a layer from which WGMMA is faster above 8 rows: 36.4 us for 37.9 at (8192, 28672)."""


def uses_decode(m: int, n: int, k: int) -> bool:
    """Whether m rows of a layer go through the decode kernel (without batch invariance)."""
    if m > 8 and (k, n, DECODE_ROWS) in _MEASURED:
        return False
    return m <= 8 or (m <= DECODE_ROWS and n * k / 2 < _DECODE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a kernel is compiled for, besides its tile."""

    kind: str
    scale: str
    symmetric: bool
    packed_group: int
    """0 for one scale along K."""
    silu_mul: bool = False
    """Rows g are gates, rows g + 8 ups: the output is silu(gate) * up."""


def traits_of(packed: PackedW4, dtype: torch.dtype, silu_mul: bool = False) -> Traits:
    """Traits of a packed weight under activations of a dtype."""
    return Traits(
        kind=KIND[str(dtype).removeprefix("torch.")],
        scale=SCALE_KIND[str(packed.scale_TRgj.dtype).removeprefix("torch.")],
        symmetric=packed.symmetric,
        packed_group=0 if packed.per_channel else packed.packed_group,
        silu_mul=silu_mul,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLaunch:
    """A decode kernel and how it is launched."""

    config: DecodeConfig
    blocks: int
    """Along the outputs; times `splits` along K."""
    splits: int
    max_units: int
    """Most stages of K that a warp owns."""
    workspace_floats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLaunch:
    """A kernel with clusters along K and how it is launched."""

    config: StreamConfig
    columns: int
    """Blocks along the outputs (the first ones again where there are more than outputs want); times
    `config.cluster` along K."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulLaunch:
    """A WGMMA kernel and how it is launched."""

    config: MatmulConfig
    waves: int
    """Whole tiles a block computes; the rest is shared along K."""
    head: int
    """schedule.py: steps of K that a block which finishes a shared tile has more than others."""
    blocks: int
    workspace_floats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedLaunch:
    """A kernel of trimmed tiles and how it is launched."""

    config: TrimmedConfig
    tiles: int
    """Blocks of two units; the others compute what is trimmed of theirs."""
    blocks: int


Launch = DecodeLaunch | StreamLaunch | MatmulLaunch | TrimmedLaunch


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonConfig:
    """Tile of the portable kernel."""

    block_m: int
    block_r: int
    """Word rows: two outputs each."""
    block_c: int
    """Word columns: four inputs each, 32 at most (128 slots, the multiple K is padded to)."""
    splits: int
    num_warps: int
    num_stages: int


def triton_config(m: int, n: int, k: int, packed_group: int, invariant: bool) -> TritonConfig:
    """Tile for m rows of a layer with padded n and k; with `invariant`, one for every m."""
    rows = 16 if invariant or m <= 16 else 32 if m <= 32 else 64
    splits = 1
    if rows == 16:
        # enough blocks for a large GPU: some 256 of 64 outputs
        while splits < 8 and (n // 64) * splits < 256 and k // (128 * splits * 2) >= 4:
            splits *= 2
    wide = rows == 64
    return TritonConfig(
        block_m=rows,
        block_r=64 if wide else 32,
        block_c=32 if packed_group >= 128 else 16,
        splits=splits,
        num_warps=8 if wide else 4,
        num_stages=3,
    )


# (warps, stages, blocks an SM, buffers of sums, reducers, cycles that splitting K costs), tuned on
# an H200: few rows of small layers, few rows, 9 to 16 rows.
_DECODE_SMALL = (8, 2, 2, 2, 4, 600)
_DECODE_FEW = (16, 2, 1, 1, 4, 2000)
_DECODE_MORE = (8, 3, 1, 2, 4, 0)
_SMALL_LAYER_BYTES = 12e6
_SMEM_BYTES = {1: 226 * 1024, 2: 113 * 1024, 3: 75 * 1024, 4: 56 * 1024}
_STREAM_BYTES_PER_CYCLE = 18.0
"""An SM's share of the bandwidth of an H200's memory at 1.75 GHz."""
_L2_BYTES_PER_CYCLE = 40.0
_SPLIT_TILE_CYCLES = 4500
"""Latency of handing a tile's sums to another block, a reducer."""


def prefers_lean(rows: int, n: int, k: int) -> bool:
    """Whether the decode kernel brings activations by TMA (DecodeConfig.lean) or row by row.

    One H200, microseconds lean / by rows: (8192, 28672) 33.5 / 31.9 at one row, 32.9 / 34.7 at 8;
    (4096, 4096) 5.82 / 5.11 at one row, 5.60 / 5.52 at 4: TMA fills missing rows slowly.
    """
    return rows > 4


@functools.cache
def decode_launch(
    traits: Traits, m: int, n: int, k: int, sms: int, invariant: bool, lean: bool | None = None
) -> DecodeLaunch:
    """Kernel and grid for m <= 16 rows of a layer with padded n and k.

    Chooses the split of K that a model of the memory stream, the activations' loads and the
    splits' latency finds fastest. With `invariant` nothing depends on m.
    """
    rows = DECODE_ROWS if invariant else m
    lean = prefers_lean(rows, n, k) if lean is None else lean
    few = _DECODE_SMALL if n * k / 2 < _SMALL_LAYER_BYTES else _DECODE_FEW
    tile = few if rows <= 8 else _DECODE_MORE
    cut = _MEASURED_SPLITS.get((k, n, 8 if rows <= 8 else 16))
    if cut is not None and sms == _MEASURED_SMS and not invariant:
        launch = _decode_candidate(traits, rows, n, k, sms, (*tile, lean), tile[1], cut)
        if launch is not None:
            return launch
    found = []
    for stages in range(tile[1], 0, -1):
        for splits in (1, 2, 4, 8, 16, 32, 64):
            asked = (*tile, lean)
            launch = _decode_candidate(traits, rows, n, k, sms, asked, stages, (splits, 1))
            if launch is not None:
                found.append((_decode_cycles(launch, rows, n, k, tile[5]), splits, launch))
        if found:
            return min(found, key=lambda entry: entry[:2])[2]
    raise AssertionError("w4a16: a stage and a row of activations always fit")


def _decode_candidate(
    traits: Traits, m: int, n: int, k: int, sms: int, tile: tuple, stages: int, cut: tuple[int, int]
) -> DecodeLaunch | None:
    """The launch with K cut in (parts, blocks of a cluster), or None where it does not fit."""
    splits, cluster = cut
    warps, _, blocks_per_sm, buffers, reducers, _, lean = tile
    config = DecodeConfig(
        kind=traits.kind,
        scale=traits.scale,
        symmetric=traits.symmetric,
        packed_group=traits.packed_group,
        silu_mul=traits.silu_mul,
        nt=1 if m <= 8 else 2,
        warps=warps,
        stages=stages,
        blocks_per_sm=blocks_per_sm,
        smem_bytes=_SMEM_BYTES[blocks_per_sm],
        red_buffers=buffers,
        reducers=reducers,
        lean=lean,
        raw=lean and traits.kind == "bf16",
        cluster=cluster,
    )
    units = k // config.stage_k
    max_units = -(-units // (splits * warps))
    if config.needs_bytes(m, max_units) > config.smem_bytes or splits > sms:
        return None
    tiles = n // 32
    return DecodeLaunch(
        config=config,
        blocks=min(sms // splits, tiles),
        splits=splits,
        max_units=max_units,
        workspace_floats=tiles * splits * 2 * config.nt * 128 if splits > cluster else 0,
    )


def _decode_cycles(launch: DecodeLaunch, m: int, n: int, k: int, split_cycles: int) -> float:
    tiles = -(-(n // 32) // launch.blocks)
    stream = k / launch.splits * 16 / _STREAM_BYTES_PER_CYCLE
    load = m * k * 2 / launch.splits / _L2_BYTES_PER_CYCLE
    if launch.splits == 1:
        return tiles * stream + load
    handed_over = _SPLIT_TILE_CYCLES / launch.config.reducers
    return tiles * max(stream, handed_over) + load + split_cycles + 400 * launch.splits


# Plans that beat the model's where timed beside it (H200, docs/log/w4a16.md): (k, n, rows) -> ...
_MEASURED = {
    (4096, 14336, 16): ((16, 2, 1, 6, 2, 2), Plan(waves=0, blocks=224, cluster=2)),
    (4096, 14336, 64): ((64, 2, 1, 3, 2, 2), Plan(waves=0, blocks=224, cluster=2)),
    (4096, 14336, 128): ((128, 2, 1, 4, 2, 1), Plan(waves=1, blocks=112)),
    (4096, 14336, 512): ((128, 2, 1, 4, 2, 1), Plan(waves=2, blocks=132)),
    (4096, 14336, 1024): ((128, 2, 1, 4, 2, 1), Plan(waves=6, blocks=128)),
    (14336, 4096, 16): ((16, 2, 1, 8, 2, 2), Plan(waves=0, blocks=132, parts=4)),
    (14336, 4096, 64): ((64, 2, 1, 3, 2, 2), Plan(waves=0, blocks=256, parts=8, cast=2)),
    (8192, 10240, 64): ((64, 2, 1, 3, 2, 2), Plan(waves=0, blocks=240, parts=3, cast=2)),
    (8192, 10240, 128): ((128, 2, 1, 4, 2, 1), Plan(waves=0, blocks=132, cast=2)),
    (8192, 10240, 256): ((128, 2, 1, 4, 2, 1), Plan(waves=1, blocks=128)),
    (8192, 10240, 512): ((128, 2, 1, 4, 2, 1), Plan(waves=2, blocks=132)),
    (8192, 10240, 1024): ((128, 2, 1, 4, 2, 1), Plan(waves=5, blocks=128)),
    (8192, 28672, 128): ((128, 2, 1, 4, 2, 1), Plan(waves=0, blocks=132, cast=2)),
    (8192, 28672, 256): ((128, 2, 1, 4, 2, 1), Plan(waves=2, blocks=132, cast=2)),
    (8192, 28672, 512): ((128, 2, 1, 4, 2, 1), Plan(waves=5, blocks=132, cast=2)),
    (28672, 8192, 64): ((64, 4, 1, 5, 2, 1), Plan(waves=0, blocks=128, parts=4, cast=2)),
    (28672, 8192, 256): ((128, 2, 1, 4, 2, 1), Plan(waves=0, blocks=132, cast=2)),
}
_MEASURED_SPLITS = {(4096, 4096, 8): (2, 2), (8192, 10240, 16): (2, 2)}
"""(Parts of K, blocks of a cluster) of decode; with / without the latter 4.3 / 5.2, 15.6 / 16.2."""
_MEASURED_SMS = 132


def _measured_launch(traits: Traits, m: int, n: int, k: int, sms: int) -> MatmulLaunch | None:
    """The launch that was timed for these rows of the layer, where it fits this kernel's traits."""
    rows = next(rows for rows in (16, 32, 64, 128, m) if m <= rows)
    if sms != _MEASURED_SMS or (k, n, rows) not in _MEASURED:
        return None
    shape, plan = _MEASURED[k, n, rows]
    costs = (0.0,) * 8
    config = _matmul_config(traits, tile_of(shape, (0, rows), costs), plan)
    if config is None or config.stages < shape[3]:
        return None
    return planned(config, plan, -(-m // config.block_m) * -(-n // config.block_n), k // 128)


def planned(config: MatmulConfig, plan: Plan, tiles: int, steps: int) -> MatmulLaunch:
    """A plan's launch; parts of tiles that blocks leave in memory want a place for each block."""
    in_memory = tiles > plan.waves * plan.blocks and plan.cluster == 1
    return MatmulLaunch(
        config=config,
        waves=plan.waves,
        head=head_steps(plan.waves, tiles - plan.waves * plan.blocks, plan.blocks, steps),
        blocks=plan.blocks,
        workspace_floats=plan.blocks * config.block_m * config.block_n if in_memory else 0,
    )


# Where clusters along K beat the other kernels: (k, n, most rows) -> plan of `stream_plan`. H200,
# 2026-11-30, microseconds with / without: 3.9 / 4.4 at one row, 4.1 / 4.7 at 4, 4.3 / 6.3 at 16.
_MEASURED_STREAMS = {
    (4096, 4096, 1): (8, 1, 1, 2, 2, 2, 1, False),
    (4096, 4096, 4): (8, 1, 1, 2, 2, 2, 1, False),
    (4096, 4096, 16): (8, 1, 2, 2, 2, 2, 1, True),
}
_STREAM_ROWS = (1, 4, 8, DECODE_ROWS)  # of a box; one of 2 rows brought other values on an H200


@functools.cache
def stream_launch(traits: Traits, m: int, n: int, k: int, sms: int) -> StreamLaunch | None:
    """Kernel and grid for at most 16 rows of a layer that was timed with clusters along K."""
    rows = next(rows for rows in _STREAM_ROWS if m <= rows)
    plan = _MEASURED_STREAMS.get((k, n, rows)) if sms == _MEASURED_SMS else None
    return None if plan is None else stream_plan(traits, rows, n, k, plan)


def stream_plan(traits: Traits, rows: int, n: int, k: int, plan: tuple) -> StreamLaunch | None:
    """A plan's launch, or None where it does not fit: warps along K, along outputs, tiles a warp,
    blocks of a cluster along K, units a warp, blocks an SM, blocks that share activations, whether
    codes are held in registers."""
    k_warps, n_warps, tiles, cluster, units, blocks_per_sm, cast, held = plan
    config = StreamConfig(
        kind=traits.kind,
        scale=traits.scale,
        symmetric=traits.symmetric,
        packed_group=traits.packed_group,
        silu_mul=traits.silu_mul,
        nt=-(-rows // 8),
        k_warps=k_warps,
        n_warps=n_warps,
        tiles=tiles,
        cluster=cluster,
        units=units,
        rows=rows,
        cast=cast,
        held=held,
        blocks_per_sm=blocks_per_sm,
    )
    whole = config.block_k * cluster == k and n % (config.block_n * cast) == 0
    if not whole or not config.is_valid or config.smem_bytes > _SMEM_BYTES[blocks_per_sm]:
        return None
    columns = n // config.block_n
    if blocks_per_sm == 2 and columns * cluster <= _MEASURED_SMS:
        # a multiprocessor left over would take two blocks of the next layer, one after the other
        columns = _MEASURED_SMS // (cluster * cast) * cast
    return StreamLaunch(config=config, columns=columns)


_MEASURED_TRIMMED = {(4096, 14336, 256): (4, 6)}
"""Layers and rows that tiles of two units leave multiprocessors over for: (k, n, most rows) ->
stages of both kinds of blocks. H200, 2026-11-30: 40.9 us, without 42.1."""


@functools.cache
def trimmed_launch(traits: Traits, m: int, n: int, k: int, sms: int) -> TrimmedLaunch | None:
    """Kernel and grid for m rows of a layer that was timed with trimmed tiles; None where too few
    rows are left for what is trimmed."""
    rows = 128 if m <= 128 else 256
    stages = _MEASURED_TRIMMED.get((k, n, rows)) if sms == _MEASURED_SMS else None
    if stages is None or not rows // 4 * 3 < m <= rows:
        return None
    return trimmed_plan(traits, rows, n, stages)


def trimmed_plan(
    traits: Traits, rows: int, n: int, stages: tuple[int, int]
) -> TrimmedLaunch | None:
    """The launch with (stages of whole tiles, of the rest), or None where it does not fit."""
    config = TrimmedConfig(
        kind=traits.kind,
        scale=traits.scale,
        packed_group=traits.packed_group,
        rows=rows,
        stages=stages[0],
        rest_stages=stages[1],
    )
    fits = traits.symmetric and not traits.silu_mul and n % 128 == 0
    if not fits or config.smem_bytes > _SMEM_BYTES[1]:
        return None
    tiles = n // 128
    return TrimmedLaunch(config=config, tiles=tiles, blocks=tiles + -(-tiles // REST_UNITS))


@functools.cache
def matmul_launch(traits: Traits, m: int, n: int, k: int, sms: int) -> MatmulLaunch:
    """Kernel and grid for m rows of a layer with padded n and k: what was timed for it, else by a
    model of the work's shape."""
    if (measured := _measured_launch(traits, m, n, k, sms)) is not None:
        return measured
    found = []
    for tile in MATMUL_TILES:
        if tile.above < m <= tile.most:
            tiles = -(-m // tile.block_m) * -(-n // (64 * tile.consumers * tile.row_mmas))
            for plan in _work_plans(tile, tiles, k // 128, sms):
                config = _matmul_config(traits, tile, plan)
                if config is not None:
                    cost = _matmul_cost(tile, tiles, k // 128, plan, sms)
                    found.append((cost, len(found), config, plan, tiles))
    _, _, config, plan, tiles = min(found, key=lambda entry: entry[:2])
    return planned(config, plan, tiles, k // 128)


def _matmul_config(traits: Traits, tile: Tile, plan: Plan) -> MatmulConfig | None:
    """The tile's kernel with as many stages as fit; None where too few do."""
    for stages in range(tile.stages, 1, -1):
        config = MatmulConfig(
            kind=traits.kind,
            scale=traits.scale,
            symmetric=traits.symmetric,
            packed_group=traits.packed_group,
            silu_mul=traits.silu_mul,
            block_m=tile.block_m,
            consumers=tile.consumers,
            row_mmas=tile.row_mmas,
            stages=stages,
            halves=tile.halves,
            blocks_per_sm=tile.blocks_per_sm,
            cluster=plan.cluster,
            parts=plan.parts,
            cast=plan.cast,
        )
        if config.smem_bytes <= _SMEM_BYTES[tile.blocks_per_sm]:
            return config
    return None


def _work_plans(tile: Tile, tiles: int, steps: int, sms: int) -> list[Plan]:
    """Even waves of fewer blocks; stream-K after waves; equal parts; clusters that fit at once."""
    slots = sms * tile.blocks_per_sm
    waves = -(-tiles // slots)
    blocks = -(-tiles // waves)
    plans = {(tiles // blocks, blocks, 1)}
    for whole in {tiles // slots, tiles // slots - 1 if tiles // slots == 1 else tiles // slots}:
        rest = tiles - whole * slots
        shares = rest * (steps - head_steps(whole, rest, slots, steps))
        plans.add((whole, slots if whole else min(slots, shares), 1))
    if tiles < sms and tile.blocks_per_sm == 2:
        plans.add((0, min(sms, tiles * (steps - head_steps(0, tiles, sms, steps))), 1))
    parts = [s for s in range(2, 9) if tiles * s <= slots and steps >= 2 * s]
    plans |= {(0, tiles * s, 1) for s in parts}
    narrow = tile.consumers * tile.row_mmas == 2 and tile.block_m <= 128
    if 2 in parts and narrow:
        plans.add((0, tiles * 2, 2))
    if 4 in parts and narrow and tile.blocks_per_sm == 2 and tiles * 4 <= sms:
        # Two slots an SM, half of them free: a cluster of four finds its place in any GPC.
        plans.add((0, tiles * 4, 4))
    cut = {(0, tiles * s, 1): s for s in parts if tile.block_m <= 128}
    return [Plan(waves=p[0], blocks=p[1], cluster=p[2], parts=cut.get(p, 1)) for p in sorted(plans)]


def _matmul_cost(tile: Tile, tiles: int, steps: int, plan: Plan, sms: int) -> float:
    rest = tiles - plan.waves * plan.blocks
    share = plan.waves * steps + -(-rest * steps // plan.blocks)
    busy = min(plan.blocks / sms, tile.blocks_per_sm)
    cost = tile.start + share * (tile.step + tile.step_shared * busy)
    parts = plan.blocks / rest if rest and plan.waves == 0 else 0.0
    if plan.cluster > 1:
        return cost + tile.cluster
    if rest and parts and plan.blocks % rest == 0:
        return cost + tile.even + tile.even_part * parts
    return cost + (tile.uneven + tile.uneven_part * parts if rest else 0.0)


def traits_for(problem: W4A16Problem) -> Traits:
    """Traits of a problem whose weight need not exist."""
    return Traits(
        kind=KIND[problem.dtype],
        scale=SCALE_KIND[problem.scale_dtype],
        symmetric=problem.symmetric,
        packed_group=0 if problem.group_size >= problem.k else problem.group_size,
        silu_mul=problem.silu_mul,
    )


def rows_launch(traits: Traits, m: int, n: int, k: int, sms: int, invariant: bool) -> Launch:
    """What m rows of a layer with padded n and k are launched with, 16 rows at a time if
    `invariant` (then nothing depends on m)."""
    if invariant or m <= DECODE_ROWS:
        found = stream_launch(traits, DECODE_ROWS if invariant else m, n, k, sms)
        if found is not None:
            return found
    if invariant or uses_decode(m, n, k):
        return decode_launch(traits, min(m, DECODE_ROWS), n, k, sms, invariant)
    trimmed = trimmed_launch(traits, m, n, k, sms)
    return matmul_launch(traits, m, n, k, sms) if trimmed is None else trimmed


def launch_for(problem: W4A16Problem, arch: Arch) -> Launch:
    """What the Hopper implementation launches for a problem (for `explain`)."""
    traits = traits_for(problem)
    align = math.lcm(128, traits.packed_group or 128)
    n, k = -(-problem.n // 32) * 32, -(-problem.k // align) * align
    return rows_launch(traits, max(problem.m, 1), n, k, arch.num_units, problem.batch_invariant)


def launch_for_triton(problem: W4A16Problem, arch: Arch) -> TritonConfig:
    """What the portable implementation launches for a problem (for `explain`)."""
    n, k = -(-problem.n // 32) * 32, -(-problem.k // 128) * 128
    return triton_config(max(problem.m, 1), n, k, problem.group_size, problem.batch_invariant)
