"""Tile configurations of the Hopper forward, and what they cost; needs no DSL.

A block of threads is one producer warpgroup (one warp of it works) and `num_warpgroups` consumers
of 64 query rows each. Shared memory holds Q (which O reuses on its way out where space is short)
and rings of K and V; registers hold S [64, block_k], P (16 bit) and O [64, head_dim_v].
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.dtypes import itemsize_bytes

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
    """Of Q and K, as stored; a multiple of 16."""
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
    ping_pong: bool = True
    """Warpgroups take turns at the tensor cores."""
    lazy_log2: float = 8.0
    """Growth of a row's maximum, in powers of two, that O is not rescaled for; 0 rescales always."""
    output_reuses_q: bool = False
    """O leaves through Q's shared memory."""
    persistent: bool = True
    """Blocks of threads take tiles from a queue instead of one each."""
    poly_every: int = 0
    """Every so-manyth exponential is a polynomial on the FMA units instead of MUFU; 0 is none."""


def rows_per_block(config: ForwardConfig) -> int:
    """Query rows of a block of threads."""
    return ROWS * config.num_warpgroups


def shared_memory_bytes(config: ForwardConfig, traits: ForwardTraits) -> int:
    """Shared memory of a block of threads."""
    size = itemsize_bytes(traits.dtype)
    rows = rows_per_block(config)
    q = rows * traits.head_dim
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
    if traits.varlen and config.num_warpgroups == 2:
        return 40, 232  # finding a tile among packed sequences takes more than 24
    return REGISTERS[config.num_warpgroups]


def why_invalid(config: ForwardConfig, traits: ForwardTraits) -> str | None:
    """Why a config cannot run these traits, or None."""
    if config.num_warpgroups not in REGISTERS:
        return f"num_warpgroups must be 1, 2 or 3, got {config.num_warpgroups}"
    if config.block_k % 16 or not 16 <= config.block_k <= 256:
        return f"block_k must be a multiple of 16 in 16..256, got {config.block_k}"
    if config.stages < 1 or config.stages & (config.stages - 1):
        return f"stages must be a power of two, got {config.stages}"
    if traits.head_dim % 32 or traits.head_dim_v % 32:
        return f"head dims must be multiples of 32, got {traits.head_dim}, {traits.head_dim_v}"
    if config.output_reuses_q and traits.head_dim_v > traits.head_dim:
        return "output_reuses_q needs head_dim_v <= head_dim"
    if (used := shared_memory_bytes(config, traits)) > SHARED_MEMORY_BYTES:
        return f"needs {used} bytes of shared memory, a block has {SHARED_MEMORY_BYTES}"
    have = registers(config, traits)[1]
    if (need := consumer_registers(config, traits)) > min(have, 255):
        return f"needs about {need} registers a thread, a consumer has {have}"
    return None
