"""Tile configs of the W4A16 GPU kernels: pure functions of the layer, the rows and the device."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.kernels.w4a16.tiles import KIND, SCALE_KIND, DecodeConfig, MatmulConfig

if TYPE_CHECKING:
    import torch

    from ridgeline.core.arch import Arch
    from ridgeline.kernels.w4a16.layout import PackedW4
    from ridgeline.kernels.w4a16.problem import W4A16Problem

DECODE_ROWS = 16
"""Most rows of the decode kernel's default use; above, WGMMA is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a kernel is compiled for, besides its tile."""

    kind: str
    scale: str
    symmetric: bool
    packed_group: int
    """0 for one scale along K."""


def traits_of(packed: PackedW4, dtype: torch.dtype) -> Traits:
    """Traits of a packed weight under activations of a dtype."""
    return Traits(
        kind=KIND[str(dtype).removeprefix("torch.")],
        scale=SCALE_KIND[str(packed.scale_TRgj.dtype).removeprefix("torch.")],
        symmetric=packed.symmetric,
        packed_group=0 if packed.per_channel else packed.packed_group,
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
class MatmulLaunch:
    """A WGMMA kernel and how it is launched."""

    config: MatmulConfig
    waves: int
    """Whole tiles a block computes before the rest is shared along K."""
    blocks: int
    workspace_floats: int


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
# one H200, 2026-11-29: few rows of small layers, few rows, 9 to 16 rows.
_DECODE_SMALL = (8, 2, 2, 2, 4, 600)
_DECODE_FEW = (16, 2, 1, 1, 4, 2000)
_DECODE_MORE = (8, 3, 1, 2, 4, 0)
_SMALL_LAYER_BYTES = 12e6
_SMEM_BYTES = {1: 226 * 1024, 2: 113 * 1024}
_STREAM_BYTES_PER_CYCLE = 18.0
"""An SM's share of the bandwidth of an H200's memory at 1.75 GHz."""
_L2_BYTES_PER_CYCLE = 40.0
_SPLIT_TILE_CYCLES = 4500
"""Latency of handing a tile's sums to another block, a reducer."""


def prefers_lean(rows: int, n: int, k: int) -> bool:
    """Whether the decode kernel brings activations by TMA (DecodeConfig.lean) or row by row.

    One H200, 2026-11-29, microseconds lean / by rows: (8192, 28672) 33.5 / 31.9 at one row, 32.9 /
    34.7 at 8, 39.9 / 42.0 at 16; (4096, 4096) 5.1 / 6.1 at 8 rows, lean first at every count.
    """
    return rows > 4 or n * k / 2 < _SMALL_LAYER_BYTES


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
    found = []
    for stages in range(tile[1], 0, -1):
        for splits in (1, 2, 4, 8, 16, 32, 64):
            asked = (*tile, lean)
            launch = _decode_candidate(traits, rows, n, k, sms, asked, stages, splits)
            if launch is not None:
                found.append((_decode_cycles(launch, rows, n, k, tile[5]), splits, launch))
        if found:
            return min(found, key=lambda entry: entry[:2])[2]
    raise AssertionError("w4a16: a stage and a row of activations always fit")


def _decode_candidate(
    traits: Traits, m: int, n: int, k: int, sms: int, tile: tuple, stages: int, splits: int
) -> DecodeLaunch | None:
    warps, _, blocks_per_sm, buffers, reducers, _, lean = tile
    config = DecodeConfig(
        kind=traits.kind,
        scale=traits.scale,
        symmetric=traits.symmetric,
        packed_group=traits.packed_group,
        nt=1 if m <= 8 else 2,
        warps=warps,
        stages=stages,
        blocks_per_sm=blocks_per_sm,
        smem_bytes=_SMEM_BYTES[blocks_per_sm],
        red_buffers=buffers,
        reducers=reducers,
        lean=lean,
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
        workspace_floats=tiles * splits * 2 * config.nt * 128 if splits > 1 else 0,
    )


def _decode_cycles(launch: DecodeLaunch, m: int, n: int, k: int, split_cycles: int) -> float:
    tiles = -(-(n // 32) // launch.blocks)
    stream = k / launch.splits * 16 / _STREAM_BYTES_PER_CYCLE
    load = m * k * 2 / launch.splits / _L2_BYTES_PER_CYCLE
    if launch.splits == 1:
        return tiles * stream + load
    handed_over = _SPLIT_TILE_CYCLES / launch.config.reducers
    return tiles * max(stream, handed_over) + load + split_cycles + 400 * launch.splits


# (rows a tile, consumer warpgroups, WGMMAs each, stages, cycles of 128 inputs), considered for more
# rows than the second number and at most the third; measured on one H200, 2026-11-29.
_MATMUL_TILES = (
    ((32, 4, 1, 10, 1350), 0, 64),
    ((64, 4, 1, 8, 1600), 32, 128),
    ((128, 2, 1, 8, 1300), 64, 1 << 30),
    ((128, 2, 2, 6, 2360), 64, 1 << 30),
    ((256, 2, 1, 4, 2300), 128, 1 << 30),
)
_TILE_CYCLES = 1500
"""Output of a tile."""


@functools.cache
def matmul_launch(traits: Traits, m: int, n: int, k: int, sms: int) -> MatmulLaunch:
    """Kernel and grid for m rows of a layer with padded n and k, by a model of the work's shape."""
    found = []
    for tile, above, most in _MATMUL_TILES:
        if above < m <= most:
            block_m, consumers, row_mmas, stages, cycles = tile
            config = MatmulConfig(
                kind=traits.kind,
                scale=traits.scale,
                symmetric=traits.symmetric,
                packed_group=traits.packed_group,
                block_m=block_m,
                consumers=consumers,
                row_mmas=row_mmas,
                stages=stages,
            )
            for waves, blocks in _work_plans(config, m, n, k, sms):
                cost = _matmul_cycles(config, m, n, k, waves, blocks, cycles)
                found.append((cost, len(found), config, waves, blocks))
    _, _, config, waves, blocks = min(found, key=lambda entry: entry[:2])
    tiles = _tiles(config, m, n)
    shared = tiles > waves * blocks
    floats = 2 * blocks * config.block_m * config.block_n if shared else 0
    return MatmulLaunch(config=config, waves=waves, blocks=blocks, workspace_floats=floats)


def _tiles(config: MatmulConfig, m: int, n: int) -> int:
    return -(-m // config.block_m) * -(-n // config.block_n)


def _work_plans(config: MatmulConfig, m: int, n: int, k: int, sms: int) -> set[tuple[int, int]]:
    """(whole waves, blocks): even waves of fewer blocks, stream-K after waves, equal splits."""
    tiles, steps = _tiles(config, m, n), k // 128
    waves = -(-tiles // sms)
    blocks = -(-tiles // waves)
    plans = {(tiles // blocks, blocks)}
    for whole in {tiles // sms, max(tiles // sms - 1, 0)}:
        rest = tiles - whole * sms
        plans.add((whole, sms if whole else min(sms, rest * steps)))
    plans |= {(0, tiles * s) for s in (2, 3, 4, 8) if tiles * s <= sms and steps >= 2 * s}
    return plans


def _matmul_cycles(
    config: MatmulConfig, m: int, n: int, k: int, waves: int, blocks: int, step_cycles: int
) -> float:
    tiles, steps = _tiles(config, m, n), k // 128
    rest = tiles - waves * blocks
    tile_bytes = config.block_m * config.block_n * 4
    whole = waves * steps * step_cycles + (waves + 1) * _TILE_CYCLES
    share = -(-rest * steps // blocks) * step_cycles
    if rest and waves == 0 and blocks % rest == 0:
        return whole + share + blocks // rest * tile_bytes / 18
    # Uneven shares: two parts a block, of which it may gather one, and blocks out of step in L2.
    return whole + share * 1.06 + (3 * tile_bytes / 14 if rest else 0)


def traits_for(problem: W4A16Problem) -> Traits:
    """Traits of a problem whose weight need not exist."""
    return Traits(
        kind=KIND[problem.dtype],
        scale=SCALE_KIND[problem.scale_dtype],
        symmetric=problem.symmetric,
        packed_group=0 if problem.group_size >= problem.k else problem.group_size,
    )


def launch_for(problem: W4A16Problem, arch: Arch) -> DecodeLaunch | MatmulLaunch:
    """What the Hopper implementation launches for a problem (for `explain`)."""
    traits = traits_for(problem)
    align = math.lcm(128, traits.packed_group or 128)
    n, k = -(-problem.n // 32) * 32, -(-problem.k // align) * align
    m = max(problem.m, 1)
    if m <= DECODE_ROWS or problem.batch_invariant:
        rows = min(m, DECODE_ROWS)
        return decode_launch(traits, rows, n, k, arch.num_units, problem.batch_invariant)
    return matmul_launch(traits, m, n, k, arch.num_units)


def launch_for_triton(problem: W4A16Problem, arch: Arch) -> TritonConfig:
    """What the portable implementation launches for a problem (for `explain`)."""
    n, k = -(-problem.n // 32) * 32, -(-problem.k // 128) * 128
    return triton_config(max(problem.m, 1), n, k, problem.group_size, problem.batch_invariant)
