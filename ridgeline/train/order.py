"""The order of samples as a function of one integer: how many were consumed.

    sample(consumed) = permute(consumed mod N; key = (seed, consumed div N, N))

An epoch's permutation of N samples is a Feistel network over the smallest 4^h >= N, iterated until
the result falls below N (cycle walking): a bijection for every key, at O(1) memory and time, so
that the order does not depend on batch size, number of ranks or where a run was interrupted.
Sources: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002 (cycle walking); Steele,
Lea and Flood, "Fast splittable pseudorandom number generators", 2014 (the mixing function); the one
integer: Megatron-LM's consumed samples.
"""

from __future__ import annotations

import numpy as np

from ridgeline.core.errors import bad_value

_ROUNDS = 8


def mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer on uint64 (wraps), elementwise."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(*words: int) -> np.ndarray:
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        state = mix64(state ^ np.uint64(word & 0xFFFFFFFFFFFFFFFF))
    return mix64(state + np.arange(1, _ROUNDS + 1, dtype=np.uint64))


def permute(positions: np.ndarray, *, num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Where an epoch's permutation of `num_samples` puts each position.

    Shapes: positions int64 [n], each in [0, num_samples) -> int64 [n].
    """
    half = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    keys = _round_keys(seed, epoch, num_samples)

    def network(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & low
        for key in keys:
            left, right = right, left ^ (mix64(right ^ key) & low)
        return (left << half) | right

    found = network(positions.astype(np.uint64))
    while (outside := found >= np.uint64(num_samples)).any():
        found[outside] = network(found[outside])
    return found.astype(np.int64)


def sample_order(consumed: int, count: int, *, num_samples: int, seed: int) -> np.ndarray:
    """Indices of the next `count` samples after `consumed` ones, across the ends of epochs.

    Raises: ValueError for a negative count or no samples.
    """
    if num_samples < 1:
        raise bad_value("data", "num_samples", "be at least 1", num_samples, "give more text")
    if consumed < 0 or count < 0:
        raise bad_value(
            "data", "consumed and count", "be at least 0", (consumed, count), "start at 0"
        )
    pieces: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    while count > 0:
        epoch, position = divmod(consumed, num_samples)
        taken = min(count, num_samples - position)
        positions = np.arange(position, position + taken, dtype=np.int64)
        pieces.append(permute(positions, num_samples=num_samples, seed=seed, epoch=epoch))
        consumed, count = consumed + taken, count - taken
    return np.concatenate(pieces)
