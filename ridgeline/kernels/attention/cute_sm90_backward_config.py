"""Tile configurations of the Hopper backward, and what they cost; needs no DSL.

A block of threads has `num_warpgroups` warpgroups of 64 keys each, which compute S^T, dP^T, dV and
dK, and one more that computes dQ and issues the loads. Shared memory holds K and V, rings of Q and
dO with their row statistics, and dS; registers of a key warpgroup hold S^T and dP^T [64, block_q],
dK [64, head_dim] and dV [64, head_dim_v], those of the other dQ [block_q, head_dim]. Head dims
beyond 128 and softcap have another division of work: cute_sm90_roles_config.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.core.arch import Arch
from ridgeline.core.dtypes import itemsize_bytes
from ridgeline.kernels.attention import cute_sm90_roles_config as roles
from ridgeline.kernels.attention.cute_sm90_config import (
    BARRIER_BYTES,
    SHARED_MEMORY_BYTES,
    padded,
    why_unsupported,
)
from ridgeline.kernels.attention.cute_sm90_roles_config import RolesConfig
from ridgeline.kernels.attention.cute_sm90_verified import why_unverified
from ridgeline.kernels.attention.problem import AttentionProblem

KEYS = 64
"""Keys of a warpgroup: the M of a WGMMA."""
REGISTER_FILE = 65536
"""32-bit registers of a multiprocessor."""
RESERVED_REGISTERS = 32
"""Addresses, loop state and statistics beside accumulators: with fewer, ptxas drops setmaxnreg or
waits after every product."""
ORDERED_HEADS = 4
"""Deterministic: heads in a section. Measured at causal 16k, head dim 64 / 128, with 1, 2 and 4:
463 / 445, 463 / 449, 527 / 522 TFLOP/s."""
HELPER_REGISTERS = 24
"""A thread of the warpgroup that only loads and waits: the least that setmaxnreg takes."""
COMPUTING_REGISTERS = 32
"""The same where some of its warps work out statistics or round dQ."""
ROW_STATISTICS = 2
"""fp32 words a query: its LSE and its delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardTraits:
    """What changes the backward's code: its compile key, with the tile config."""

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
    varlen: bool = False
    """Packed sequences, by cu_seqlens of both sides."""
    seqused: bool = False
    """The lengths used of queries and keys are both given."""
    deterministic: bool = False
    """Blocks add to dQ in turns, so that its bits do not depend on timing."""

    @property
    def has_tails(self) -> bool:
        """Whether a sequence may end before its tensor does."""
        return self.varlen or self.seqused


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardConfig:
    """Tile and schedule of the backward."""

    block_q: int
    """Queries of a block: 64 or 128."""
    num_warpgroups: int = 2
    """Warpgroups of 64 keys each."""
    stages: int = 2
    """Blocks of Q, and of dO, in flight; a power of two."""
    ds_stages: int = 2
    """Blocks of dS between the warpgroups; a power of two."""
    dq_bulk: bool = False
    """dQ goes out through shared memory by the copy engine, not from registers."""
    dq_parts: int = 1
    """Pieces in which a step's dQ is computed, so that its accumulator stays small: blocks of 64 of
    its rows, or of its columns where block_q is 64."""
    other_registers: int = 88
    """Registers a thread of the warpgroup that computes dQ; the others share the rest."""
    turned_sections: int = 0
    """Deterministic and causal: sections of heads, the last ones, whose blocks start with the first
    keys (the longest) and walk the queries from the last to the first. Measured at causal 16k, head
    dim 64 / 128, with 0, 1 and 2: 497 / 496, 537 / 534, 516 / 524 TFLOP/s."""
    pass_unseen: bool = False
    """A key warpgroup lets the first and last blocks of queries go by that see only the other's
    keys."""
    polynomial_every: int = 0
    """Of each so many pairs of probabilities, one is computed by a polynomial, not on the special
    function unit (relative error 1.0e-4 in bfloat16, 2.9e-6 in float16, before they are rounded);
    0: none."""
    helpers: bool = False
    """A fourth warpgroup: one warp loads, and deterministic, one waits for turns and one hands them
    on, so that the warpgroup of dQ does nothing but compute and add."""
    overlapped: bool = False
    """The main kernel's blocks start while the kernel before it ends, and those of the kernel after
    it while it ends."""
    persistent: int = 0
    """Blocks of threads, one a multiprocessor, each of which takes one block of keys after the
    other and loads the next one's K, V, Q and dO while it stores dK and dV; 0: as many as blocks of
    keys."""
    ordered: bool = False
    """Persistent: blocks of keys are numbered by `blocks.KeyOrder`; of a causal window each head's
    last ones, whose walks are short, come after those of all heads."""
    zeros_ahead: bool = False
    """With ordered and as many queries as keys: idle warps zero the rows of fp32 dQ that later
    blocks add to, so that the kernel before zeroes few, and they are still in L2 then."""
    statistics_ahead: bool = False
    """With zeros_ahead: they work out those rows' statistics too, as the kernel before does."""
    results_behind: bool = False
    """With zeros_ahead: idle warps round the rows of fp32 dQ that nobody adds to any more, as the
    kernel after does."""
    quick_end: bool = False
    """dK and dV leave row by row, each warp's 16 through its own rows of V in shared memory, not by
    TMA through V and K: so the end of a walk waits neither for the last dQ, which reads K, nor for
    copies. Persistent, whoever draws a number tells the others its place too, which takes them five
    divisions."""


def keys_per_block(config: BackwardConfig | RolesConfig) -> int:
    """Keys of a block of threads, or of a pair of them."""
    return KEYS * config.num_warpgroups


def is_persistent(config: BackwardConfig | RolesConfig) -> bool:
    """Whether a block of threads takes one block of keys after the other."""
    return isinstance(config, BackwardConfig) and config.persistent > 0


def counts(config: BackwardConfig | RolesConfig, deterministic: bool) -> bool:
    """Whether blocks count something in global memory: turns, or their work."""
    return deterministic or is_persistent(config)


def is_overlapped(config: BackwardConfig | RolesConfig) -> bool:
    """Whether a launch's three kernels overlap."""
    return isinstance(config, BackwardConfig) and config.overlapped


def is_ordered(config: BackwardConfig | RolesConfig) -> bool:
    """Whether blocks of keys are numbered by `blocks.KeyOrder`."""
    return isinstance(config, BackwardConfig) and config.ordered


def is_zeroing(config: BackwardConfig | RolesConfig) -> bool:
    """Whether the main kernel zeroes most of fp32 dQ."""
    return isinstance(config, BackwardConfig) and config.zeros_ahead


def is_measuring(config: BackwardConfig | RolesConfig) -> bool:
    """Whether the main kernel works out most rows' statistics."""
    return isinstance(config, BackwardConfig) and config.statistics_ahead


def is_finishing(config: BackwardConfig | RolesConfig) -> bool:
    """Whether the main kernel rounds most of dQ."""
    return isinstance(config, BackwardConfig) and config.results_behind


def helper_registers(config: BackwardConfig) -> int:
    """Registers a thread of the helpers' warpgroup."""
    if not config.helpers:
        return 0
    return (
        COMPUTING_REGISTERS
        if config.results_behind or config.statistics_ahead
        else HELPER_REGISTERS
    )


def ahead_warps(config: BackwardConfig) -> tuple[int, int]:
    """Warps that prepare rows for later blocks of keys, and that finish those of earlier ones: with
    the one that loads at most four. Statistics take longest: they come from memory, not L2."""
    if not config.zeros_ahead:
        return 0, 0
    if not config.statistics_ahead:
        return 1, 2 if config.results_behind else 0
    return (2, 1) if config.results_behind else (3, 0)


def dq_part(config: BackwardConfig, traits: BackwardTraits) -> tuple[int, int]:
    """Rows and columns of dQ that are computed at a time."""
    if config.block_q > KEYS:
        return config.block_q // config.dq_parts, traits.head_dim
    return config.block_q, traits.head_dim // config.dq_parts


def shared_memory_bytes(config: BackwardConfig, traits: BackwardTraits) -> int:
    """Shared memory of a block of threads."""
    size = itemsize_bytes(traits.dtype)
    keys = keys_per_block(config)
    dims = traits.head_dim + traits.head_dim_v
    kv = keys * dims * (2 if config.persistent else 1)
    q = config.stages * config.block_q * dims
    ds = config.ds_stages * config.block_q * keys
    statistics = 4 * ROW_STATISTICS * config.stages * config.block_q
    dq = 4 * config.block_q * traits.head_dim // config.dq_parts if config.dq_bulk else 0
    return BARRIER_BYTES + size * (kv + q + ds) + statistics + dq


def registers(config: BackwardConfig) -> tuple[int, int]:
    """(dQ and loads, keys): registers a thread after setmaxnreg, multiples of 8. They share what
    the block was launched with; asking for one more blocks forever."""
    warpgroups = config.num_warpgroups + (2 if config.helpers else 1)
    at_launch = REGISTER_FILE // (128 * warpgroups) // 8 * 8
    other = config.other_registers
    left = at_launch * warpgroups - other - helper_registers(config)
    return other, min(240, left // config.num_warpgroups // 8 * 8)


def accumulator_registers(config: BackwardConfig, traits: BackwardTraits) -> tuple[int, int]:
    """(dQ and loads, keys): registers a thread that accumulators take."""
    scores = KEYS * config.block_q // 128
    sums = KEYS * (traits.head_dim + traits.head_dim_v) // 128
    return config.block_q * traits.head_dim // config.dq_parts // 128, scores + scores // 2 + sums


def why_invalid(config: BackwardConfig, traits: BackwardTraits) -> str | None:
    """Why a config cannot run these traits, or None."""
    if config.num_warpgroups not in (1, 2):
        return f"num_warpgroups must be 1 or 2, got {config.num_warpgroups}"
    if config.block_q not in (64, 128):
        return f"block_q must be 64 or 128, got {config.block_q}"
    for name in ("stages", "ds_stages"):
        value = getattr(config, name)
        if value < 1 or value & (value - 1):
            return f"{name} must be a power of two, got {value}"
    if traits.head_dim % 32 or traits.head_dim_v % 32:
        return f"head dims must be multiples of 32, got {traits.head_dim}, {traits.head_dim_v}"
    rows, columns = dq_part(config, traits)
    narrow = columns < traits.head_dim and columns % 64
    if rows % KEYS or narrow:
        return f"dq_parts must leave 64 rows or 64 columns, got {config.dq_parts}"
    if config.other_registers % 8:
        return f"other_registers must be a multiple of 8, got {config.other_registers}"
    if config.polynomial_every < 0:
        return f"polynomial_every must not be negative, got {config.polynomial_every}"
    if config.pass_unseen and config.turned_sections:
        return "pass_unseen needs walks from the first queries to the last, so no turned_sections"
    if config.quick_end and traits.head_dim != traits.head_dim_v:
        return "quick_end needs one head dim: dK leaves through V"
    if (why := _why_not_persistent(config, traits)) is not None:
        return why
    if (used := shared_memory_bytes(config, traits)) > SHARED_MEMORY_BYTES:
        return f"needs {used} bytes of shared memory, a block has {SHARED_MEMORY_BYTES}"
    for have, need in zip(registers(config), accumulator_registers(config, traits), strict=True):
        if need + RESERVED_REGISTERS > have:
            return f"needs about {need + RESERVED_REGISTERS} registers a thread, has {have}"
    return None


def _why_not_persistent(config: BackwardConfig, traits: BackwardTraits) -> str | None:
    """Why a block of threads cannot take several blocks of keys, or None."""
    if config.ordered:
        if not config.persistent or traits.deterministic:
            return "ordered needs persistent, and no turns"
        if traits.has_left and not traits.has_right:
            return "ordered needs a window bounded on both sides, or none"
    if config.zeros_ahead and not config.ordered:
        return "zeros_ahead needs ordered"
    if (config.statistics_ahead or config.results_behind) and not config.zeros_ahead:
        return "statistics_ahead and results_behind need zeros_ahead"
    if not config.persistent:
        return None
    if not config.helpers or traits.has_tails:
        return "persistent needs helpers and dense sequences"
    if traits.deterministic and not (traits.has_left or traits.has_right):
        return "persistent in turns needs a mask: without one a block may wait for a later one"
    return None


def backward_traits(problem: AttentionProblem) -> BackwardTraits:
    """The compile key of a problem."""
    return BackwardTraits(
        head_dim=padded(problem.head_dim),
        head_dim_v=padded(problem.head_dim_v),
        dtype=problem.dtype,
        has_left=problem.window_left is not None,
        has_right=problem.causal or problem.window_right is not None,
        softcap=problem.softcap > 0,
        varlen=problem.varlen,
        seqused=problem.seqused,
        deterministic=problem.deterministic,
    )


def backward_config(problem: AttentionProblem, arch: Arch) -> BackwardConfig | RolesConfig:
    """The tile for a problem."""
    traits = backward_traits(problem)
    for config in _candidates(traits):
        if isinstance(config, BackwardConfig) and _persists(traits):
            return _persistent(config, problem, arch)
        if isinstance(config, BackwardConfig) and persists_when_short(problem):
            return replace(config, helpers=True, other_registers=72, persistent=arch.num_units)
        return config
    raise AssertionError(f"no backward tile for {traits}")  # `refuses` lets none of these through


def _persists(traits: BackwardTraits) -> bool:
    """Where persistent blocks have measured faster at 16k: causal windows, head dim 64 / 128, 390
    and 454 TFLOP/s for 374 and 436; deterministic causal at 128, 548 for 537. (At 64 532 for 543;
    without turns and window 1 % slower, 3 % at 4k.)"""
    if traits.head_dim != traits.head_dim_v or traits.has_tails or not traits.has_right:
        return False
    if traits.deterministic:
        return traits.head_dim == 128 and not traits.has_left
    return traits.head_dim in (64, 128) and traits.has_left


def persists_when_short(problem: AttentionProblem) -> bool:
    """Where a multiprocessor has many short walks and persistent blocks measured faster, without a
    window or turns, TFLOP/s: head dim 64, causal, 1k 332 for 291, 2k 423 for 391, 4k 482 for 464,
    full 1k 433 for 416 (4k 521 for 522); 128, causal, 1k 361 for 343, 2k 457 for 444, full 1k 485
    for 459."""
    longest = max(problem.seqlen_q, problem.seqlen_k)
    dims = (problem.head_dim, problem.head_dim_v)
    plain = not (problem.deterministic or problem.varlen or problem.seqused or problem.softcap > 0)
    plain &= problem.window_left is None and problem.window_right is None
    if not plain or dims not in ((64, 64), (128, 128)):
        return False
    if not problem.causal:
        return longest <= 1024
    return longest <= (4096 if dims[0] == 64 else 2048)


def _persistent(config: BackwardConfig, problem: AttentionProblem, arch: Arch) -> BackwardConfig:
    """The tile with one block of threads a multiprocessor."""
    window = problem.causal and problem.window_left is not None
    return replace(
        config,
        helpers=True,
        other_registers=72,
        persistent=arch.num_units,
        overlapped=True,
        ordered=window,
        zeros_ahead=window and rows_meet_as_ordered(problem),
    )


def rows_meet_as_ordered(problem: AttentionProblem) -> bool:
    """Whether `blocks.KeyOrder` says which blocks of keys meet the queries at a block's keys: as
    many queries as keys, all seen, or a causal mask with or without a window."""
    unbounded = problem.window_left is None and problem.window_right is None
    dense = not (problem.varlen or problem.seqused)
    return dense and problem.seqlen_q == problem.seqlen_k and (problem.causal or unbounded)


def prepared_ahead(
    config: BackwardConfig, problem: AttentionProblem, arch: Arch
) -> BackwardConfig | None:
    """A tile's variant in which idle warps do most of what the kernels before and after do, for
    measurements; None where it cannot run."""
    traits = backward_traits(problem)
    if not rows_meet_as_ordered(problem) or traits.deterministic:
        return None
    changed = replace(
        config,
        helpers=True,
        other_registers=64,
        persistent=arch.num_units,
        overlapped=True,
        ordered=True,
        zeros_ahead=True,
        statistics_ahead=True,
        results_behind=True,
        quick_end=True,
    )
    return changed if why_invalid(changed, traits) is None else None


def _candidates(traits: BackwardTraits) -> list[BackwardConfig | RolesConfig]:
    """Tiles from best to least, by head dim."""
    widest = max(traits.head_dim, traits.head_dim_v)
    if widest > 128 or traits.softcap:
        return [*roles.candidates(traits)]
    if widest <= 64:
        tiles = [BackwardConfig(block_q=128, dq_parts=2)]
    else:
        tiles = [BackwardConfig(block_q=64, dq_parts=2 if traits.head_dim == 128 else 1)]
    if _helped(traits):
        turned = int(traits.deterministic and traits.has_right and not traits.has_left)
        helped = {"helpers": True, "other_registers": 72, "turned_sections": turned}
        tiles.insert(0, replace(tiles[0], **helped))
    elif _passes_unseen(traits):
        tiles.insert(0, replace(tiles[0], pass_unseen=True))
    return [config for config in tiles if why_invalid(config, traits) is None]


def _helped(traits: BackwardTraits) -> bool:
    """Where helpers have measured faster: in turns, and at head dim 128 without a window."""
    if traits.head_dim != traits.head_dim_v or traits.head_dim not in (64, 128):
        return False
    if traits.deterministic:
        return not traits.varlen
    return traits.head_dim == 128 and not traits.has_left


def _passes_unseen(traits: BackwardTraits) -> bool:
    """Where it has measured faster: head dim 128, causal, window 1,024, 409 TFLOP/s for 403. Blocks
    of 128 queries, to head dim 64, are seen by all keys of a block."""
    dense = not (traits.deterministic or traits.has_tails)
    window = traits.has_left and traits.has_right
    return traits.head_dim == traits.head_dim_v == 128 and window and dense


def run_together(
    problem: AttentionProblem, config: BackwardConfig | RolesConfig, arch: Arch
) -> bool:
    """Whether all blocks of keys of a head are on the device at once: one a multiprocessor, or a
    pair on two, and numbered one after the other. A deterministic backward without a mask may then
    let each wait for any other."""
    num_blocks = -(-problem.seqlen_k // keys_per_block(config))
    places = arch.num_units
    if isinstance(config, RolesConfig) and config.pair:
        places //= 2
    return problem.deterministic and not problem.varlen and num_blocks <= places


def heads_per_section(problem: AttentionProblem, arch: Arch) -> int:
    """Key/value heads whose queries, output gradients and fp32 dQ stay in L2 together: a power of
    two; 1 where all blocks of a head are equally long, or must run one head after the other.
    Deterministic, turns of several heads interleave, so that each has time to be handed on. At
    least as many as have a block of keys for most multiprocessors: the longest walks of the last
    section start last of all, and with few blocks a section most multiprocessors end before them
    (32 over 8 heads, 2 x 8k: by list scheduling 12 % of the time, 1 % with two heads)."""
    bounded = problem.window_right is not None or problem.window_left is not None
    if not (problem.causal or bounded):
        return 1
    if problem.deterministic:
        return ORDERED_HEADS if _helped(backward_traits(problem)) else 1
    row_bytes = itemsize_bytes(problem.dtype) * (problem.head_dim + problem.head_dim_v)
    row_bytes += 4 * problem.head_dim
    head_bytes = problem.seqlen_q * row_bytes * problem.heads / max(1, problem.kv_heads)
    section, least = 1, _least_section(problem, arch)
    limit = problem.batch * problem.kv_heads
    while section * 2 <= limit:
        if section >= least and section * 2 * head_bytes > 0.8 * arch.l2_bytes:
            break
        section *= 2
    return section


def _least_section(problem: AttentionProblem, arch: Arch) -> float:
    """Heads with a block of keys for three quarters of the blocks of threads that run at once;
    fewer do where all walks are about as long."""
    if problem.window_left is not None:
        return 1
    config = backward_config(problem, arch)
    pair = isinstance(config, RolesConfig) and config.pair
    places = arch.num_units // (2 if pair else 1)
    return 0.75 * places / max(1, -(-problem.seqlen_k // keys_per_block(config)))


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    """Why this implementation does not take a backward, or None."""
    if (why := why_unsupported(problem)) is not None:
        return why
    if not _candidates(backward_traits(problem)):
        dims = problem.head_dim, problem.head_dim_v
        packed = " of packed sequences" if problem.varlen else ""
        capped = " with softcap" if problem.softcap > 0 else ""
        return f"no backward tile for head dims {dims}{packed}{capped}"
    return why_unverified(problem)
