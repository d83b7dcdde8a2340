"""The blocks a tile of queries visits, against a brute force over every query-key pair."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.kernels.attention.cute.blocks import (
    LANES,
    UNBOUNDED,
    Integer,
    Walk,
    block_range,
    narrowed,
    query_range,
    sampled,
    turn,
)

SHAPES = {
    "seqlen_q": st.integers(1, 300),
    "seqlen_k": st.integers(1, 300),
    "left": st.none() | st.integers(0, 200),
    "right": st.none() | st.integers(-40, 100),
}


def _sees(i: int, j: int, lengths: tuple[int, int], window: tuple[int | None, int | None]) -> bool:
    shift = lengths[1] - lengths[0]
    left, right = window
    return (left is None or j >= i + shift - left) and (right is None or j <= i + shift + right)


WINDOWS = [(None, None), (None, 0), (None, 3), (5, 0), (2, 9), (0, 0), (7, None), (None, -2)]
LENGTHS = [(1, 1), (7, 7), (16, 5), (5, 16), (33, 33), (12, 40), (40, 12)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_visible_pair_is_visited_and_full_blocks_hide_nothing(lengths, window) -> None:
    seqlen_q, seqlen_k = lengths
    for rows, block in itertools.product((4, 8), (4, 6)):
        for first_row in range(0, seqlen_q, rows):
            got = block_range(first_row, rows, block, lengths, window)
            for j in range((seqlen_k + block - 1) // block * block):
                hidden = [
                    j >= seqlen_k or not _sees(i, j, lengths, window)
                    for i in range(first_row, min(first_row + rows, seqlen_q))
                ]
                index = j // block
                if not all(hidden):
                    assert got.begin <= index < got.end
                if got.full_begin <= index < got.full_end and got.begin <= index < got.end:
                    assert not any(hidden)


def test_unbounded_side_equals_no_side() -> None:
    for lengths, first_row in itertools.product(LENGTHS, (0, 8, 32)):
        bounded = block_range(first_row, 8, 4, lengths, (UNBOUNDED, UNBOUNDED))
        free = block_range(first_row, 8, 4, lengths, (None, None))
        assert bounded == free


def test_causal_visits_no_block_that_is_all_hidden() -> None:
    for first_row in range(0, 64, 16):
        got = block_range(first_row, 16, 8, (64, 64), (None, 0))
        assert (got.begin, got.end) == (0, (first_row + 16) // 8)
        assert got.full_end == (first_row + 1) // 8


@settings(max_examples=40, deadline=None)
@given(**SHAPES)
def test_query_range_covers_exactly_what_the_keys_see(
    seqlen_q: int, seqlen_k: int, left: int | None, right: int | None
) -> None:
    keys, block = 64, 32
    shift = seqlen_k - seqlen_q
    for first_key in range(0, seqlen_k, keys):
        found = query_range(first_key, keys, block, (seqlen_q, seqlen_k), (left, right))
        for query_block in range(-(-seqlen_q // block)):
            rows = range(query_block * block, min(seqlen_q, (query_block + 1) * block))
            seen = [
                (left is None or key >= i + shift - left)
                and (right is None or key <= i + shift + right)
                for i in rows
                for key in range(first_key, first_key + keys)
            ]
            exists = [key < seqlen_k for _ in rows for key in range(first_key, first_key + keys)]
            visited = found.begin <= query_block < found.end
            assert visited or not any(s and e for s, e in zip(seen, exists, strict=True))
            if visited and found.full_begin <= query_block < found.full_end:
                assert all(seen)


@settings(max_examples=40, deadline=None)
@given(**SHAPES, together=st.booleans(), down=st.booleans())
def test_turns_are_a_permutation_and_nobody_waits_forever(
    seqlen_q: int, seqlen_k: int, left: int | None, right: int | None, together: bool, down: bool
) -> None:
    """Every block of keys walks its queries and may add only in its turn; blocks start in order,
    all at once (together) or one at a time as others end, the worst case. Under a mask the last
    keys start first; down (causal only): the first do, and walk from the last queries."""
    keys, block = 64, 32
    shift = seqlen_k - seqlen_q
    num_keys, num_queries = -(-seqlen_k // keys), -(-seqlen_q // block)
    down = down and left is None and right is not None
    walk = Walk(num_keys, num_queries, shift, block, keys, together, Integer, down or None)
    walks = []
    for n in range(num_keys):
        r = query_range(n * keys, keys, block, (seqlen_q, seqlen_k), (left, right))
        order = list(range(r.begin, r.end))
        if together and left is None and right is None:
            first = n * r.end // num_keys
            order = order[first:] + order[:first]
        walks.append(order[::-1] if down else order)
    ranks = {m: [] for m in range(num_queries)}
    for n, order in enumerate(walks):
        for m in order:
            ranks[m].append(turn(n, m, walk, (left, right)))
    for m, found in ranks.items():
        assert sorted(found) == list(range(len(found))), m
    done = dict.fromkeys(ranks, 0)
    bounded = (left is not None or right is not None) and not down
    starting = list(range(num_keys))[:: -1 if bounded else 1]
    running = starting if together else starting[:1]
    waiting = [] if together else starting[1:]
    position = [0] * num_keys
    while running:
        moved = False
        for n in list(running):
            while position[n] < len(walks[n]):
                m = walks[n][position[n]]
                if done[m] != turn(n, m, walk, (left, right)):
                    break
                done[m] += 1
                position[n] += 1
                moved = True
            if position[n] == len(walks[n]):
                running.remove(n)
                moved = True
                if waiting:
                    running.append(waiting.pop(0))
        assert moved, "every running block waits"


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65, 1000, 1025, 3000])
def test_a_warp_finds_the_sequence_of_a_tile(count: int) -> None:
    """Every fifth sequence is empty; each number of a tile, and the one between two sequences that
    is nobody's, belongs to the last that begins no later. Rounds: one for each factor of 32."""
    lengths = [0 if b % 5 == 3 else b * 37 % 300 for b in range(count)]
    firsts, start = [], 0
    for b, length in enumerate(lengths):
        firsts.append(start // 64 + b)
        start += length
    for number in {*firsts, *(first + 1 for first in firsts), start // 64 + count - 1}:
        low, high, rounds = 0, count, 0
        while high - low > 1:
            begun = sum(firsts[sampled(low, high, lane)] <= number for lane in range(LANES))
            low, high = narrowed(low, high, begun)
            rounds += 1
        assert low == max(b for b in range(count) if firsts[b] <= number)
        assert LANES ** (rounds - 1) < count or rounds == 0
