"""The dropout mask's function, against numbers worked out apart from it."""

from __future__ import annotations

import torch

from ridgeline.kernels.attention.rng import keep_mask, philox, random_words, threshold


def _words(*values):
    return tuple(torch.tensor(v) for v in values)


def test_philox_known_answers():
    # Known-answer vectors of the Random123 distribution (philox4x32-10)
    zeros = philox(0, _words(0, 0, 0, 0))
    assert [int(w) for w in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    full = 0xFFFFFFFF
    ones = philox((full << 32 | full) - 2**64, _words(full, full, full, full))
    assert [int(w) for w in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def _word_in_python(seed, offset, b, h, i, j):
    r0, r1 = (int(w) for w in philox(seed, _words(i, h, b, offset))[:2])
    mask = 0xFFFFFFFF
    x = (r0 + j * 0x9E3779B9) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x ^= r1
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    return x ^ (x >> 16)


def test_words_equal_plain_python():
    b, h, i, j = (torch.arange(n) for n in (2, 3, 4, 5))
    words = random_words(99 + 2**35, 7, b[:, None, None, None], h[:, None, None], i[:, None], j)
    assert words.shape == (2, 3, 4, 5)
    for index in [(0, 0, 0, 0), (1, 2, 3, 4), (0, 2, 1, 3)]:
        assert int(words[index]) == _word_in_python(99 + 2**35, 7, *index)
    assert int(random_words(5, 0, *_words(0, 0, 2**20, 2**31 + 5))) == _word_in_python(
        5, 0, 0, 0, 2**20, 2**31 + 5
    )


def test_mask_has_the_right_share_everywhere():
    b, h, i, j = (torch.arange(n) for n in (2, 2, 256, 256))
    keep = keep_mask(0.25, (1, 0), b[:, None, None, None], h[:, None, None], i[:, None], j).float()
    # 6 standard deviations of a mean of n coin flips of variance p (1 - p)
    assert abs(float(keep.mean()) - 0.75) < 6 * (0.1875 / keep.numel()) ** 0.5
    assert (keep.mean((0, 1, 2)) - 0.75).abs().max() < 6 * (0.1875 / 1024) ** 0.5
    assert (keep.mean((0, 1, 3)) - 0.75).abs().max() < 6 * (0.1875 / 1024) ** 0.5


def test_rows_and_streams_are_apart():
    b, h, i, j = (torch.arange(n) for n in (2, 2, 64, 64))
    shape = (b[:, None, None, None], h[:, None, None], i[:, None], j)
    streams = [random_words(s, o, *shape).double() / 2**32 for s, o in ((1, 0), (2, 0), (1, 1))]
    for one in streams:
        rows = one.flatten(0, 2) - 0.5
        correlation = torch.corrcoef(rows) - torch.eye(len(rows), dtype=torch.float64)
        assert correlation.abs().max() < 0.75  # 64 entries a row, 33 k pairs: about 6 sigma
        shifted = torch.corrcoef(torch.stack((rows[:, 1:].flatten(), rows[:, :-1].flatten())))
        assert abs(float(shifted[0, 1])) < 0.02
    assert not torch.equal(streams[0], streams[1]) and not torch.equal(streams[0], streams[2])


def test_threshold_ends():
    assert threshold(0.0) == 0 and threshold(0.5) == 2**31
    assert threshold(1 - 2**-33) < 2**32
