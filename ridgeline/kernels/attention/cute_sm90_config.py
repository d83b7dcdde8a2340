"""Tile configurations of the Hopper forward, and what they cost; needs no DSL.

A block of threads is one producer warpgroup (one warp of it works) and `num_warpgroups` consumers
of 64 query rows each. Shared memory holds Q (which O reuses on its way out where space is short)
and rings of K and V; registers hold S [64, block_k], P (16 bit) and O [64, head_dim_v].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.core.arch import Arch
from ridgeline.core.dtypes import itemsize_bytes
from ridgeline.kernels.attention.cute_sm90_verified import why_unverified
from ridgeline.kernels.attention.problem import AttentionProblem

ROWS = 64
"""Query rows of a consumer warpgroup: the M of a WGMMA."""
SHARED_MEMORY_BYTES = 227 * 1024
"""What one block may have on sm_90."""
BARRIER_BYTES = 1024
"""Barriers, the work queue's slots and alignment."""
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
"""num_warpgroups -> registers a thread of producer and consumer (multiples of 8, 64k in all)."""
RESERVED_REGISTERS = 32
"""Addresses, loop state, softmax state: what a consumer needs beside S, P and O."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTraits:
    """What changes the forward's code: its compile key, with the tile config."""

    head_dim: int
    """Of Q and K in shared memory, a multiple of 32; TMA pads smaller ones with zeros."""
    head_dim_v: int
    dtype: str
    """bfloat16 or float16."""
    has_left: bool = False
    """A window bounded on the left."""
    has_right: bool = False
    """Causal, or a window bounded on the right."""
    softcap: bool = False
    sinks: bool = False
    varlen: bool = False
    """Packed sequences, by cu_seqlens of both sides."""
    seqused: bool = False
    """seqused_k: keys a sequence really has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardConfig:
    """Tile and schedule of the forward."""

    block_k: int
    """Keys of a block: the N of S and the K of the second product, a multiple of 16."""
    num_warpgroups: int
    """Consumer warpgroups, 1 to 3."""
    stages: int = 2
    """Blocks of K, and of V, in flight; a power of two."""
    q_stages: int = 1
    """Tiles of Q in flight, 1 or 2: with 2, the next tile's Q and first K and V come in while the
    last blocks of this one are worked on."""
    ping_pong: bool = True
    """Warpgroups take turns at the tensor cores."""
    lazy_log2: float = 8.0
    """Growth of a row's maximum, in powers of two, that leaves O as it is; 0 rescales always."""
    output_reuses_q: bool = False
    """O leaves through Q's shared memory."""
    persistent: bool = True
    """Blocks of threads take tiles from a queue instead of one each."""
    split_tail: bool = False
    """The tiles that fill no whole wave are cut along their keys (cute/tail.py); where that pays:
    cute_sm90_tail_config.py."""


def rows_per_block(config: ForwardConfig) -> int:
    """Query rows of a block of threads."""
    return ROWS * config.num_warpgroups


def shared_memory_bytes(config: ForwardConfig, traits: ForwardTraits) -> int:
    """Shared memory of a block of threads."""
    size = itemsize_bytes(traits.dtype)
    rows = rows_per_block(config)
    q = config.q_stages * rows * traits.head_dim
    o = 0 if config.output_reuses_q else rows * traits.head_dim_v
    kv = config.stages * config.block_k * (traits.head_dim + traits.head_dim_v)
    return BARRIER_BYTES + size * (q + o + kv)


def consumer_registers(config: ForwardConfig, traits: ForwardTraits) -> int:
    """Registers a consumer thread needs: S and O in fp32, P in 16 bit, and the rest."""
    threads = 128
    scores = ROWS * config.block_k // threads
    output = ROWS * traits.head_dim_v // threads
    return scores + scores // 2 + output + RESERVED_REGISTERS


def registers(config: ForwardConfig, traits: ForwardTraits) -> tuple[int, int]:
    """(producer, consumer) registers a thread after setmaxnreg."""
    split_wide = config.split_tail and traits.head_dim > 128
    if (traits.varlen or split_wide) and config.num_warpgroups == 2:
        return 40, 232  # finding a tile among packed sequences, or a piece, takes more than 24
    return REGISTERS[config.num_warpgroups]


def why_invalid(config: ForwardConfig, traits: ForwardTraits) -> str | None:
    """Why a config cannot run these traits, or None."""
    if config.num_warpgroups not in REGISTERS:
        return f"num_warpgroups must be 1, 2 or 3, got {config.num_warpgroups}"
    if config.block_k % 16 or not 16 <= config.block_k <= 256:
        return f"block_k must be a multiple of 16 in 16..256, got {config.block_k}"
    if config.stages < 1 or config.stages & (config.stages - 1):
        return f"stages must be a power of two, got {config.stages}"
    if config.q_stages not in (1, 2):
        return f"q_stages must be 1 or 2, got {config.q_stages}"
    if config.output_reuses_q and config.q_stages > 1:
        return "output_reuses_q needs q_stages 1"
    if traits.head_dim % 32 or traits.head_dim_v % 32:
        return f"head dims must be multiples of 32, got {traits.head_dim}, {traits.head_dim_v}"
    if config.output_reuses_q and traits.head_dim_v > traits.head_dim:
        return "output_reuses_q needs head_dim_v <= head_dim"
    if (used := shared_memory_bytes(config, traits)) > SHARED_MEMORY_BYTES:
        return f"needs {used} bytes of shared memory, a block has {SHARED_MEMORY_BYTES}"
    if config.lazy_log2 < 0:
        return f"lazy_log2 must not be negative, got {config.lazy_log2}"
    if ROWS * (config.num_warpgroups - 1) > 2 * config.block_k:
        # The first warpgroup would pass more blocks than the rings can run ahead.
        return (
            f"block_k must be at least half the rows of the other warpgroups, got {config.block_k}"
        )
    if traits.varlen and not config.persistent:
        return "packed sequences need a persistent schedule"
    if config.split_tail and (why := _why_no_tail(config, traits)) is not None:
        return f"split_tail needs {why}"
    have = registers(config, traits)[1]
    if (need := consumer_registers(config, traits)) > min(have, 255):
        return f"needs about {need} registers a thread, a consumer has {have}"
    return None


def _why_no_tail(config: ForwardConfig, traits: ForwardTraits) -> str | None:
    """What is lacking where tiles are to be cut that take equally long, or None."""
    if traits.has_left or traits.has_right:
        return "tiles of equal length: no causal mask and no window"
    if traits.varlen or traits.seqused:
        return "tiles of equal length: dense sequences, used whole"
    return None if config.persistent else "a persistent schedule"


def padded(head_dim: int) -> int:
    """The head dim of the tile that holds one: the next multiple of 32, from 192 on of 64."""
    step = 32 if head_dim <= 192 else 64
    return -(-head_dim // step) * step


def forward_traits(problem: AttentionProblem) -> ForwardTraits:
    """The compile key of a problem."""
    bounded_right = problem.causal or problem.window_right is not None
    return ForwardTraits(
        head_dim=padded(problem.head_dim),
        head_dim_v=padded(problem.head_dim_v),
        dtype=problem.dtype,
        has_left=problem.window_left is not None,
        has_right=bounded_right,
        softcap=problem.softcap > 0,
        sinks=problem.sinks,
        varlen=problem.varlen,
        seqused=problem.seqused,
    )


def forward_config(problem: AttentionProblem, arch: Arch) -> ForwardConfig:
    """The tile for a problem: the widest key block that registers and shared memory hold."""
    traits = forward_traits(problem)
    candidates = _candidates(traits, _turns_cost(problem, traits))
    if max(traits.head_dim, traits.head_dim_v) <= 64 and problem.causal and _is_short(problem):
        # Measured at 1k, causal: 329 TFLOP/s for 320 and, with deep rings, 349 for 331; at 4k 417
        # for 483.
        candidates.insert(0, replace(candidates[0], num_warpgroups=2))
    for config in candidates:
        if why_invalid(config, traits) is None:
            return config
    raise AssertionError(f"no forward tile for {traits}")  # `refuses` lets none of these through


def _is_short(problem: AttentionProblem) -> bool:
    """Whether tiles of 192 rows leave much of the last one empty."""
    return problem.seqlen_q <= 1024 and not problem.varlen


def _turns_cost(problem: AttentionProblem, traits: ForwardTraits) -> bool:
    """Where warpgroups that take no turns have measured faster, head dim 128: at 16k 682 TFLOP/s
    for 676, causal 695 for 673, at 4k 656 for 655 and 625 for 620; at 1k 583 for 595. Of packed
    sequences the longest counts."""
    other = traits.has_left or traits.softcap or traits.sinks or traits.seqused
    dims = (traits.head_dim, traits.head_dim_v)
    return dims == (128, 128) and min(problem.seqlen_q, problem.seqlen_k) >= 4096 and not other


def _candidates(traits: ForwardTraits, free: bool) -> list[ForwardConfig]:
    """Tiles from best to least, by head dim; measured on an H200 (docs/log/attention_hopper.md).
    free: warpgroups take no turns."""
    widest = max(traits.head_dim, traits.head_dim_v)
    if widest <= 64:
        tile = ForwardConfig(block_k=128, num_warpgroups=3)
        return [replace(tile, q_stages=2, stages=4), tile] if _is_plain_causal(traits) else [tile]
    if widest <= 128:
        return [ForwardConfig(block_k=128, num_warpgroups=2, ping_pong=not free)]
    reuse = traits.head_dim_v <= traits.head_dim
    return [
        ForwardConfig(block_k=block_k, num_warpgroups=2, output_reuses_q=reuse)
        for block_k in (128, 112, 96, 80, 64)
    ]


def _is_plain_causal(traits: ForwardTraits) -> bool:
    """Where deep rings have measured faster, head dim 64, causal: at 1k 349 TFLOP/s for 312 (two
    stages of Q alone 322), at 4k 483 for 470, at 16k 538 for 535. Two of Q cost 2 to 5 % at 128."""
    other = traits.has_left or traits.softcap or traits.sinks or traits.varlen or traits.seqused
    return traits.has_right and not other


def heads_per_section(problem: AttentionProblem, arch: Arch) -> int:
    """Query heads whose keys and values stay in L2 together: a power of two; 1 where all tiles of a
    head are equally long and only the order inside a head matters."""
    if not (problem.causal or problem.window_right is not None or problem.varlen):
        return 1
    dims = problem.head_dim + problem.head_dim_v
    head_bytes = problem.seqlen_k * dims * itemsize_bytes(problem.dtype)
    head_bytes = head_bytes * problem.kv_heads / max(1, problem.heads)
    budget = 0.65 * arch.l2_bytes
    section = 1
    while section * 2 <= problem.batch * problem.heads and section * 2 * head_bytes <= budget:
        section *= 2
    return section


def why_unsupported(problem: AttentionProblem) -> str | None:
    """What neither direction takes, or None."""
    unsupported = {
        "dropout": problem.dropout,
        "ALiBi": problem.alibi,
        "a bias": problem.bias,
        "a paged KV cache": problem.page_size is not None,
        "score or mask functions": problem.mods,
    }
    for name in ("leftpad", "kv_batch_idx", "kv_cache"):
        unsupported[name] = getattr(problem, name)
    unsupported["seqused"] = problem.seqused and problem.direction == "fwd"
    for what, present in unsupported.items():
        if present:
            return f"{what} is not supported"
    dims = (problem.head_dim, problem.head_dim_v)
    if any(dim % 8 or not 8 <= dim <= 256 for dim in dims):
        return f"head dims must be multiples of 8 up to 256, got {dims}"
    if min(problem.batch, problem.seqlen_q, problem.seqlen_k) == 0:
        return "empty problems are not supported"
    return None


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    """Why this implementation does not take a forward, or None."""
    if (why := why_unsupported(problem)) is not None:
        return why
    if padded(problem.head_dim_v) > padded(problem.head_dim) > 128:
        dims = (problem.head_dim, problem.head_dim_v)
        return f"head dim of V must not exceed Q's beyond 128, got {dims}"
    return why_unverified(problem)
