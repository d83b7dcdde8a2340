"""Tiles of the Hopper backward whose warpgroups divide the products, and what they cost; needs no
DSL.

For head dims whose dK and dV do not fit one warpgroup's registers, and for softcap: of 64 keys one
warpgroup computes S^T, P and dV, one dP^T, dS and dK, a third dQ, and one more loads. Two blocks of
threads may form a pair: 64 keys each, Q and dO by multicast to both, dS of both to the one whose
turn at dQ it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ridgeline.core.dtypes import itemsize_bytes
from ridgeline.kernels.attention.cute_sm90_config import BARRIER_BYTES, ROWS, SHARED_MEMORY_BYTES

if TYPE_CHECKING:
    from ridgeline.kernels.attention.cute_sm90_backward_config import BackwardTraits

LAUNCHED_REGISTERS = 128
"""A thread's at launch: four warpgroups share the register file."""
MARGIN_REGISTERS = 24
"""Beside accumulators and operand A; a role has two products, so fewer addresses than others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolesConfig:
    """Tile and schedule of the backward by roles."""

    block_q: int = ROWS
    """Queries of a step: the M of dQ."""
    stages: int = 2
    """Blocks of Q in flight; a power of two."""
    do_stages: int = 2
    """Blocks of dO in flight; a power of two."""
    pair: bool = False
    """Two blocks of threads share their loads and their dQ."""
    dq_registers: int = 72
    """Registers a thread of the warpgroup that computes dQ."""
    load_registers: int = 24

    @property
    def num_warpgroups(self) -> int:
        """Tiles of 64 keys that walk together, as the other backward counts its warpgroups."""
        return 2 if self.pair else 1

    @property
    def dq_bulk(self) -> bool:
        """dQ goes out from registers."""
        return False


def dq_columns(traits: BackwardTraits) -> int:
    """Columns of dQ that are computed at a time: what a swizzled row of K can be cut into."""
    return 64 if traits.head_dim % 64 == 0 else 32


def shared_memory_bytes(config: RolesConfig, traits: BackwardTraits) -> int:
    """Shared memory of a block of threads."""
    tile = config.block_q * ROWS
    values = config.num_warpgroups * ROWS * traits.head_dim  # K of the pair, for dQ
    values += ROWS * traits.head_dim_v
    values += config.block_q * config.stages * traits.head_dim
    values += config.block_q * config.do_stages * traits.head_dim_v
    values += tile * pieces(config) + tile  # dS, and P on its way between two warpgroups
    statistics = 4 * 2 * config.block_q * config.stages
    return BARRIER_BYTES + itemsize_bytes(traits.dtype) * values + statistics


def pieces(config: RolesConfig) -> int:
    """Tiles of dS in shared memory: two stages; of a pair one from each, and one on its way out."""
    return 3 if config.pair else 2


def registers(config: RolesConfig) -> tuple[int, int, int]:
    """(dQ, loads, scores and gradients): registers a thread after setmaxnreg, multiples of 8 that
    together are those of the launch."""
    rest = 4 * LAUNCHED_REGISTERS - config.dq_registers - config.load_registers
    return config.dq_registers, config.load_registers, min(240, rest // 2 // 8 * 8)


def accumulator_registers(traits: BackwardTraits) -> int:
    """Registers a thread of a warpgroup with sums: a score tile, P or dS in 16 bits, dK or dV."""
    scores = ROWS * ROWS // 128
    return scores + scores // 2 + ROWS * max(traits.head_dim, traits.head_dim_v) // 128


def why_invalid(config: RolesConfig, traits: BackwardTraits) -> str | None:
    """Why a config cannot run these traits, or None."""
    if config.block_q != ROWS:
        return f"block_q must be {ROWS}, got {config.block_q}"
    for name in ("stages", "do_stages"):
        value = getattr(config, name)
        if value < 1 or value & (value - 1):
            return f"{name} must be a power of two, got {value}"
    if traits.head_dim % 32 or traits.head_dim_v % 32:
        return f"head dims must be multiples of 32, got {traits.head_dim}, {traits.head_dim_v}"
    if max(traits.head_dim, traits.head_dim_v) > 256:
        return f"head dims must be at most 256, got {traits.head_dim}, {traits.head_dim_v}"
    if config.dq_registers % 8 or config.load_registers % 8:
        return "registers must be multiples of 8"
    if (used := shared_memory_bytes(config, traits)) > SHARED_MEMORY_BYTES:
        return f"needs {used} bytes of shared memory, a block has {SHARED_MEMORY_BYTES}"
    have, need = registers(config)[2], accumulator_registers(traits) + MARGIN_REGISTERS
    if need > have:
        return f"needs about {need} registers a thread, has {have}"
    return None


def candidates(traits: BackwardTraits) -> list[RolesConfig]:
    """Tiles from best to least: as many stages as fit."""
    tiles = [
        RolesConfig(pair=pair, do_stages=do_stages)
        for pair in (True, False)
        for do_stages in (2, 1)
    ]
    if _narrow_values(traits):
        tiles.insert(0, RolesConfig(pair=True, stages=4))
    return [config for config in tiles if why_invalid(config, traits) is None]


def _narrow_values(traits: BackwardTraits) -> bool:
    """Where four blocks of Q in flight have measured faster: (192, 128), causal, 471 TFLOP/s for
    456. They fill shared memory to the byte."""
    plain = not (traits.has_left or traits.softcap or traits.deterministic or traits.has_tails)
    return (traits.head_dim, traits.head_dim_v) == (192, 128) and traits.has_right and plain
