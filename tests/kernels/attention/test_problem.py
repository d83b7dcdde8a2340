from __future__ import annotations

import pytest
import torch

from ridgeline.kernels.attention.problem import AttentionProblem


def problem(**fields) -> AttentionProblem:
    given = dict(batch=1, seqlen_q=5, seqlen_k=9, heads=2, kv_heads=1, head_dim=16, head_dim_v=16)
    return AttentionProblem(**(given | fields))


@pytest.mark.parametrize("seqlens", [(5, 9), (9, 5), (1, 7), (7, 7), (0, 3), (3, 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (2, None), (None, 1), (3, 2), (0, 0)])
def test_pairs_and_keys_equal_the_mask_written_out(seqlens, causal, window):
    S, T = seqlens
    left, right = window
    p = problem(seqlen_q=S, seqlen_k=T, causal=causal, window_left=left, window_right=right)
    i, j = torch.arange(S)[:, None] + T - S, torch.arange(T)
    seen = torch.ones(S, T, dtype=torch.bool)
    if causal:
        seen &= j <= i
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    assert p.num_pairs() == int(seen.sum())
    assert p.num_keys() == int(seen.any(0).sum())


def test_cost_by_hand():
    p = problem(seqlen_q=4, seqlen_k=4, head_dim=24, head_dim_v=16, causal=True)
    assert p.cost().flops == 2 * 2 * 10 * (24 + 16)
    moved = 2 * (2 * 4 * 24 + 2 * 4 * 16 + 4 * (24 + 16)) + 4 * 2 * 4
    assert p.cost().bytes == moved
    backward = problem(seqlen_q=4, seqlen_k=4, head_dim=16, causal=True, direction="bwd")
    forward = problem(seqlen_q=4, seqlen_k=4, head_dim=16, causal=True)
    assert backward.cost().flops == 2.5 * forward.cost().flops


def test_a_window_leaves_most_keys_unread():
    decode = problem(seqlen_q=1, seqlen_k=65536, causal=True, window_left=511)
    assert decode.num_keys() == 512
    assert decode.cost().bytes < 512 * 2 * 32 + 4096
