"""Every bad argument is refused by name, before anything runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.kernels.attention import flash_attn_func, flash_attn_varlen_func
from ridgeline.kernels.attention.arguments import Arguments, window_bounds


def _dense(**change):
    call = dict(q=zeros(2, 6, 4, 16), k=zeros(2, 7, 2, 16), v=zeros(2, 7, 2, 16))
    return flash_attn_func(**{**call, **change})


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(dropout_p=1.0), ValueError, r"dropout_p must be in \[0, 1\), got 1.0; use 0.0"),
        (dict(dropout_p=-0.1), ValueError, r"dropout_p must be in \[0, 1\), got -0.1"),
        (dict(softcap=-1.0), ValueError, "softcap must be at least 0"),
        (dict(softcap=float("nan")), ValueError, "softcap must be at least 0 and finite, got nan"),
        (dict(softcap=float("inf")), ValueError, "softcap must be at least 0 and finite, got inf"),
        (dict(softmax_scale=float("nan")), ValueError, "softmax_scale must be finite, got nan"),
        (
            dict(alibi_slopes=torch.zeros(4, requires_grad=True)),
            NotImplementedError,
            "alibi_slopes must not need gradients",
        ),
        (dict(window_size=(-3, 0)), ValueError, "window_size must have sizes of at least 0"),
        (dict(window_size=(1,)), ValueError, "window_size must be a pair"),
        (dict(q=zeros(6, 4, 16)), ValueError, r"q must be \[batch, seqlen, heads, head_dim\]"),
        (
            dict(q=zeros(2, 6, 5, 16)),
            ValueError,
            "k must have a number of heads that divides q's 5",
        ),
        (dict(q=zeros(2, 6, 4, 24)), ValueError, "k must have q's head_dim 24, got 16"),
        (dict(q=zeros(3, 6, 4, 16)), ValueError, "k must have q's batch 3, got 2"),
        (dict(v=zeros(2, 6, 2, 16)), ValueError, "v must match k in all but the last dim"),
        (dict(q=zeros(2, 6, 4, 16, dtype=torch.half)), TypeError, "k must have q's dtype"),
        (dict(q=zeros(2, 6, 4, 16, dtype=torch.int32)), TypeError, "q must be bf16, fp16, fp32"),
        (dict(sinks=zeros(3)), ValueError, r"sinks must have shape \(4,\), got \(3,\)"),
        (dict(alibi_slopes=zeros(3)), ValueError, r"alibi_slopes must be \(4,\) or \(2, 4\)"),
        (dict(alibi_slopes=zeros(4, dtype=torch.half)), TypeError, "alibi_slopes must be fp32"),
        (dict(bias=zeros(2, 4, 6, 6)), ValueError, r"bias must be \(2, 4, 6, 7\)"),
        (dict(bias=zeros(6, 7)), ValueError, "bias must be"),
        (dict(bias=zeros(1, 1, 6, 7, dtype=torch.half)), TypeError, "bias must be q's dtype"),
        (dict(seqused_k=ints(7, 8)), ValueError, "seqused_k must have values from 0 to 7, got 8"),
        (dict(seqused_q=ints(-1, 6)), ValueError, "seqused_q must have values from 0 to 6, got -1"),
        (dict(seqused_k=ints(7)), ValueError, r"seqused_k must have shape \(2,\)"),
        (dict(seqused_k=torch.tensor([7, 7])), TypeError, "seqused_k must be int32"),
        (dict(dropout_p=0.1, dropout_seed=-1), ValueError, r"dropout_seed must be in \[0, 2\^63\)"),
        (dict(dropout_p=0.1, dropout_offset=2**32), ValueError, "dropout_offset must be in"),
        (
            dict(dropout_p=0.1, return_attn_probs=True),
            NotImplementedError,
            "return_attn_probs must",
        ),
        (dict(impl="magic"), ValueError, "impl must be one of .*ref.*got 'magic'"),
        (dict(impl="tiled", softcap=1.0), NotImplementedError, "implementation tiled refuses"),
    ],
)
def test_dense(change, error, message):
    with pytest.raises(error, match="attention: " + message):
        _dense(**change)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(cu_seqlens_q=ints(0, 5, 3)), ValueError, "cu_seqlens_q must not decrease"),
        (dict(cu_seqlens_k=ints(0, 5, 13)), ValueError, "cu_seqlens_k must stay within the 12"),
        (dict(cu_seqlens_k=ints(1, 5, 12)), ValueError, "cu_seqlens_k must start with 0, got 1"),
        (dict(cu_seqlens_k=ints(0, 12)), ValueError, r"cu_seqlens_k must have shape \(3,\)"),
        (dict(cu_seqlens_q=torch.tensor([0, 4, 10])), TypeError, "cu_seqlens_q must be int32"),
        (dict(max_seqlen_q=4), ValueError, "max_seqlen_q must be at least the longest 6, got 4"),
        (dict(max_seqlen_k=None), ValueError, "max_seqlen_k must be the longest length"),
        (
            dict(cu_seqlens_k=ints(0, 3, 8), seqused_k=ints(5, 5)),
            ValueError,
            "seqused_k must be at most the length 3 of sequence 0, got 5",
        ),
        (
            dict(seqused_q=ints(4, 6), cu_seqlens_q=ints(0, 6, 10)),
            ValueError,
            "seqused_q must be at most the length 4 of sequence 1, got 6",
        ),
        (dict(cu_seqlens_k=None), ValueError, "cu_seqlens_k must be given with cu_seqlens_q"),
        (dict(q=zeros(1, 10, 4, 16)), ValueError, r"q must be \[tokens, heads, head_dim\]"),
        (
            dict(block_table=ints(0, 9).view(2, 1), k=zeros(9, 16, 2, 16), v=zeros(9, 16, 2, 16)),
            ValueError,
            "block_table must have values from 0 to 8, got 9",
        ),
        (
            dict(block_table=ints(0, 1).view(1, 2), k=zeros(9, 16, 2, 16), v=zeros(9, 16, 2, 16)),
            ValueError,
            r"block_table must be \[2, pages\]",
        ),
    ],
)
def test_varlen(change, error, message):
    call = dict(
        q=zeros(10, 4, 16), k=zeros(12, 2, 16), v=zeros(12, 2, 16), cu_seqlens_q=ints(0, 4, 10),
        cu_seqlens_k=ints(0, 5, 12), max_seqlen_q=6, max_seqlen_k=7,
    )  # fmt: skip
    with pytest.raises(error, match="attention: " + message):
        flash_attn_varlen_func(**{**call, **change})


def test_pages_take_no_gradients():
    pages = zeros(4, 16, 2, 16).requires_grad_()
    with pytest.raises(NotImplementedError, match="k must not need gradients with block_table"):
        flash_attn_varlen_func(
            zeros(4, 4, 16), pages, pages, ints(0, 4), ints(0, 20), 4, 20,
            block_table=ints(1, 3).view(1, 2),
        )  # fmt: skip


def test_window_bounds():
    assert window_bounds((-1, -1)) == (None, None)
    assert window_bounds((None, 0)) == (None, 0)
    assert window_bounds((7, -1)) == (7, None)


def test_integers_with_gaps_reach_no_kernel():
    """Lengths that are a column of a table; a slice of a page table's columns is not copied."""
    column = torch.arange(12, dtype=torch.int32).view(4, 3)
    table = torch.arange(20, dtype=torch.int32).view(4, 5)[:, :3]
    q = zeros(4, 6, 4, 16)
    a = Arguments(
        q=q, k=q, v=q, seqused_k=column[:, 1], leftpad_k=column[:, 0], kv_batch_idx=column[:, 2],
        block_table=table, softmax_scale=1.0,
    )  # fmt: skip
    found = a.extras()
    for got, want in (
        (found.seqused_k, [1, 4, 7, 10]),
        (found.leftpad_k, [0, 3, 6, 9]),
        (found.kv_batch_idx, [2, 5, 8, 11]),
    ):
        assert got.is_contiguous() and got.tolist() == want
    assert found.page_ids_BU is table
    transposed = torch.arange(20, dtype=torch.int32).view(5, 4).T
    assert replace(a, block_table=transposed).extras().page_ids_BU.stride() == (5, 1)
