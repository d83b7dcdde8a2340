"""Tile configs of the Triton attention kernels: a table by measurement, one validity predicate.

`attention_config(problem, arch, tuned)` is pure. What `ridgeline tune` measured on the machine at
hand comes first (`tuned`; without the argument the user cache's table, read once a process). For
16-bit inputs on sm90 there is a table by (head dim, mask), measured on an H200
(benchmarks/results/h200/attention.jsonl, docs/log/attention_triton.md); elsewhere the largest plain
tile that `is_valid` accepts. `candidates` and `decode_candidates` list what a tuner may try.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ridgeline.core import tuned as store
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
    held: bool = False
    """Q (in dQ: and dO) is an operand in registers, not in shared memory.

    Of tiles with less keys than head dims: where the products that a step begins and ends with give
    results of one width, ptxas (12.8 and 13.0) puts P or dS into the registers of Q, which the next
    step still reads (docs/log/attention_triton.md).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardConfig:
    """The tiles of the backward's kernels."""

    dkdv: TileConfig
    dq: TileConfig
    joined: bool = False
    """dK, dV and dQ in one launch, but under a block mask; the tiles then agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """The split-KV kernel: its tile (rows are heads of a group times queries) and the splits."""

    tile: TileConfig
    num_splits: int


Tuned = Mapping[str, TileConfig | DecodeConfig]
"""`tuning_key` -> what was measured to be fastest."""


def next_power_of_2(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << max(0, n - 1).bit_length()


def block_dims(problem: AttentionProblem) -> tuple[int, int]:
    """Columns of a K and a V tile: the head dims, padded to a power of two of 16 or more.

    Tiles narrower than 128 bytes lie in shared memory in a swizzle mode of their own. K and V get
    one mode, the wider one's: ptxas 12.8 loses the base of descriptors that differ in nothing but
    the mode (docs/log/attention_triton.md).
    """
    d, dv = (max(16, next_power_of_2(dim)) for dim in (problem.head_dim, problem.head_dim_v))
    least = min(max(d, dv), 128 // itemsize_bytes(problem.dtype))
    return max(d, least), max(dv, least)


def smem_bytes(problem: AttentionProblem, kernel: str, tile: TileConfig) -> int:
    """Shared memory that a kernel's resident and pipelined tiles take at the least."""
    d, dv = block_dims(problem)
    size = itemsize_bytes(problem.dtype)
    m, n = tile.block_m, tile.block_n
    if kernel in ("fwd", "decode"):
        return size * (m * d + tile.num_stages * n * (d + dv))
    if kernel == "dq":
        return size * (m * (d + dv) + tile.num_stages * n * (d + dv))
    return size * (n * (d + dv) + tile.num_stages * m * (d + dv) + m * n)


def accumulators(problem: AttentionProblem, kernel: str, tile: TileConfig) -> int:
    """32-bit registers a thread that the products' results take at the same time."""
    d, dv = block_dims(problem)
    m, n = tile.block_m, tile.block_n
    forward = m * dv + m * n + m * n // 2
    elements = {
        "fwd": forward,
        "decode": forward,
        "dq": m * d + 2 * m * n,
        "dkdv": n * (d + dv) + 2 * m * n,
    }[kernel]
    return elements // (32 * tile.num_warps)


def is_valid(problem: AttentionProblem, arch: Arch, kernel: str, tile: TileConfig) -> str | None:
    """Why a tile cannot run on an architecture, or None. kernel: fwd, dq, dkdv, decode."""
    for name, value in (("block_m", tile.block_m), ("block_n", tile.block_n)):
        if value < 16 or value & (value - 1):
            return f"{name} {value} is not a power of two of 16 or more"
    if tile.num_warps not in (1, 2, 4, 8):
        return f"num_warps {tile.num_warps} is not 1, 2, 4 or 8"
    if tile.block_m < 8 * tile.num_warps and kernel in ("fwd", "dq"):
        return f"block_m {tile.block_m} leaves {tile.num_warps} warps less than 8 rows each"
    if tile.block_n < 8 * tile.num_warps and kernel == "dkdv":
        return f"block_n {tile.block_n} leaves {tile.num_warps} warps less than 8 rows each"
    if tile.block_m > 128 and kernel in ("dq", "dkdv"):
        return f"block_m {tile.block_m} is more than the 128 that rows are aligned to"
    if tile.held and (kernel not in ("fwd", "dq") or not _is_hopper_table(problem, arch)):
        return "an operand in registers is for 16-bit fwd and dq tiles of sm90"
    if tile.held and (tile.block_n > 64 or max(block_dims(problem)) > 128):
        return "an operand in registers is for up to 64 keys and head dim 128"
    if tile.held and tile.block_n >= min(block_dims(problem)):
        return "an operand in registers is for tiles of less keys than head dims"
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
        dkdv=_tile(64, 64, 4, 2, tma=True),
        dq=_tile(64, 64, 4, 3, tma=True, held=True),
        joined=True,
    ),
    (128, "causal"): BackwardConfig(
        dkdv=_tile(64, 64, 4, 2, tma=True),
        dq=_tile(64, 64, 4, 3, tma=True, branch=True, held=True),
        joined=True,
    ),
    (128, "window"): BackwardConfig(
        dkdv=_tile(64, 64, 4, 2, tma=True, branch=True),
        dq=_tile(64, 64, 4, 2, tma=True, branch=True),
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


def tuning_key(problem: AttentionProblem, kernel: str) -> str:
    """What a measured tile holds for: the same code, and lengths up to the same power of two."""
    parts = [kernel, problem.dtype, f"d{problem.head_dim}", f"dv{problem.head_dim_v}"]
    parts += [_mask_kind(problem), f"group{problem.heads // problem.kv_heads}"]
    parts += [f"q{next_power_of_2(problem.seqlen_q)}", f"k{next_power_of_2(problem.seqlen_k)}"]
    if problem.page_size is not None:
        parts.append(f"page{problem.page_size}")
    if kernel == "decode":
        parts.append(f"rows{next_power_of_2(problem.batch * problem.kv_heads)}")
    parts += [name for name in ("dropout", "alibi", "bias", "varlen") if getattr(problem, name)]
    return " ".join([*parts, "softcap"] if problem.softcap else parts)


def read_tuned(entries: Mapping[str, Any]) -> tuple[dict[str, TileConfig | DecodeConfig], list]:
    """(configs, keys that hold none) of a stored table."""
    found: dict[str, TileConfig | DecodeConfig] = {}
    wrong = []
    for key, entry in entries.items():
        try:
            config = dict(entry["config"])
            if key.startswith("decode "):
                tile = TileConfig(**config["tile"])
                found[key] = DecodeConfig(tile=tile, num_splits=int(config["num_splits"]))
            else:
                found[key] = TileConfig(**config)
        except (KeyError, TypeError, ValueError):
            wrong.append(key)
    return found, wrong


_kept: dict[tuple[str, str], Tuned] = {}


def kept_table(arch: Arch) -> Tuned:
    """The device's table in the user cache, read once a process; what is no config is left out
    with one warning."""
    name = (arch.name, arch.device)
    if name not in _kept:
        _kept[name], wrong = read_tuned(store.load("attention", arch))
        if wrong:
            store.warn(store.path(arch), f"no tile in {', '.join(map(repr, wrong))}")
    return _kept[name]


def forget_kept() -> None:
    """Read the user cache again at the next call."""
    _kept.clear()


def _tuned_for(problem: AttentionProblem, arch: Arch, kernel: str, tuned: Tuned | None) -> Any:
    """What was measured for a problem, if it can run."""
    tuned = kept_table(arch) if tuned is None else tuned
    if not tuned:
        return None
    config = tuned.get(tuning_key(problem, kernel))
    tile = config.tile if isinstance(config, DecodeConfig) else config
    return config if tile and is_valid(problem, arch, kernel, tile) is None else None


def _choose(
    problem: AttentionProblem, arch: Arch, kernel: str, tuned: Tuned | None
) -> tuple[TileConfig, str]:
    """(tile, tuned | table | fallback) of fwd, dkdv or dq."""
    if measured := _tuned_for(problem, arch, kernel, tuned):
        return measured, "tuned"
    if _is_hopper_table(problem, arch):
        place = (_bucket(problem), _mask_kind(problem))
        tile = _FORWARD_SM90[place] if kernel == "fwd" else getattr(_BACKWARD_SM90[place], kernel)
        for form in (tile, replace(tile, held=False)):
            if is_valid(problem, arch, kernel, form) is None:
                return form, "table"
    return _fallback(problem, arch, kernel), "fallback"


def forward_tile(problem: AttentionProblem, arch: Arch, tuned: Tuned | None = None) -> TileConfig:
    """The forward kernel's tile."""
    return _choose(problem, arch, "fwd", tuned)[0]


def backward_config(
    problem: AttentionProblem, arch: Arch, tuned: Tuned | None = None
) -> BackwardConfig:
    """The backward kernels' tiles."""
    dkdv, dq = (_choose(problem, arch, kernel, tuned)[0] for kernel in ("dkdv", "dq"))
    joined = _is_hopper_table(problem, arch) and can_join(dkdv, dq)
    joined = joined and _BACKWARD_SM90[_bucket(problem), _mask_kind(problem)].joined
    return BackwardConfig(dkdv=dkdv, dq=dq, joined=joined)


def can_join(dkdv: TileConfig, dq: TileConfig) -> bool:
    """Whether one launch can do both: the same tiles of the tensors, the same threads."""
    kinds = ((t.block_m, t.block_n, t.num_warps, t.tma) for t in (dkdv, dq))
    return next(kinds) == next(kinds)


def attention_config(
    problem: AttentionProblem, arch: Arch, tuned: Tuned | None = None
) -> TileConfig | BackwardConfig | DecodeConfig:
    """The config of a problem, by its direction."""
    if problem.direction == "bwd":
        return backward_config(problem, arch, tuned)
    if takes_decode(problem):
        return decode_config(problem, arch, tuned=tuned)
    return forward_tile(problem, arch, tuned)


def config_source(problem: AttentionProblem, arch: Arch, tuned: Tuned | None = None) -> str:
    """Where `attention_config` has it from: tuned (on this machine), table (measured on an H200) or
    fallback (the largest plain tile that is valid)."""
    kernels = kernels_of(problem)
    if kernels == ("decode",):
        if _tuned_for(problem, arch, "decode", tuned):
            return "tuned"
        return "table" if _is_hopper_table(problem, arch) else "fallback"
    found = {kernel: _choose(problem, arch, kernel, tuned)[1] for kernel in kernels}
    if len(set(found.values())) == 1:
        return found[kernels[0]]
    return ", ".join(f"{kernel} {source}" for kernel, source in found.items())


def kernels_of(problem: AttentionProblem) -> tuple[str, ...]:
    """The kernels with tiles that a problem runs."""
    if problem.direction == "bwd":
        return ("dkdv", "dq")
    return ("decode",) if takes_decode(problem) else ("fwd",)


MAX_DECODE_ROWS = 64
"""Query heads of a group times queries, up to which the split-KV kernel is used."""
MAX_SPLITS = 256
_SPLIT_OVERHEAD_US, _MERGE_US = 2.0, 3.0


def takes_decode(problem: AttentionProblem) -> bool:
    """Whether the split-KV kernel takes a forward: few rows a key/value head, no dropout, no
    user's functions."""
    rows = problem.heads // problem.kv_heads * problem.seqlen_q
    return rows <= MAX_DECODE_ROWS and not problem.dropout and not problem.mods


def _last_tile_is_masked(problem: AttentionProblem) -> bool:
    """Whether decode masks keys that exist: a bound on the right, of more than one query."""
    right = problem.causal or problem.window_right is not None
    return right and problem.seqlen_q > 1


def decode_tile(problem: AttentionProblem, arch: Arch) -> TileConfig:
    """The split-KV kernel's tile: small, several blocks a multiprocessor, loads far ahead.

    First choices by measurement (H200, 2026-11-29, benchmarks/results/h200/attention.jsonl): two
    long tiles in flight where keys are contiguous, three where pages are gathered. There the tile
    of the diagonal stays in the pipelined loop, as a branch: with eight queries 128 x 2k 3.78 ->
    3.97 TB/s, 32 x 8k 3.97 -> 4.09 (2026-11-30).
    """
    rows = problem.heads // problem.kv_heads * problem.seqlen_q
    block_m = min(MAX_DECODE_ROWS, max(16, next_power_of_2(rows)))
    hopper = _is_hopper_table(problem, arch)
    measured = ((128, 2 if problem.page_size is None else 3),) if hopper else ()
    for block_n, stages in (*measured, (64, 3), (64, 2), (32, 2), (32, 1), (16, 1)):
        tma = hopper and (problem.page_size is None or problem.page_size % block_n == 0)
        branch = problem.page_size is not None and not tma and _last_tile_is_masked(problem)
        tile = _tile(block_m, block_n, 4, stages, tma=tma, branch=branch)
        room = arch.smem_bytes if (block_n, stages) in measured else arch.smem_bytes // 2
        if smem_bytes(problem, "fwd", tile) <= room:
            return tile
    return _tile(block_m, 16, 4, 1)


def decode_config(
    problem: AttentionProblem, arch: Arch, num_splits: int = 0, tuned: Tuned | None = None
) -> DecodeConfig:
    """Tile and splits of a decode problem; num_splits 0 takes what was tuned, else the fastest by a
    model of the waves.

    A wave of two blocks a multiprocessor reads at the memory's rate; a block costs 2 us beyond its
    reads and a merge 3 us.
    """
    measured = _tuned_for(problem, arch, "decode", tuned)
    tile = measured.tile if measured else decode_tile(problem, arch)
    tiles = max(1, -(-problem.seqlen_k // tile.block_n))
    if num_splits:
        return DecodeConfig(tile=tile, num_splits=min(num_splits, MAX_SPLITS))
    if measured:
        return DecodeConfig(tile=tile, num_splits=min(measured.num_splits, tiles, MAX_SPLITS))
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

    most = min(tiles, 128, max(1, 4 * slots // max(1, programs)))
    best = min(range(1, most + 1), key=lambda splits: (cost_us(splits), splits))
    return DecodeConfig(tile=tile, num_splits=best)


def candidates(problem: AttentionProblem, arch: Arch, kernel: str) -> Iterator[TileConfig]:
    """Every valid tile worth timing for a kernel (fwd, dq, dkdv).

    Left out is what lost everywhere it was measured (H200, docs/log/attention_triton.md): 16-bit
    tiles by pointers where TMA is to be had, 32 rows at head dims up to 128, eight warps on 64.
    """
    masked = _mask_kind(problem) != "full"
    wide = itemsize_bytes(problem.dtype) > 2 or max(block_dims(problem)) > 128
    sizes = (32, 64, 128) if wide else (64, 128)
    for m, n, warps, stages, use_tma, branch, held in product(
        sizes if kernel == "dkdv" else (64, 128),
        sizes,
        (4, 8),
        (2, 3, 4),
        _loads(problem, arch),
        (False, True) if masked else (False,),
        (False, True),
    ):
        if warps == 8 and not wide and (n if kernel == "dkdv" else m) < 128:
            continue
        tile = _tile(m, n, warps, stages, tma=use_tma, branch=branch, held=held)
        if is_valid(problem, arch, kernel, tile) is None:
            yield tile


def _loads(problem: AttentionProblem, arch: Arch) -> tuple[bool, ...]:
    """By TMA or not, as far as a tuner has to ask."""
    if not _has_tma(arch):
        return (False,)
    return (True,) if itemsize_bytes(problem.dtype) == 2 else (False, True)


def decode_candidates(problem: AttentionProblem, arch: Arch) -> Iterator[DecodeConfig]:
    """Every valid tile of the split-KV kernel worth timing, with half, once and twice the splits
    that the model of the waves takes."""
    shipped = decode_config(problem, arch, tuned={})
    for n, warps, stages, use_tma in product(
        (32, 64, 128), (4, 8), (2, 3, 5), (False, True) if _has_tma(arch) else (False,)
    ):
        if use_tma and problem.page_size is not None and problem.page_size % n:
            continue
        branch = shipped.tile.branch and not use_tma
        tile = _tile(shipped.tile.block_m, n, warps, stages, tma=use_tma, branch=branch)
        if is_valid(problem, arch, "decode", tile) is not None:
            continue
        most = min(max(1, -(-problem.seqlen_k // n)), MAX_SPLITS)
        splits = (shipped.num_splits // 2, shipped.num_splits, 2 * shipped.num_splits)
        for count in sorted({min(max(1, split), most) for split in splits}):
            yield DecodeConfig(tile=tile, num_splits=count)


def _has_tma(arch: Arch) -> bool:
    return arch.is_gpu and int(arch.name[2:]) >= 90
