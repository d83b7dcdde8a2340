"""Packed tiles and split keys, on plain integers: every pair seen once, and a model of the whole
kernel (tiles, masks, absent keys, sinks, merge) against the reference."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ridgeline.kernels.attention.cute.blocks import UNBOUNDED
from ridgeline.kernels.attention.cute.cached_blocks import packed_range, split_range
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions
from ridgeline.kernels.attention.ref import attention_ref

LENGTHS = [(1, 300, None), (5, 64, 0), (40, 129, 70), (7, 0, None), (3, 5, 5), (130, 257, 30)]
WINDOWS = [(None, None), (None, 0), (50, 0), (20, 13)]


def _seen(query: int, lengths, window) -> range:
    seqlen_q, seqlen_k, leftpad = lengths
    shift = seqlen_k - seqlen_q
    first, last = leftpad or 0, seqlen_k - 1
    if window[0] is not None:
        first = max(first, query + shift - window[0])
    if window[1] is not None:
        last = min(last, query + shift + window[1])
    return range(first, max(first, last + 1))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_tile_visits_what_its_rows_see(lengths, window, group: int) -> None:
    rows, block = 64, 32
    left = UNBOUNDED if window[0] is None and lengths[2] is not None else window[0]
    for first in range(0, lengths[0] * group, rows):
        found = packed_range((first, rows, group), block, lengths, (left, window[1]))
        assert found.begin <= found.full_begin <= found.full_end < found.end
        for row in range(first, min(first + rows, lengths[0] * group)):
            seen = _seen(row // group, lengths, window)
            for n in range(-(-max(lengths[1], 1) // block)):
                keys = range(n * block, (n + 1) * block)
                if any(key in seen for key in keys):
                    assert found.begin <= n < found.end
                if found.full_begin <= n < found.full_end:
                    assert all(key in seen for key in keys)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 64])
def test_parts_cover_a_tile_once_and_the_last_is_never_empty(num_splits: int) -> None:
    for lengths, window in itertools.product(LENGTHS, WINDOWS):
        left = UNBOUNDED if window[0] is None and lengths[2] is not None else window[0]
        whole = packed_range((0, 64, 2), 32, lengths, (left, window[1]))
        visited, full = [], []
        for split in range(num_splits):
            part, count = split_range(whole, split, num_splits)
            if count == 0:
                assert split < num_splits - 1
                continue
            assert part.begin <= part.full_begin <= part.full_end < part.end
            assert part.end - part.begin == count
            visited += range(part.begin, part.end)
            full += range(part.full_begin, part.full_end)
        assert visited == list(range(whole.begin, whole.end))
        assert set(full) <= set(range(whole.full_begin, whole.full_end))


def _model(q, k, v, options: AttentionOptions, group: int, lengths, num_splits: int, sink):
    """One sequence as the kernel does it: packed rows, blocks right to left, V of absent keys
    zeroed at both ends only, parts merged. q [S, H, D], k and v [T, D] of one key/value head."""
    seqlen_q, seqlen_k, leftpad = lengths
    right = 0 if options.causal else options.window_right
    left = UNBOUNDED if options.window_left is None and leftpad is not None else options.window_left
    rows, block, dim = 64, 32, q.shape[-1]
    keys = -(-max(k.shape[0], 1) // block) * block
    padded_k, padded_v = (torch.nn.functional.pad(x, (0, 0, 0, keys - x.shape[0])) for x in (k, v))
    out = torch.zeros(seqlen_q * group, dim, dtype=q.dtype)
    lse = torch.full((seqlen_q * group,), -math.inf, dtype=q.dtype)
    flat = q[:seqlen_q].reshape(-1, dim)
    for first in range(0, seqlen_q * group, rows):
        whole = packed_range((first, rows, group), block, lengths, (left, right))
        mine = flat[first : first + rows]
        packed = torch.arange(first, first + mine.shape[0])
        query = packed // group
        parts = []
        for split in range(num_splits):
            part, count = split_range(whole, split, num_splits)
            if count == 0:
                continue
            scores, values = [], []
            for n in range(part.begin, part.end):
                key = torch.arange(n * block, (n + 1) * block)
                s = mine @ padded_k[n * block : (n + 1) * block].T * options.softmax_scale
                masked = n == part.end - 1 or not part.full_begin <= n < part.full_end
                if masked:
                    at = query[:, None] + seqlen_k - seqlen_q
                    hidden = (key >= seqlen_k)[None].expand_as(s)
                    if right is not None:
                        hidden = hidden | (key[None] > at + right)
                    if left is not None:
                        hidden = hidden | (key[None] < at - left)
                    if leftpad is not None:
                        hidden = hidden | (key < leftpad)[None]
                    s = s.masked_fill(hidden, -math.inf)
                value = padded_v[n * block : (n + 1) * block].clone()
                if n == part.end - 1:
                    value[key >= seqlen_k] = 0
                if n == part.begin and leftpad is not None:
                    value[key < leftpad] = 0
                scores.append(s)
                values.append(value)
            s = torch.cat(scores, -1)
            if sink is not None and split == num_splits - 1:
                s = torch.cat((s, sink[packed % group][:, None]), -1)
                values.append(torch.zeros(1, dim, dtype=v.dtype))
            total = torch.logsumexp(s, -1)
            p = torch.exp(s - torch.where(total == -math.inf, 0.0, total)[:, None])
            parts.append((total, p @ torch.cat(values)))
        total = torch.logsumexp(torch.stack([part[0] for part in parts]), 0)
        safe = torch.where(total == -math.inf, 0.0, total)
        weights = [torch.exp(part[0] - safe) for part in parts]
        merged = sum(w[:, None] * part[1] for w, part in zip(weights, parts, strict=True))
        out[first : first + mine.shape[0]] = merged
        lse[first : first + mine.shape[0]] = total
    return out.view(seqlen_q, group, dim), lse.view(seqlen_q, group).T


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("sinks", [False, True])
def test_model_of_the_kernel_against_the_reference(lengths, window, num_splits, sinks) -> None:
    torch.manual_seed(0)
    seqlen_q, seqlen_k, leftpad = lengths
    group, dim, capacity = 3, 8, seqlen_k + 40
    q = torch.randn(seqlen_q, group, dim, dtype=torch.float64)
    k, v = (torch.randn(capacity, dim, dtype=torch.float64) for _ in range(2))
    for x in (k, v):
        x[seqlen_k:] = math.nan
        x[: leftpad or 0] = math.nan
    sink = torch.randn(group, dtype=torch.float64) if sinks else None
    options = AttentionOptions(
        softmax_scale=0.3, window_left=window[0], window_right=window[1], causal=False
    )

    def length(value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int32)

    extras = AttentionExtras(
        seqused_k=length(seqlen_k),
        leftpad_k=None if leftpad is None else length(leftpad),
        sinks_H=sink,
    )
    want, want_lse = attention_ref(
        q[None], k[None, :, None], v[None, :, None], options, extras, torch.float64
    )
    got, got_lse = _model(q, k, v, options, group, lengths, num_splits, sink)
    torch.testing.assert_close(got, want[0])
    torch.testing.assert_close(got_lse, want_lse[0].to(got_lse.dtype))
