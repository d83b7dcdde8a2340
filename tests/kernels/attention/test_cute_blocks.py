"""The blocks a tile of queries visits, against a brute force over every query-key pair."""

from __future__ import annotations

import itertools

import pytest

from ridgeline.kernels.attention.cute.blocks import UNBOUNDED, block_range


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
