"""The order of tiles is a permutation, long tiles first inside a section."""

from __future__ import annotations

import heapq

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from ridgeline.core.arch import KNOWN
from ridgeline.kernels.attention import cute_sm90_backward_config as cfg
from ridgeline.kernels.attention.cute.scheduler import TileOrder
from ridgeline.kernels.attention.cute_sm90_roles_config import RolesConfig
from ridgeline.kernels.attention.problem import AttentionProblem

H200 = KNOWN["sm90"]


@pytest.mark.parametrize("heads_per_section", [1, 2, 4, 16])
@pytest.mark.parametrize(("blocks", "heads", "batches"), [(1, 1, 1), (5, 3, 2), (4, 8, 1)])
def test_order_is_a_permutation(blocks, heads, batches, heads_per_section) -> None:
    order = TileOrder(blocks, heads, batches, heads_per_section)
    tiles = [order.coordinates(t) for t in range(order.num_tiles())]
    seen = set(tiles)
    assert seen == {(m, h, b) for m in range(blocks) for h in range(heads) for b in range(batches)}
    assert len(tiles) == len(seen)


def test_longest_tiles_come_first_in_a_section() -> None:
    order = TileOrder(6, 4, 2, 2)
    for section in range(4):
        tiles = [order.coordinates(section * 12 + t) for t in range(12)]
        assert [block for block, _, _ in tiles] == [5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0]
        assert {batch * 4 + head for _, head, batch in tiles} == {2 * section, 2 * section + 1}


def _makespan(problem: AttentionProblem) -> tuple[float, float]:
    """(steps until the last block of keys has ended, work of each place) of a causal backward whose
    blocks start in their order as places become free; a block costs two steps beside its own."""
    config = cfg.backward_config(problem, H200)
    pair = isinstance(config, RolesConfig) and config.pair
    block_k, group = cfg.keys_per_block(config), problem.heads // problem.kv_heads
    num_blocks, num_queries = problem.seqlen_k // block_k, problem.seqlen_q // config.block_q
    section = cfg.heads_per_section(problem, H200)
    order = TileOrder(num_blocks, problem.kv_heads, problem.batch, section)
    places = [0.0] * (H200.num_units // (2 if pair else 1))
    for tile in range(order.num_tiles()):
        block = num_blocks - 1 - order.coordinates(tile)[0]
        steps = group * (num_queries - block * block_k // config.block_q)
        heapq.heappush(places, heapq.heappop(places) + steps + 2)
    return max(places), sum(places) / len(places)


@pytest.mark.parametrize(
    ("batch", "seqlen", "heads", "kv_heads", "dims"),
    [
        (2, 8192, 32, 8, (128, 128)),  # with one head a section: 2,270 of 2,032
        (1, 16384, 16, 16, (128, 128)),
        (4, 4096, 16, 16, (128, 128)),
        (4, 4096, 32, 8, (128, 128)),
        (2, 8192, 16, 16, (192, 128)),
        (1, 16384, 8, 8, (256, 256)),
        (4, 4096, 32, 32, (64, 64)),
    ],
)
def test_the_longest_walks_do_not_start_last(batch, seqlen, heads, kv_heads, dims) -> None:
    problem = AttentionProblem(
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dims[0],
        head_dim_v=dims[1],
        causal=True,
        direction="bwd",
    )
    end, work = _makespan(problem)
    assert end <= 1.02 * work
