"""Tiles of the Hopper forward over caches and for few queries, and what they cost; needs no DSL.

One more forward kernel (cute/cached.py) for what the other (cute/forward.py) does not take: lengths
used of each sequence, left padding, rows of a cache by index, pages; and for few queries, whose
heads of a group share a tile and whose keys are split over blocks of threads. Which of the two a
problem gets: `takes`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.core.arch import Arch
from ridgeline.core.dtypes import itemsize_bytes
from ridgeline.kernels.attention.cute_sm90_config import (
    BARRIER_BYTES,
    ROWS,
    SHARED_MEMORY_BYTES,
    ForwardConfig,
    ForwardTraits,
    consumer_registers,
    forward_config,
    forward_traits,
    padded,
)
from ridgeline.kernels.attention.cute_sm90_config import refuses as plain_refuses
from ridgeline.kernels.attention.cute_sm90_verified import why_unverified
from ridgeline.kernels.attention.problem import AttentionProblem

MAX_SPLITS = 256
LEAST_PAGE = 8
"""Tokens of the smallest page: the rows of a swizzled tile in shared memory."""
MOST_REGISTERS = 255
"""A thread's."""
WIDEST_OF_TWO = 128
"""Head dim of V up to which a multiprocessor holds two blocks of threads."""
RESERVED_BYTES = 1024
"""Shared memory that the system takes of each block of threads."""
_START_US, _MERGE_US = 2.0, 3.0
"""What a block of threads costs beside its keys, and what a merge costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTraits(ForwardTraits):
    """What changes the code beside what changes the other forward's.

    varlen: queries are packed, and so are keys without pages. seqused: the lengths used of queries
    and keys are both given; always of packed queries on pages, whose keys' lengths those are.
    """

    leftpad: bool = False
    """Keys before a sequence's first do not exist; implies has_left."""
    kv_rows: bool = False
    """A sequence's row of K and V is read from a table."""
    page_rows: int = 0
    """Rows of a TMA box of pages: a page's, or a block's where pages are longer; 0: no pages."""
    split: bool = False
    """Blocks of threads write parts, which a second kernel merges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedConfig(ForwardConfig):
    """The other forward's fields; O leaves from registers, each block of threads has one tile."""

    output_reuses_q: bool = True
    persistent: bool = False
    blocks_per_sm: int = 1
    """Blocks of threads that a multiprocessor holds: one's start and end lie under the other's
    loads."""


def rows_of(problem: AttentionProblem) -> int:
    """Packed rows of a sequence: the queries of all heads of a group."""
    return problem.heads // problem.kv_heads * problem.seqlen_q


def few_queries(problem: AttentionProblem) -> bool:
    """Whether all of a group's queries fit one WGMMA's rows."""
    return rows_of(problem) <= ROWS


def needs_lengths(problem: AttentionProblem) -> bool:
    """Whether the other forward has no code for a problem."""
    paged = problem.page_size is not None
    return problem.seqused or problem.leftpad or problem.kv_batch_idx or paged


def takes(problem: AttentionProblem) -> bool:
    """Whether a forward that this implementation serves runs the kernel of caches."""
    if problem.direction != "fwd":
        return False
    if needs_lengths(problem):
        return True
    return few_queries(problem) and why_unverified(problem, packed=True) is None


def forward_key(problem: AttentionProblem, arch: Arch) -> tuple[ForwardTraits, ForwardConfig]:
    """(traits, config) of the kernel that a forward runs."""
    if takes(problem):
        return cached_traits(problem, arch), cached_config(problem, arch)
    return forward_traits(problem), forward_config(problem, arch)


def forward_refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    """Why neither kernel takes a forward, or None."""
    return refuses(problem, arch) if takes(problem) else plain_refuses(problem, arch)


def cached_traits(problem: AttentionProblem, arch: Arch, num_splits: int = 0) -> CachedTraits:
    """The compile key of a problem; num_splits 0 takes the choice of `splits`."""
    bounded_right = problem.causal or problem.window_right is not None
    traits = CachedTraits(
        head_dim=padded(problem.head_dim),
        head_dim_v=padded(problem.head_dim_v),
        dtype=problem.dtype,
        has_left=problem.window_left is not None or problem.leftpad,
        has_right=bounded_right,
        softcap=problem.softcap > 0,
        sinks=problem.sinks,
        varlen=problem.varlen,
        seqused=problem.seqused or (problem.varlen and problem.page_size is not None),
        leftpad=problem.leftpad,
        kv_rows=problem.kv_batch_idx,
        split=(num_splits or splits(problem, arch)) > 1,
    )
    if problem.page_size is None:
        return traits
    block_k = _tile(problem, traits).block_k
    return replace(traits, page_rows=min(problem.page_size, block_k))


def cached_config(problem: AttentionProblem, arch: Arch) -> CachedConfig:
    """The tile for a problem."""
    return _tile(problem, cached_traits(problem, arch, num_splits=1))


def _tile(problem: AttentionProblem, traits: ForwardTraits) -> CachedConfig:
    """Few rows: one warpgroup, two blocks of threads a multiprocessor. Else two warpgroups share
    keys. The widest block of keys that fits, a power of two as pages are."""
    warpgroups, blocks = 2, 1
    if few_queries(problem):
        # Two blocks are launched with 128 registers a thread, too few for a wider O.
        warpgroups, blocks = 1, 2 if traits.head_dim_v <= WIDEST_OF_TWO else 1
    for block_k in (128, 64, 32):
        config = CachedConfig(block_k=block_k, num_warpgroups=warpgroups, blocks_per_sm=blocks)
        if _why_no_room(config, traits) is None:
            return config
    raise AssertionError(f"no tile for {traits}")  # `refuses` lets none of these through


def shared_memory_bytes(config: CachedConfig, traits: ForwardTraits) -> int:
    """Shared memory of a block of threads."""
    q = ROWS * config.num_warpgroups * traits.head_dim
    kv = config.stages * config.block_k * (traits.head_dim + traits.head_dim_v)
    return BARRIER_BYTES + itemsize_bytes(traits.dtype) * (q + kv)


def moved_registers(config: CachedConfig) -> tuple[int, int] | None:
    """(producer, consumer) registers a thread after setmaxnreg, 64k in all for the blocks of
    threads of a multiprocessor, and enough for a producer that looks up pages; None: nothing to
    move, each thread of one such block may have as many as there can be."""
    if config.num_warpgroups == 1:
        return (56, 200) if config.blocks_per_sm == 2 else None
    return 40, 232


def _why_no_room(config: CachedConfig, traits: ForwardTraits) -> str | None:
    used = config.blocks_per_sm * (shared_memory_bytes(config, traits) + RESERVED_BYTES)
    if used > SHARED_MEMORY_BYTES + RESERVED_BYTES:
        return f"needs {used} bytes of shared memory, a multiprocessor has {SHARED_MEMORY_BYTES}"
    have = (moved_registers(config) or (0, MOST_REGISTERS))[1]
    if (need := consumer_registers(config, traits)) > have:
        return f"needs about {need} registers a thread, a consumer has {have}"
    return None


def why_invalid(config: CachedConfig, traits: CachedTraits) -> str | None:
    """Why a config cannot run these traits, or None."""
    threads = 128 * config.blocks_per_sm
    producer, consumer = moved_registers(config) or (MOST_REGISTERS, MOST_REGISTERS)
    if threads * (producer + config.num_warpgroups * consumer) > 65536:
        return f"{config.blocks_per_sm} blocks of threads have more than 64k registers"
    if config.stages < 1 or config.stages & (config.stages - 1):
        return f"stages must be a power of two, got {config.stages}"
    if traits.head_dim % 32 or traits.head_dim_v % 32:
        return f"head dims must be multiples of 32, got {traits.head_dim}, {traits.head_dim_v}"
    if traits.page_rows and (config.block_k % traits.page_rows or traits.page_rows < LEAST_PAGE):
        return f"a block of {config.block_k} keys is not whole boxes of {traits.page_rows}"
    if traits.leftpad and not traits.has_left:
        return "leftpad needs has_left"
    if config.split_tail:
        return "split_tail is the other forward's: here keys are split for all tiles"
    return _why_no_room(config, traits)


def splits(problem: AttentionProblem, arch: Arch) -> int:
    """Parts that the keys are cut into: the fastest by a model of the waves.

    A wave of all blocks of threads that the GPU holds reads at the memory's rate.
    """
    if not few_queries(problem):
        return 1
    traits = cached_traits(problem, arch, num_splits=1)
    config = _tile(problem, traits)
    blocks = max(1, -(-problem.seqlen_k // config.block_k))
    if problem.window_left is not None and (problem.causal or problem.window_right is not None):
        seen = problem.seqlen_q + problem.window_left + (problem.window_right or 0)
        blocks = min(blocks, -(-seen // config.block_k) + 1)
    tiles = max(1, problem.batch * problem.kv_heads)
    slots = config.blocks_per_sm * arch.num_units
    dims = traits.head_dim + traits.head_dim_v
    block_bytes = config.block_k * dims * itemsize_bytes(problem.dtype)
    block_us = block_bytes * slots / (arch.ceilings.read_gbps * 1e3)

    def cost_us(count: int) -> float:
        waves = -(-tiles * count // slots)
        merge_us = _MERGE_US if count > 1 else 0.0
        return waves * (-(-blocks // count) * block_us + _START_US) + merge_us

    most = min(blocks, MAX_SPLITS, max(1, 4 * slots // tiles))
    return min(range(1, most + 1), key=lambda count: (cost_us(count), count))


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    """Why the kernel of caches does not take a forward, or None."""
    unsupported = {
        "dropout": problem.dropout,
        "ALiBi": problem.alibi,
        "a bias": problem.bias,
        "score or mask functions": problem.mods,
    }
    for what, present in unsupported.items():
        if present:
            return f"{what} is not supported"
    dims = (problem.head_dim, problem.head_dim_v)
    if any(dim % 8 or not 8 <= dim <= 256 for dim in dims):
        return f"head dims must be multiples of 8 up to 256, got {dims}"
    if min(problem.batch, problem.seqlen_q, problem.seqlen_k) == 0:
        return "empty problems are not supported"
    page = problem.page_size
    if page is not None and (page < LEAST_PAGE or page & (page - 1)):
        return f"pages must be powers of two from {LEAST_PAGE} tokens, got {page}"
    return why_unverified(problem, packed=few_queries(problem))
