"""The order of tiles is a permutation, long tiles first inside a section."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")

from ridgeline.kernels.attention.cute.scheduler import TileOrder


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
