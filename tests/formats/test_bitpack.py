"""Bit packing against worked words and a plain loop; round trips."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.formats.bitpack import (
    add_to_words,
    codes_per_block,
    pack_bits,
    packed_words,
    unpack_bits,
)


def unsigned(words: torch.Tensor) -> list[str]:
    return [f"{word & 0xFFFFFFFF:08X}" for word in words.flatten().tolist()]


def packed_by_hand(codes: list[int], bits: int) -> list[int]:
    """The little-endian number sum code << (j bits), cut into 32-bit words."""
    number = sum(code << (j * bits) for j, code in enumerate(codes))
    return [(number >> (32 * w)) & 0xFFFFFFFF for w in range(len(codes) * bits // 32)]


def test_golden_four_bits() -> None:
    assert unsigned(pack_bits(torch.arange(8, dtype=torch.uint8), 4, 0)) == ["76543210"]


def test_golden_three_bits_cross_words() -> None:
    codes = torch.arange(32, dtype=torch.uint8) % 8
    assert unsigned(pack_bits(codes, 3, 0)) == ["88FAC688", "C688FAC6", "FAC688FA"]


def test_golden_column() -> None:
    """Codes 0..7 along K in one column of [K, N]: packed along dim 0."""
    codes = torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 2)
    words = pack_bits(codes, 4, 0)
    assert words.shape == (1, 2) and unsigned(words) == ["76543210", "76543210"]


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    blocks=st.integers(0, 3),
    rows=st.integers(0, 4),
    dim=st.sampled_from([0, 1]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_round_trip_and_plain_loop(bits: int, blocks: int, rows: int, dim: int, seed: int) -> None:
    count = blocks * codes_per_block(bits)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, count), generator=generator, dtype=torch.uint8)
    by_hand = [packed_by_hand(row.tolist(), bits) for row in codes]
    stored = codes if dim == 1 else codes.T
    words = pack_bits(stored, bits, dim)
    assert words.dtype == torch.int32 and words.shape[dim] == packed_words(count, bits)
    as_rows = words if dim == 1 else words.T
    assert [[w & 0xFFFFFFFF for w in row] for row in as_rows.tolist()] == by_hand
    assert torch.equal(unpack_bits(words, bits, dim), stored)


def test_every_word_survives() -> None:
    """Any int32 words, negative ones too, come back."""
    words = torch.tensor([0, -1, 2**31 - 1, -(2**31), 0x12345678, -0x12345678], dtype=torch.int32)
    for bits in (2, 3, 4, 8):
        assert torch.equal(pack_bits(unpack_bits(words, bits, 0), bits, 0), words)


def test_whole_word_addition_carries_between_fields() -> None:
    """Worked word: v2 zeros 0x8107F080 minus 0x11111111 as a whole is 0x6FF6DF6F."""
    word = torch.tensor([0x6FF6DF6F], dtype=torch.int64).to(torch.int32)
    assert unsigned(add_to_words(word, 0x11111111)) == ["8107F080"]


def test_refuses_a_ragged_dim() -> None:
    with pytest.raises(ValueError, match="pack: dim 0 must be a multiple of 8 at 4 bits, got 12"):
        pack_bits(torch.zeros(12, dtype=torch.uint8), 4, 0)
    with pytest.raises(ValueError, match="unpack: dim 0 must be a multiple of 3 words at 3 bits"):
        unpack_bits(torch.zeros(4, dtype=torch.int32), 3, 0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("shape", "dim"), [((9, 70), 0), ((33, 16), 1), ((1, 1), 0), ((0, 4), 1)])
def test_the_way_through_bytes_is_the_same(bits, shape, dim):
    words = torch.randint(-(2**31), 2**31, shape).to(torch.int32)
    codes = unpack_bits(words, bits, dim)
    assert torch.equal(codes, unpack_bits(words.long(), bits, dim))
    assert codes.dtype == torch.uint8 and codes.is_contiguous()
