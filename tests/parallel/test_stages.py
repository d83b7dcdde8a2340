"""Stages are contiguous, whole and balanced, embedding and head counted."""

from __future__ import annotations

import itertools

import pytest

from ridgeline.nn.config import DecoderConfig
from ridgeline.parallel.stages import balance, cut_layers


def _largest(costs, ends, first, last):
    starts = [0, *ends[:-1]]
    sums = [sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@pytest.mark.parametrize("first", [0.0, 2.5])
@pytest.mark.parametrize("last", [0.0, 1.0, 7.0])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_no_other_cut_is_better(num_stages, first, last):
    costs = [1.0, 3.0, 1.0, 1.0, 2.0, 1.0, 1.0]
    ends = balance(costs, num_stages, first=first, last=last)
    assert len(ends) == num_stages and ends[-1] == len(costs)
    others = itertools.combinations(range(1, len(costs)), num_stages - 1)
    best = min(_largest(costs, [*cut, len(costs)], first, last) for cut in others)
    assert _largest(costs, ends, first, last) == pytest.approx(best)


def test_the_stage_with_a_dear_head_has_fewer_layers():
    config = DecoderConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_seqlen=8192,
    )
    parts = cut_layers(config, 4, seqlen=4096)
    counts = [part.end_layer - part.first_layer for part in parts]
    assert sum(counts) == 16 and counts[-1] < min(counts[:-1])
    assert [part.embed for part in parts] == [True, False, False, False]
    assert [part.head for part in parts] == [False, False, False, True]
    assert [part.first_layer for part in parts[1:]] == [part.end_layer for part in parts[:-1]]
