"""Tiles cut along their keys: every key block once, pieces in order, and their merge."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.kernels.attention.cute.tail import MOST_UNITS, Parts, Tail, tail


@st.composite
def tails(draw: st.DrawFn) -> tuple[Tail, int, int]:
    """(tail, tiles, multiprocessors), with as many ranges as a launch may ask for."""
    num_tiles, num_units = draw(st.integers(1, 400)), draw(st.integers(1, 150))
    blocks = draw(st.integers(1, 40))
    ranges = draw(st.integers(num_tiles % num_units, num_units))
    return tail(num_tiles, num_units, blocks, ranges), num_tiles, num_units


def pieces_of(cut: Tail, item: int) -> list[tuple[int, int, int]]:
    """(tile, first key block, behind the last) of an item, as the producer walks them."""
    first, begin, end = cut.span(item)
    found = []
    while begin < end:
        tile = begin // cut.blocks
        of_tile = begin - tile * cut.blocks
        count = min(cut.blocks - of_tile, end - begin)
        found.append((first + tile, of_tile, of_tile + count))
        begin += count
    return found


@settings(max_examples=300, deadline=None)
@given(tails())
def test_every_key_block_of_every_tile_is_visited_once(case: tuple[Tail, int, int]) -> None:
    cut, num_tiles, num_units = case
    assert 0 <= cut.left < num_units and cut.whole % num_units == 0
    seen = [0] * (num_tiles * cut.blocks)
    for item in range(cut.items()):
        pieces = pieces_of(cut, item)
        assert 1 <= len(pieces) <= 2
        if item < cut.whole:
            assert pieces == [(item, 0, cut.blocks)]
        for tile, begin, end in pieces:
            assert begin < end <= cut.blocks
            for block in range(begin, end):
                seen[tile * cut.blocks + block] += 1
    assert seen == [1] * len(seen)


@settings(max_examples=300, deadline=None)
@given(tails())
def test_ranges_differ_by_one_block_at_most(case: tuple[Tail, int, int]) -> None:
    cut, _, _ = case
    lengths = [end - begin for _, begin, end in map(cut.span, range(cut.whole, cut.items()))]
    assert not lengths or max(lengths) - min(lengths) <= 1 and min(lengths) >= 1


@settings(max_examples=300, deadline=None)
@given(tails())
def test_a_tiles_pieces_lie_together_in_the_order_of_their_keys(
    case: tuple[Tail, int, int],
) -> None:
    cut, _, _ = case
    of_tile: dict[int, list[tuple[int, Parts]]] = {}
    places = set()
    for item in range(cut.whole, cut.items()):
        for tile, begin, end in pieces_of(cut, item):
            if end - begin == cut.blocks:
                continue
            parts = cut.parts(item, tile - cut.whole)
            place = parts.first + parts.mine
            assert place == cut.slot(item - cut.whole, tile - cut.whole) and place not in places
            assert 0 <= place < cut.places()
            places.add(place)
            of_tile.setdefault(tile, []).append((begin, parts))
            assert cut.owner((tile - cut.whole) * cut.blocks + begin) == item - cut.whole
    for found in of_tile.values():
        assert [parts.mine for _, parts in sorted(found, key=lambda x: x[0])] == [
            *range(len(found))
        ]
        assert {(p.first, p.count) for _, p in found} == {(found[0][1].first, len(found))}
        assert len(found) >= 2
    firsts = [found[0][1].first for found in of_tile.values()]
    assert len(set(firsts)) == len(firsts)  # each numbers its tile's counters


@given(
    st.integers(0, 2 * MOST_UNITS - 1),
    st.integers(0, MOST_UNITS - 1),
    st.integers(2, MOST_UNITS - 1),
)
def test_parts_fit_one_register(first: int, mine: int, count: int) -> None:
    parts = Parts(first, mine, count)
    assert 0 <= parts.packed() < 2**31
    assert Parts.unpacked(parts.packed()) == parts


def piece(scores: torch.Tensor, v: torch.Tensor, scale: float, grown: torch.Tensor):
    """(O, row maxima, row sums) of a piece in fp32, as the walk leaves them: the shift may lie
    below the maximum by as much as `grown` says, in powers of two."""
    top = scores.amax(-1, keepdim=True)
    shift = torch.where(torch.isinf(top), top, top - grown / scale)
    finite = torch.where(torch.isinf(shift), torch.zeros_like(shift), shift)
    p = torch.exp2((scores - finite) * scale)
    return p @ v, shift, p.sum(-1, keepdim=True)


def merged(pieces: list, scale: float, sink: torch.Tensor | None):
    """(O, LSE): the formulas of forward_tail.py and Softmax.finish, in fp32."""
    top = torch.stack([m for _, m, _ in pieces]).amax(0)
    finite = torch.where(torch.isinf(top), torch.zeros_like(top), top)
    output, total = torch.zeros_like(pieces[0][0]), torch.zeros_like(top)
    for o, m, count in pieces:
        weight = torch.exp2((m - finite) * scale)
        output, total = output + weight * o, total + weight * count
    maximum, factor = top * scale, torch.ones_like(top)
    if sink is not None:
        joint = torch.maximum(maximum, sink * math.log2(math.e))
        factor = torch.exp2(maximum - joint)
        total = total * factor + torch.exp2(sink * math.log2(math.e) - joint)
        maximum = joint
    empty = total == 0
    output = torch.where(empty, torch.zeros_like(output), output * factor / total)
    lse = (maximum + torch.log2(total)) * math.log(2)
    return output, torch.where(empty, torch.full_like(lse, -math.inf), lse)


@settings(max_examples=100, deadline=None)
@given(tails(), st.booleans(), st.integers(0, 2**31), st.sampled_from([0.0, 1.0, 40.0]))
def test_merge_is_the_attention_of_all_keys(
    case: tuple[Tail, int, int], has_sink: bool, seed: int, spread: float
) -> None:
    """Of the last tile: any cuts, shifts below the maxima, pieces far apart, one of -inf alone."""
    cut, num_tiles, _ = case
    chance = torch.Generator().manual_seed(seed)
    rows, dim, keys, scale = 3, 4, 2, 0.7
    bounds = [
        (begin * keys, end * keys)
        for item in range(cut.items())
        for tile, begin, end in pieces_of(cut, item)
        if tile == num_tiles - 1
    ]
    scores = torch.randn(rows, cut.blocks * keys, generator=chance)
    scores += spread * torch.randn(1, cut.blocks * keys, generator=chance)
    scores[0, : bounds[0][1]] = -math.inf
    scores[1] = -math.inf
    v = torch.randn(cut.blocks * keys, dim, generator=chance)
    sink = torch.randn(rows, 1, generator=chance) * 3 if has_sink else None
    grown = [8 * torch.rand(rows, 1, generator=chance) for _ in bounds]
    pieces = [
        piece(scores[:, a:b], v[a:b], scale, g) for (a, b), g in zip(bounds, grown, strict=True)
    ]
    output, lse = merged(pieces, scale, sink)

    exact = scores.double() * scale * math.log(2)
    if sink is not None:
        exact = torch.cat((exact, sink.double()), -1)
        v = torch.cat((v, torch.zeros(1, dim)))
    exact_lse = torch.logsumexp(exact, -1, keepdim=True)
    weights = torch.where(torch.isinf(exact_lse), 0.0, torch.exp(exact - exact_lse))
    torch.testing.assert_close(output.double(), weights @ v.double(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-5, atol=2e-5)


def test_the_shipped_cell_is_cut_into_as_many_ranges_as_multiprocessors() -> None:
    """2,048 tiles of 128 key blocks on 132 multiprocessors: 68 tiles, 66 blocks for each range."""
    cut = tail(2048, 132, 128, 132)
    assert (cut.whole, cut.left, cut.ranges) == (1980, 68, 132)
    lengths = {end - begin for _, begin, end in map(cut.span, range(cut.whole, cut.items()))}
    assert lengths == {65, 66}
    assert max(cut.parts(cut.whole, tile).count for tile in range(cut.left)) == 3
    assert tail(132, 132, 9, 132) == Tail(whole=132, left=0, blocks=9, ranges=0)


@pytest.mark.parametrize("blocks", [1, 2, 131])
def test_fewer_blocks_than_ranges_leave_no_range_empty(blocks: int) -> None:
    cut = tail(133, 132, blocks, 132)
    assert cut.ranges == blocks
    assert [pieces_of(cut, 132 + i) for i in range(blocks)] == [
        [(132, i, i + 1)] for i in range(blocks)
    ]


def test_a_vector_of_a_piece_is_two_columns_of_both_rows() -> None:
    """What `_store_columns` and `_merge` take a thread's accumulator for."""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    from ridgeline.kernels.attention.cute.mask import accumulator_column, accumulator_row

    for element in range(128):
        vector, inside = divmod(element, 4)
        assert accumulator_column(element) == 8 * vector + inside % 2
        assert accumulator_row(element) == inside // 2 == accumulator_row(inside)
