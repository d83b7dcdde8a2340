"""Tiles of the Hopper WGMMA kernel, what a model of its time takes them to cost, and how a layer's
tiles are given to blocks (config.py chooses)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A tile of the WGMMA kernel, and what a model of its time takes it to cost (microseconds)."""

    block_m: int
    consumers: int
    row_mmas: int
    stages: int
    halves: int
    blocks_per_sm: int
    above: int
    """Considered for more rows than this ..."""
    most: int
    """... and at most this."""
    start: float
    step: float
    """128 inputs, with no other block running ..."""
    step_shared: float
    """... and for each block an SM on average besides."""
    cluster: float
    """Sums through the cluster's shared memory."""
    even: float
    """Tiles cut into equal parts, sums through memory."""
    even_part: float
    uneven: float
    """Stream-K."""
    uneven_part: float


def tile_of(shape: tuple, rows: tuple, costs: tuple) -> Tile:
    names = [name for name in Tile.__dataclass_fields__]
    return Tile(**dict(zip(names, (*shape, *rows, *costs), strict=True)))


# Fitted to 330 timings of six layers (H200, docs/log/w4a16.md): ranks plans, foretells no time.
MANY = 1 << 30
MATMUL_TILES = (
    tile_of((16, 2, 1, 8, 2, 2), (0, 16), (0.15, 0.246, 0.345, 0.27, 1.22, 0.03, 0.0, 0.86)),
    tile_of((16, 4, 1, 9, 2, 1), (0, 16), (0.53, 0.351, 0.528, 0.25, 3.82, 0.23, 15.7, 0.2)),
    tile_of((32, 2, 1, 5, 2, 2), (16, 32), (3.24, 0.199, 0.236, 0.33, 0.02, 0.17, 0.19, 0.35)),
    tile_of((32, 4, 1, 7, 2, 1), (16, 32), (1.28, 0.443, 0.196, 0.0, 3.35, 0.08, 6.77, 0.1)),
    tile_of((64, 2, 1, 6, 1, 2), (32, 64), (2.67, 0.034, 0.362, 0.11, 0.0, 0.04, 2.39, 0.58)),
    tile_of((64, 4, 1, 5, 2, 1), (32, 64), (0.65, 0.38, 0.273, 0.34, 2.0, 0.64, 17.2, 0.99)),
    tile_of((128, 2, 1, 7, 1, 1), (64, MANY), (3.0, 0.55, 0.174, 0.76, 2.79, 0.05, 7.21, 0.17)),
    tile_of((128, 2, 2, 6, 1, 1), (64, MANY), (0.56, 0.873, 0.475, 0.13, 38.7, 0.32, 13.1, 0.54)),
    tile_of((256, 2, 1, 4, 1, 1), (128, MANY), (0.05, 0.732, 0.622, 0.0, 8.0, 1.36, 34.0, 1.36)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a layer's tiles are given to blocks."""

    waves: int
    blocks: int
    """Where K is split, more than tiles want: the first tiles again, to the same bits. A
    multiprocessor left over would take more blocks of the next layer than the others."""
    cluster: int = 1
    parts: int = 1
    """Parts of K of a tile whose blocks add in shares, without a cluster."""
    cast: int = 1
