"""The dropout mask: a counter-based RNG that every implementation reproduces bit for bit.

Entry (b, h, i, j) is kept when u(b, h, i, j) >= threshold(p), u uniform over the 32-bit integers,
threshold(p) = floor(p * 2^32). b is the sequence, h the query head, i and j the query and key index
inside the sequence as stored (0 is its first row, whatever leftpad or causal alignment say).

1. Row keys, once a row: (r0, r1, _, _) = Philox-4x32-10(counter = (i, h, b, offset),
   key = (seed mod 2^32, seed div 2^32)). In Triton: `tl.philox(seed, i, h, b, offset)` with uint32
   counters and a 64-bit seed.
2. Entry, in uint32 arithmetic that wraps:
       x = r0 + j * 0x9E3779B9
       x = (x ^ (x >> 16)) * 0x7FEB352D
       x = x ^ r1
       x = (x ^ (x >> 15)) * 0x846CA68B
       u = x ^ (x >> 16)
Philox on every entry would cost about 60 integer instructions; this costs 9, and the row keys (64
bits from a strong mixer) keep rows, heads and batches apart. All shifts are logical.

torch has no uint32 arithmetic, so words live in int64 and are masked to 32 bits: products of two
words wrap modulo 2^64, which leaves their low and high halves right.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011 (Philox); the mixer's
constants: Chris Wellons, "Prospecting for hash functions", 2018 (lowbias32).
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
WEYL, MIX_A, MIX_B = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


def threshold(dropout_p: float) -> int:
    """Entries with u below it are dropped: floor(p * 2^32)."""
    return int(dropout_p * 2**32)


def philox(seed: int, counter: tuple[torch.Tensor, ...], rounds: int = 10) -> list[torch.Tensor]:
    """Philox-4x32: four words per counter.

    Shapes: counter = four int64 tensors of words below 2^32 that broadcast together.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(rounds):
        product_a, product_b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c2 = (
            ((product_b >> 32) & _MASK) ^ c1 ^ k0,
            ((product_a >> 32) & _MASK) ^ c3 ^ k1,
        )
        c1, c3 = product_b & _MASK, product_a & _MASK
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return [c0, c1, c2, c3]


def random_words(
    seed: int,
    offset: int,
    batches: torch.Tensor,
    heads: torch.Tensor,
    rows: torch.Tensor,
    cols: torch.Tensor,
) -> torch.Tensor:
    """The words u of some entries.

    Shapes: int64 index tensors that broadcast together, cols varying along the last dim
    (e.g. [B,1,1,1], [H,1,1], [S,1], [T]); result int64 of the broadcast shape, below 2^32.
    """
    like_rows = torch.full_like(rows, offset & _MASK)
    r0, r1, _, _ = philox(seed, (rows, heads, batches, like_rows))
    x = (r0 + cols * WEYL) & _MASK
    x = ((x ^ (x >> 16)) * MIX_A) & _MASK
    x = x ^ r1
    x = ((x ^ (x >> 15)) * MIX_B) & _MASK
    return x ^ (x >> 16)


def keep_mask(
    dropout_p: float,
    seed_offset: tuple[int, int],
    batches: torch.Tensor,
    heads: torch.Tensor,
    rows: torch.Tensor,
    cols: torch.Tensor,
) -> torch.Tensor:
    """True where an entry of P is kept; shapes as in `random_words`."""
    return random_words(*seed_offset, batches, heads, rows, cols) >= threshold(dropout_p)
