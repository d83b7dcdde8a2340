"""The Hopper entry point's host side: windows, strides that TMA can read, the problem of a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi (pip install ridgeline[hopper]) is not here")

from ridgeline.core.arch import KNOWN, Arch
from ridgeline.kernels.attention import calls, cute_sm90
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


def test_plans_are_kept_by_what_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(cute_sm90, "_plan", lambda *call: made.append(call) or len(made))
    monkeypatch.setattr(cute_sm90, "_plans", {})
    q, options = torch.empty(2, 7, 8, 64), AttentionOptions(softmax_scale=0.1)
    for _ in range(2):
        cute_sm90._planned("fwd", (q, q, q), options, AttentionExtras())
    assert len(made) == 1
    causal = replace(options, causal=True)
    sinks = AttentionExtras(sinks_H=torch.zeros(8))
    strided = torch.empty(2, 8, 7, 64).transpose(1, 2)
    found = {1}
    for direction, x, changed, extras in (
        ("fwd", q[:1], options, AttentionExtras()),
        ("fwd", q.half(), options, AttentionExtras()),
        ("fwd", q, causal, AttentionExtras()),
        ("fwd", q, options, sinks),
        ("fwd", strided, options, AttentionExtras()),
        ("bwd", q, options, AttentionExtras()),
    ):
        found.add(cute_sm90._planned(direction, (x, x, x), changed, extras))
    assert found == set(range(1, 8))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple]]:
    """What each launch would be given, on a machine that pretends to be an H200."""
    seen: list[tuple] = []
    monkeypatch.setattr(cute_sm90, "_plans", {})
    monkeypatch.setattr(cute_sm90, "_counters", {})
    monkeypatch.setattr(cute_sm90, "_arch", lambda device: KNOWN["sm90"])
    monkeypatch.setattr(cute_sm90, "_stream", lambda device: 7)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        cute_sm90.library, "kernel", lambda *key: lambda *arguments: seen.append((key, arguments))
    )
    yield seen
    calls.forget()


def test_arguments_of_a_forward(launches: list[tuple]) -> None:
    base = torch.randn(2, 300, 8, 64).to(torch.bfloat16)
    k = torch.randn(2, 500, 2, 64).to(torch.bfloat16)
    q = base[:, :, ::2]
    options = AttentionOptions(softmax_scale=0.1, causal=True, window_left=9)
    for _ in range(2):  # the second from a kept plan
        out, lse = cute_sm90.forward(q, k, k[..., :32], options, AttentionExtras())
        _, given = launches.pop()
        assert given[0] is q and given[1] is k and given[3] is out and given[4] is lse
        assert given[2].data_ptr() == k.data_ptr() and given[2].shape[-1] == 32
        assert given[5:9] == (None,) * 4
        assert given[9].tolist() == [0, 0] and given[9].dtype == torch.int32
        assert given[10:14] == (0.1, 0.0, 9, 0)
        assert given[15] == KNOWN["sm90"].num_units
        assert out.shape == (2, 300, 4, 32) and out.is_contiguous() and lse.shape == (2, 4, 300)
    moved = torch.randn(2 * 300 * 4 * 64 + 1).to(torch.bfloat16)[1:].view(2, 300, 4, 64)
    cute_sm90.forward(moved, k, k, options, AttentionExtras())
    cute_sm90.forward(q[:1].expand(2, -1, -1, -1), k, k, options, AttentionExtras())
    for _, given in launches:
        assert given[0].is_contiguous() and given[0].data_ptr() % 16 == 0
    assert torch.equal(launches[0][1][0], moved)


def test_arguments_of_a_forward_whose_last_tiles_are_cut(
    launches: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace a call, counters a stream; a graph that is being captured gets its own."""
    plain = cute_sm90.forward_kernel

    def split(problem: AttentionProblem, arch: Arch) -> tuple:
        traits, config = plain(problem, arch)
        return traits, replace(config, split_tail=True)

    monkeypatch.setattr(cute_sm90, "forward_kernel", split)
    monkeypatch.setattr(cute_sm90, "_tail_counters", {})
    q = torch.randn(1, 200, 70, 128).to(torch.bfloat16)  # 140 tiles: 8 are cut
    k = torch.randn(1, 500, 70, 128).to(torch.bfloat16)  # 4 key blocks
    options = AttentionOptions(softmax_scale=0.1)
    sinks = AttentionExtras(sinks_H=torch.zeros(70))
    prepared = cute_sm90.prepare_forward(q, k, k, options)
    for extras in (AttentionExtras(), sinks, None):
        out, lse = prepared(q, k, k) if extras is None else cute_sm90.forward(
            q, k, k, options, extras
        )  # fmt: skip
        (_, config), given = launches[-1]
        assert config.split_tail and len(given) == 15
        assert all(a is b for a, b in zip(given[:5], (q, k, k, out, lse), strict=True))
        assert given[5] is (None if extras is None else extras.sinks_H)
        ranges = given[14]
        assert given[6].shape == (ranges + 8, 2, 17, 512) and given[6].dtype == torch.float32
        assert given[7].dtype == torch.int32 and not given[7].any()
        assert given[8:10] == (0.1, 0.0) and given[13] == KNOWN["sm90"].num_units
    assert launches[0][1][7] is launches[1][1][7] and launches[0][1][6] is not launches[1][1][6]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cute_sm90.forward(q, k, k, options, AttentionExtras())
    assert launches[-1][1][7] is not launches[0][1][7] and not launches[-1][1][7].any()


@pytest.mark.parametrize(("dim", "block_q"), [(64, 128), (128, 64), (256, 64)])
def test_arguments_of_a_backward(launches: list[tuple], dim: int, block_q: int) -> None:
    q = torch.randn(2, 300, 4, dim).to(torch.bfloat16)
    k = torch.randn(2, 200, 2, dim).to(torch.bfloat16)
    options = AttentionOptions(softmax_scale=0.1, deterministic=True)
    out, lse = cute_sm90.forward(q, k, k, options, AttentionExtras())
    dout = torch.randn_like(out)
    for dlse in (None, torch.randn_like(lse)):
        grads = cute_sm90.backward(dout, dlse, q, k, k, out, lse, options, AttentionExtras())
        (_, config), given = launches[-1]
        assert config.block_q == block_q
        assert all(a is b for a, b in zip(given[:6], (q, k, k, out, dout, lse), strict=True))
        assert given[6] is (lse if dlse is None else dlse)
        assert given[7:11] == (None,) * 4
        assert given[11] is grads.dq and given[12] is grads.dk and given[13] is grads.dv
        tiles = 2 * -(-300 // block_q)
        assert given[14].shape == (tiles, 4, 2 * block_q) and given[14].dtype == torch.float32
        assert given[15].shape == (tiles, 4, block_q * dim)
        assert given[16].shape == (tiles + 1, 4, 1)  # turns, and the queue of persistent blocks
        assert given[17:19] == (0.1, 0.0) and given[22:24] == (300, 200)
        assert given[24:] == (int(dlse is not None), 1)


def test_a_backward_with_used_lengths_gets_both_and_zeros(launches: list[tuple]) -> None:
    q = torch.randn(2, 300, 4, 64).to(torch.bfloat16)
    used = torch.tensor([7, 200], dtype=torch.int32)
    options, extras = AttentionOptions(softmax_scale=0.1), AttentionExtras(seqused_k=used)
    lse = torch.zeros(2, 4, 300)
    for given_q in (None, torch.tensor([300, 0], dtype=torch.int32)):
        asked = replace(extras, seqused_q=given_q)
        grads = cute_sm90.backward(q, None, q, q, q, q, lse, options, asked)
        (traits, _), given = launches.pop()
        assert traits.seqused and not traits.varlen and given[10] is used
        assert given[9].tolist() == ([2**31 - 1] * 2 if given_q is None else [300, 0])
        assert not any(grad.any() for grad in (grads.dq, grads.dk, grads.dv))
