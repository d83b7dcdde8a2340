"""Tile configs of the Triton attention kernels: a table by measurement, one validity predicate.

`attention_config(problem, arch)` is pure. For 16-bit inputs on sm90 it reads a table by (head dim,
mask), measured on an H200 (benchmarks/results/h200/attention.jsonl, docs/log/attention_triton.md);
elsewhere the largest plain tile that `is_valid` accepts. `candidates` lists what a tuner may try.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ridgeline.core.arch import Arch
from ridgeline.core.dtypes import itemsize_bytes
from ridgeline.kernels.attention.problem import AttentionProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """One kernel's tile."""

    block_m: int
    """Queries of a tile."""
    block_n: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Tiles in flight in the software pipeline."""
    tma: bool = False
    """Loads by tensor descriptors."""
    branch: bool = False
    """The mask as a branch of one loop, not as separate loops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardConfig:
    """The tiles of the backward's kernels."""

    dkdv: TileConfig
    dq: TileConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """The split-KV kernel: its tile (rows are heads of a group times queries) and the splits."""

    tile: TileConfig
    num_splits: int


def next_power_of_2(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << max(0, n - 1).bit_length()


def block_dims(problem: AttentionProblem) -> tuple[int, int]:
    """Columns of a K and a V tile: the head dims, padded to a power of two of 16 or more."""
    return (
        max(16, next_power_of_2(problem.head_dim)),
        max(16, next_power_of_2(problem.head_dim_v)),
    )


def smem_bytes(problem: AttentionProblem, kernel: str, tile: TileConfig) -> int:
    """Shared memory that a kernel's resident and pipelined tiles take at the least."""
    d, dv = block_dims(problem)
    size = itemsize_bytes(problem.dtype)
    m, n = tile.block_m, tile.block_n
    if kernel == "fwd":
        return size * (m * d + tile.num_stages * n * (d + dv))
    if kernel == "dq":
        return size * (m * (d + dv) + tile.num_stages * n * (d + dv))
    return size * (n * (d + dv) + tile.num_stages * m * (d + dv) + m * n)


def accumulators(problem: AttentionProblem, kernel: str, tile: TileConfig) -> int:
    """32-bit registers a thread that the products' results take at the same time."""
    d, dv = block_dims(problem)
    m, n = tile.block_m, tile.block_n
    elements = {
        "fwd": m * dv + m * n + m * n // 2,
        "dq": m * d + 2 * m * n,
        "dkdv": n * (d + dv) + 2 * m * n,
    }[kernel]
    return elements // (32 * tile.num_warps)


def is_valid(problem: AttentionProblem, arch: Arch, kernel: str, tile: TileConfig) -> str | None:
    """Why a tile cannot run on an architecture, or None. kernel: fwd, dq, dkdv."""
    for name, value in (("block_m", tile.block_m), ("block_n", tile.block_n)):
        if value < 16 or value & (value - 1):
            return f"{name} {value} is not a power of two of 16 or more"
    if tile.num_warps not in (1, 2, 4, 8):
        return f"num_warps {tile.num_warps} is not 1, 2, 4 or 8"
    if tile.block_m < 8 * tile.num_warps and kernel != "dkdv":
        return f"block_m {tile.block_m} leaves {tile.num_warps} warps less than 8 rows each"
    if tile.block_n < 8 * tile.num_warps and kernel == "dkdv":
        return f"block_n {tile.block_n} leaves {tile.num_warps} warps less than 8 rows each"
    if tile.tma and (not arch.is_gpu or int(arch.name[2:]) < 90):
        return f"tensor descriptors need sm90, not {arch.name}"
    if (needed := smem_bytes(problem, kernel, tile)) > arch.smem_bytes:
        return f"{needed} bytes of shared memory are more than {arch.smem_bytes}"
    if (registers := accumulators(problem, kernel, tile)) > 232:
        return f"{registers} registers a thread for products alone"
    return None


def _mask_kind(problem: AttentionProblem) -> str:
    if problem.window_left is not None:
        return "window"
    if problem.causal or problem.window_right is not None:
        return "causal"
    return "full"


def _bucket(problem: AttentionProblem) -> int:
    widest = max(block_dims(problem))
    return 64 if widest <= 64 else widest


def _tile(block_m, block_n, num_warps, num_stages, **flags) -> TileConfig:
    return TileConfig(
        block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages, **flags
    )


_FORWARD_SM90: dict[tuple[int, str], TileConfig] = {
    (64, "full"): _tile(64, 128, 4, 2, tma=True),
    (64, "causal"): _tile(64, 128, 4, 2, tma=True, branch=True),
    (64, "window"): _tile(64, 128, 4, 2, tma=True, branch=True),
    (128, "full"): _tile(64, 64, 4, 3, tma=True),
    (128, "causal"): _tile(64, 64, 4, 3, tma=True, branch=True),
    (128, "window"): _tile(64, 64, 4, 3, tma=True, branch=True),
    (256, "full"): _tile(128, 64, 8, 2, tma=True),
    (256, "causal"): _tile(128, 64, 8, 2, tma=True, branch=True),
    (256, "window"): _tile(128, 64, 8, 2, tma=True, branch=True),
}

_BACKWARD_SM90: dict[tuple[int, str], BackwardConfig] = {
    (64, "full"): BackwardConfig(
        dkdv=_tile(64, 64, 4, 3, tma=True), dq=_tile(64, 64, 4, 2, tma=True)
    ),
    (64, "causal"): BackwardConfig(
        dkdv=_tile(64, 64, 4, 3, tma=True), dq=_tile(128, 64, 8, 3, tma=True, branch=True)
    ),
    (64, "window"): BackwardConfig(
        dkdv=_tile(64, 64, 4, 3, tma=True), dq=_tile(64, 64, 4, 2, tma=True, branch=True)
    ),
    (128, "full"): BackwardConfig(
        dkdv=_tile(64, 64, 4, 2, tma=True), dq=_tile(64, 64, 4, 2, tma=True)
    ),
    (128, "causal"): BackwardConfig(
        dkdv=_tile(64, 64, 4, 2, tma=True), dq=_tile(128, 64, 8, 3, tma=True, branch=True)
    ),
    (128, "window"): BackwardConfig(
        dkdv=_tile(64, 64, 4, 2, tma=True), dq=_tile(64, 64, 4, 2, tma=True, branch=True)
    ),
    (256, "full"): BackwardConfig(
        dkdv=_tile(32, 64, 8, 2, tma=True), dq=_tile(64, 32, 8, 2, tma=True)
    ),
    (256, "causal"): BackwardConfig(
        dkdv=_tile(32, 64, 8, 2, tma=True), dq=_tile(64, 32, 8, 2, tma=True)
    ),
    (256, "window"): BackwardConfig(
        dkdv=_tile(32, 64, 8, 2, tma=True), dq=_tile(64, 32, 8, 2, tma=True)
    ),
}


def _fallback(problem: AttentionProblem, arch: Arch, kernel: str) -> TileConfig:
    """The largest plain tile that is valid: for fp32, odd dims and other architectures."""
    for rows, cols, warps, stages in (
        (128, 64, 8, 2),
        (64, 64, 4, 2),
        (64, 32, 8, 2),
        (64, 32, 8, 1),
        (64, 32, 4, 1),
        (32, 32, 4, 1),
        (32, 16, 4, 1),
        (16, 16, 2, 1),
    ):
        m, n = (cols, rows) if kernel == "dkdv" else (rows, cols)
        tile = _tile(m, n, warps, stages)
        if is_valid(problem, arch, kernel, tile) is None:
            return tile
    return _tile(16, 16, 2, 1)


def _is_hopper_table(problem: AttentionProblem, arch: Arch) -> bool:
    return arch.name == "sm90" and itemsize_bytes(problem.dtype) == 2


def forward_tile(problem: AttentionProblem, arch: Arch) -> TileConfig:
    """The forward kernel's tile."""
    if _is_hopper_table(problem, arch):
        tile = _FORWARD_SM90[_bucket(problem), _mask_kind(problem)]
        if is_valid(problem, arch, "fwd", tile) is None:
            return tile
    return _fallback(problem, arch, "fwd")


def backward_config(problem: AttentionProblem, arch: Arch) -> BackwardConfig:
    """The backward kernels' tiles."""
    chosen = {kernel: _fallback(problem, arch, kernel) for kernel in ("dkdv", "dq")}
    if _is_hopper_table(problem, arch):
        found = _BACKWARD_SM90[_bucket(problem), _mask_kind(problem)]
        for kernel, tile in (("dkdv", found.dkdv), ("dq", found.dq)):
            if is_valid(problem, arch, kernel, tile) is None:
                chosen[kernel] = tile
    return BackwardConfig(**chosen)


def attention_config(
    problem: AttentionProblem, arch: Arch
) -> TileConfig | BackwardConfig | DecodeConfig:
    """The config of a problem, by its direction."""
    if problem.direction == "bwd":
        return backward_config(problem, arch)
    if takes_decode(problem):
        return decode_config(problem, arch)
    return forward_tile(problem, arch)


MAX_DECODE_ROWS = 64
"""Query heads of a group times queries, up to which the split-KV kernel is used."""
_SPLIT_OVERHEAD_US, _MERGE_US = 2.0, 3.0


def takes_decode(problem: AttentionProblem) -> bool:
    """Whether the split-KV kernel takes a forward: few rows a key/value head, no dropout."""
    rows = problem.heads // problem.kv_heads * problem.seqlen_q
    return rows <= MAX_DECODE_ROWS and not problem.dropout


def decode_tile(problem: AttentionProblem, arch: Arch) -> TileConfig:
    """The split-KV kernel's tile: small, several blocks a multiprocessor, loads far ahead.

    First choices by measurement (H200, 2026-11-29, benchmarks/results/h200/attention.jsonl): long
    tiles where keys are contiguous, a deeper ring of short ones where pages are gathered.
    """
    rows = problem.heads // problem.kv_heads * problem.seqlen_q
    block_m = min(MAX_DECODE_ROWS, max(16, next_power_of_2(rows)))
    hopper = _is_hopper_table(problem, arch)
    measured = ((128, 2) if problem.page_size is None else (64, 5),) if hopper else ()
    for block_n, stages in (*measured, (64, 3), (64, 2), (32, 2), (32, 1), (16, 1)):
        tma = hopper and (problem.page_size is None or problem.page_size % block_n == 0)
        tile = _tile(block_m, block_n, 4, stages, tma=tma)
        room = arch.smem_bytes if (block_n, stages) in measured else arch.smem_bytes // 2
        if smem_bytes(problem, "fwd", tile) <= room:
            return tile
    return _tile(block_m, 16, 4, 1)


def decode_config(problem: AttentionProblem, arch: Arch, num_splits: int = 0) -> DecodeConfig:
    """Tile and splits of a decode problem; num_splits 0 takes the fastest by a model of the waves.

    A wave of two blocks a multiprocessor reads at the memory's rate; a block costs 2 us beyond its
    reads and a merge 3 us.
    """
    tile = decode_tile(problem, arch)
    tiles = max(1, -(-problem.seqlen_k // tile.block_n))
    if num_splits:
        return DecodeConfig(tile=tile, num_splits=min(num_splits, 256))
    rows = problem.heads // problem.kv_heads * problem.seqlen_q
    programs = problem.batch * problem.kv_heads * -(-rows // tile.block_m)
    slots = 2 * arch.num_units
    tile_bytes = tile.block_n * (problem.head_dim + problem.head_dim_v)
    tile_bytes *= itemsize_bytes(problem.dtype)
    tile_us = tile_bytes * slots / (arch.ceilings.read_gbps * 1e3)

    def cost_us(splits: int) -> float:
        waves = -(-programs * splits // slots)
        merge_us = _MERGE_US if splits > 1 else 0.0
        return waves * (-(-tiles // splits) * tile_us + _SPLIT_OVERHEAD_US) + merge_us

    most = min(tiles, 128, max(1, 4 * slots // programs))
    best = min(range(1, most + 1), key=lambda splits: (cost_us(splits), splits))
    return DecodeConfig(tile=tile, num_splits=best)


def candidates(problem: AttentionProblem, arch: Arch, kernel: str) -> Iterator[TileConfig]:
    """Every valid tile worth timing for a kernel (fwd, dq, dkdv)."""
    tma = arch.is_gpu and int(arch.name[2:]) >= 90
    for m, n, warps, stages, use_tma, branch in product(
        (64, 128),
        (32, 64, 128),
        (4, 8),
        (2, 3, 4),
        (False, True) if tma else (False,),
        (False, True),
    ):
        tile = _tile(m, n, warps, stages, tma=use_tma, branch=branch)
        if is_valid(problem, arch, kernel, tile) is None:
            yield tile
