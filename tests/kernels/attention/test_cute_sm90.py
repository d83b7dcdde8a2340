"""The Hopper entry point's host side: windows, strides that TMA can read, the problem of a call."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL (pip install ridgeline[hopper]) is not here")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi (pip install ridgeline[hopper]) is not here")

from ridgeline.kernels.attention import cute_sm90
from ridgeline.kernels.attention.cute.blocks import UNBOUNDED
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions


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
