"""The Hopper entry point's host side: windows, strides that TMA can read, the problem of a call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi (pip install ridgeline[hopper]) is not here")

from ridgeline.kernels.attention import cute_sm90
from ridgeline.kernels.attention.cute.blocks import UNBOUNDED
from ridgeline.kernels.attention.cute_sm90_backward_config import BackwardConfig
from ridgeline.kernels.attention.problem import (
    AttentionExtras,
    AttentionOptions,
    AttentionProblem,
)

BASE = AttentionProblem(
    batch=1, seqlen_q=64, seqlen_k=64, heads=3, kv_heads=3, head_dim=64, head_dim_v=64
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (UNBOUNDED, UNBOUNDED)),
        ({"causal": True}, (UNBOUNDED, 0)),
        ({"window_left": 5, "window_right": 7}, (5, 7)),
        ({"causal": True, "window_left": 5, "window_right": 7}, (5, 0)),
        ({"causal": True, "window_right": -3}, (UNBOUNDED, -3)),
        ({"window_left": 1 << 40}, (UNBOUNDED, UNBOUNDED)),
    ],
)
def test_window(options: dict, expected: tuple[int, int]) -> None:
    assert cute_sm90.window(AttentionOptions(softmax_scale=1.0, **options)) == expected


def test_tensors_that_tma_reads_stay_and_others_are_copied() -> None:
    base = torch.randn(2, 10, 4, 64).to(torch.bfloat16)
    assert cute_sm90.readable_by_tma(base) is base
    sliced = base[:, 1:, ::2]
    assert cute_sm90.readable_by_tma(sliced) is sliced
    for odd in (
        base[:1].expand(2, -1, -1, -1),
        base.transpose(2, 3),
        torch.randn(2, 10, 4, 65).to(torch.bfloat16)[..., :64],
        torch.randn(2 * 10 * 4 * 64 + 1).to(torch.bfloat16)[1:].view(2, 10, 4, 64),
    ):
        copy = cute_sm90.readable_by_tma(odd)
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0
        assert torch.equal(copy, odd)


def test_problem_of_dense_and_packed_calls() -> None:
    options = AttentionOptions(softmax_scale=0.1, causal=True)
    q, k = torch.empty(2, 7, 8, 64), torch.empty(2, 9, 4, 64)
    dense = cute_sm90.problem_of(q, k, torch.empty(2, 9, 4, 32), options, AttentionExtras())
    assert (dense.batch, dense.seqlen_q, dense.seqlen_k) == (2, 7, 9)
    assert (dense.heads, dense.kv_heads, dense.head_dim, dense.head_dim_v) == (8, 4, 64, 32)
    assert dense.causal and not dense.varlen and dense.dtype == "float32"
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    extras = AttentionExtras(
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=4,
        max_seqlen_k=4,
        sinks_H=torch.zeros(8),
    )
    packed = cute_sm90.problem_of(q[0], k[0], k[0], options, extras)
    assert packed.varlen and packed.sinks
    assert (packed.batch, packed.seqlen_q, packed.seqlen_k) == (2, 4, 4)


def test_sink_gradient_and_delta_of_tiles_against_autograd() -> None:
    """delta read back from the kernel's tiles, dense and packed, and what the sinks get of it."""
    block_q, heads, lengths = 64, 3, (70, 0, 130, 64)
    config = BackwardConfig(block_q=block_q)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    rows = int(starts[-1]) + 5
    delta = torch.randn(heads, rows)
    tiles = rows // block_q + len(lengths)
    statistics = torch.full((tiles, heads, 2 * block_q), float("nan"))
    for sequence, length in enumerate(lengths):
        first = int(starts[sequence])
        tile = first // block_q + sequence
        for i in range(length):
            where = tile + i // block_q, slice(None), block_q + i % block_q
            statistics[where] = delta[:, first + i]
    problem = replace(BASE, batch=len(lengths), seqlen_q=130, heads=heads, varlen=True)
    got = cute_sm90._delta(statistics, problem, config, starts, rows)
    assert torch.equal(got[:, :-5], delta[:, :-5])

    scores, sinks = torch.randn(heads, rows, 9), torch.randn(heads, requires_grad=True)
    lse = torch.logsumexp(torch.cat((scores, sinks[:, None, None].expand(-1, rows, 1)), -1), -1)
    weight = torch.randn(heads, rows)
    (weight * lse)[:, :-5].sum().backward()
    lse = lse.detach()
    lse[:, -5:] = float("-inf")
    # LSE's own gradient enters delta with a minus sign.
    found = cute_sm90.sink_gradient(sinks.detach(), lse, -weight)
    torch.testing.assert_close(found, sinks.grad)

    dense = replace(BASE, batch=2, seqlen_q=100, heads=heads)
    tiled = torch.randn(2 * 2, heads, 2 * block_q)
    got = cute_sm90._delta(tiled, dense, config, None, 100)
    assert got.shape == (2, heads, 100)
    assert torch.equal(got[1, :, 70], tiled[3, :, block_q + 6])


def test_plans_are_kept_by_what_the_problem_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(cute_sm90, "_plan", lambda problem, device: made.append(problem) or problem)
    monkeypatch.setattr(cute_sm90, "_plans", {})
    q, options = torch.empty(2, 7, 8, 64), AttentionOptions(softmax_scale=0.1)
    for _ in range(2):
        cute_sm90._planned("fwd", q, q, q, options, AttentionExtras())
    assert len(made) == 1
    causal = replace(options, causal=True)
    sinks = AttentionExtras(sinks_H=torch.zeros(8))
    for changed in (
        ("fwd", q[:1], q[:1], q[:1], options, AttentionExtras()),
        ("fwd", q.half(), q.half(), q.half(), options, AttentionExtras()),
        ("fwd", q, q, q, causal, AttentionExtras()),
        ("fwd", q, q, q, options, sinks),
    ):
        cute_sm90._planned(*changed)
    assert len(made) == 5 and len(set(made)) == 5
