"""Dense little-endian packing of small unsigned codes into int32 words along one dim.

A block of 32 / gcd(bits, 32) codes fills bits / gcd(bits, 32) words: 8 codes a word for 4 bits, 32
codes in 3 words for 3 bits. Code j of a block occupies bits [j * bits, (j + 1) * bits) of the
block's words taken as one little-endian number, so a 3-bit code may straddle two words.
Golden words: codes 0..7 at 4 bits -> 0x76543210; codes i mod 8, i < 32, at 3 bits -> 0x88FAC688
0xC688FAC6 0xFAC688FA.
"""

from __future__ import annotations

import math
import sys

import torch

from ridgeline.core.errors import bad_value


def codes_per_block(bits: int) -> int:
    """Codes that fill a whole number of words: what a packed dim must be a multiple of."""
    return 32 // math.gcd(bits, 32)


def packed_words(count: int, bits: int) -> int:
    """Words that `count` codes take (count a multiple of codes_per_block)."""
    return count * bits // 32


def pack_bits(codes: torch.Tensor, bits: int, dim: int, *, op: str = "pack") -> torch.Tensor:
    """Pack unsigned codes (< 2^bits) along `dim` into int32 words.

    Raises: ValueError when the dim is no multiple of the block.
    """
    block = codes_per_block(bits)
    count = codes.shape[dim]
    if count % block:
        raise bad_value(
            op, f"dim {dim}", f"be a multiple of {block} at {bits} bits", count, "pad the weight"
        )
    codes = codes.movedim(dim, -1)
    codes = codes.reshape(*codes.shape[:-1], count // block, block)
    words = [
        torch.zeros(codes.shape[:-1], dtype=torch.int64, device=codes.device)
        for _ in range(packed_words(block, bits))
    ]
    for j in range(block):
        word, shift = divmod(j * bits, 32)
        code = codes[..., j].long()
        words[word] |= (code << shift) & 0xFFFFFFFF
        if shift + bits > 32:
            words[word + 1] |= code >> (32 - shift)
    packed = torch.stack(words, dim=-1).flatten(-2)
    # Above 2^31 the int32 container holds the same bits as a negative number.
    signed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return signed.movedim(-1, dim).contiguous()


def unpack_bits(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The inverse of pack_bits: uint8 codes.

    Raises: ValueError when the words do not fill whole blocks.
    """
    block = codes_per_block(bits)
    per_block = packed_words(block, bits)
    count = words.shape[dim]
    if count % per_block:
        raise bad_value(
            "unpack",
            f"dim {dim}",
            f"be a multiple of {per_block} words at {bits} bits",
            count,
            "check the bit width in the config",
        )
    words = words.movedim(dim, -1)
    if bits in (4, 8) and words.dtype == torch.int32 and sys.byteorder == "little":
        return _unpack_bytes(words, bits).movedim(-1, dim).contiguous()
    words = words.reshape(*words.shape[:-1], count // per_block, per_block).long() & 0xFFFFFFFF
    mask = 2**bits - 1
    codes = []
    for j in range(block):
        word, shift = divmod(j * bits, 32)
        code = words[..., word] >> shift
        if shift + bits > 32:
            code = code | (words[..., word + 1] << (32 - shift))
        codes.append((code & mask).to(torch.uint8))
    return torch.stack(codes, dim=-1).flatten(-2).movedim(-1, dim).contiguous()


def _unpack_bytes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """4- and 8-bit codes along the last dim, without wider integers: a word's bytes in memory are
    its codes, two to a byte at 4 bits, the low half first."""
    whole = words.contiguous().view(torch.uint8)
    if bits == 8:
        return whole
    return torch.stack((whole & 15, whole >> 4), dim=-1).flatten(-2)


def pack_padded(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """pack_bits for any count: the last word is filled with zero bits, ceil(count bits / 32)
    words."""
    count = codes.shape[dim]
    words = pack_bits(_lengthened(codes, -count % codes_per_block(bits), dim), bits, dim)
    return words.narrow(dim, 0, -(-count * bits // 32)).contiguous()


def unpack_padded(words: torch.Tensor, bits: int, dim: int, count: int) -> torch.Tensor:
    """The first `count` codes of words that pack_padded made: uint8.

    Raises: ValueError when the words are not those of `count` codes.
    """
    if words.shape[dim] != -(-count * bits // 32):
        raise bad_value(
            "unpack",
            f"dim {dim}",
            f"be {-(-count * bits // 32)} words for {count} codes of {bits} bits",
            words.shape[dim],
            "check the bit width in the config",
        )
    per_block = packed_words(codes_per_block(bits), bits)
    whole = _lengthened(words, -words.shape[dim] % per_block, dim)
    return unpack_bits(whole, bits, dim).narrow(dim, 0, count).contiguous()


def _lengthened(tensor: torch.Tensor, by: int, dim: int) -> torch.Tensor:
    """`by` zeros appended along a dim."""
    if by == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = by
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def add_to_words(words: torch.Tensor, pattern: int) -> torch.Tensor:
    """words + pattern modulo 2^32 on int32 containers (carries run between fields)."""
    total = (words.long() + pattern) & 0xFFFFFFFF
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)
