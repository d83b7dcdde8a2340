"""The Hopper kernels on a Hopper GPU: the registry's grid, races, poison, launch overlap."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ridgeline.core import arch as arches
from ridgeline.core import registry
from ridgeline.kernels.attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from ridgeline.kernels.attention.arguments import Arguments
from ridgeline.kernels.attention.problem import (
    AttentionExtras,
    AttentionGrads,
    AttentionOptions,
)
from ridgeline.kernels.attention.ref import attention_ref, gradients

from . import cases

HOPPER = torch.cuda.is_available() and arches.detect("cuda").name == "sm90"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
]


@pytest.fixture(autouse=True)
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here is where kernels that no GPU has confirmed yet are to run."""
    monkeypatch.setenv("RIDGELINE_UNVERIFIED", "1")


def _accepted(direction: str) -> list[cases.Case]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIDGELINE_UNVERIFIED", "1")
        return [c for n, c in cases.accepted(direction, "cuda") if n == "cute_sm90"]


PAIRS = _accepted("fwd") if HOPPER else []


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: case.name)
def test_forward(case: cases.Case) -> None:
    cases.check_forward("cute_sm90", case, "cuda")


BACKWARD = _accepted("bwd") if HOPPER else []


@pytest.mark.parametrize("case", BACKWARD, ids=lambda case: case.name)
def test_backward(case: cases.Case) -> None:
    cases.check_backward("cute_sm90", case, "cuda")


def _public(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The public function that takes such a call; the registry chooses the implementation."""
    options = dict(
        softmax_scale=a.softmax_scale, causal=a.causal, softcap=a.softcap, sinks=a.sinks,
        window_size=(a.window_left, a.window_right),
    )  # fmt: skip
    used = dict(seqused_q=a.seqused_q, seqused_k=a.seqused_k)
    if a.cu_seqlens_q is not None:
        starts = a.cu_seqlens_q, a.cu_seqlens_k, a.max_seqlen_q, a.max_seqlen_k
        return flash_attn_varlen_func(
            a.q, a.k, a.v, *starts, block_table=a.block_table, return_lse=True, **used, **options
        )
    if a.block_table is not None or a.kv_batch_idx is not None:
        return flash_attn_with_kvcache(
            a.q, a.k, a.v, cache_seqlens=a.seqused_k, cache_batch_idx=a.kv_batch_idx,
            cache_leftpad=a.leftpad_k, block_table=a.block_table, return_softmax_lse=True,
            **options,
        )  # fmt: skip
    return flash_attn_func(a.q, a.k, a.v, leftpad_k=a.leftpad_k, return_lse=True, **used, **options)


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: case.name)
def test_public_functions(case: cases.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user calls takes these kernels by itself, forward and backward."""
    monkeypatch.delenv("RIDGELINE_UNVERIFIED")
    built = cases.build(case, "cuda")
    a, hopper = built.arguments, arches.detect("cuda")
    directions = ("fwd", "bwd") if case in BACKWARD else ("fwd",)
    for direction in directions:
        assert registry.select(a.problem(direction), hopper).name == "cute_sm90"
    names = [n for n in ("q", "k", "v", "sinks") if getattr(a, n) is not None]
    leaves = {n: getattr(a, n).detach().requires_grad_(case in BACKWARD) for n in names}
    out, lse = _public(replace(a, **leaves))
    exact, plain = cases.expected(case, True), cases.expected(case, False)
    cases.assert_within_rule("out", out, exact["out"], plain["out"], a.q.dtype)
    cases.assert_within_rule("lse", lse, exact["lse"], plain["lse"], torch.float32)
    if case not in BACKWARD:
        return
    made, given = [out], [built.dout]
    if built.dlse is not None:
        made, given = [out, lse], [built.dout, built.dlse]
    found = dict(zip(names, torch.autograd.grad(made, list(leaves.values()), given), strict=True))
    grads = {f"d{name}": found.get(name) for name in ("q", "k", "v", "sinks")}
    cases.assert_gradients(case, built, out.detach(), AttentionGrads(**grads))


WIDE = [
    (256, 256), (192, 128), (200, 136), (136, 136), (160, 128), (224, 192), (256, 64), (192, 160),
    (192, 96), (160, 64),
]  # fmt: skip


@pytest.mark.parametrize("dims", WIDE)
@pytest.mark.parametrize("lengths", [(64, 64), (200, 300), (130, 65), (500, 129), (1, 77)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_wide_heads(
    dims: tuple[int, int], lengths: tuple[int, int], causal: bool, deterministic: bool
) -> None:
    """Against fp64: a pair's second half without keys, rows that see nothing, grouped heads; widths
    of one swizzle and of two."""
    module = cases.module_of("cute_sm90")
    (rows, keys), (dim, dim_v) = lengths, dims
    q = torch.randn(2, rows, 4, dim, device="cuda").bfloat16()
    k = torch.randn(2, keys, 2, dim, device="cuda").bfloat16()
    v = torch.randn(2, keys, 2, dim_v, device="cuda").bfloat16()
    options = AttentionOptions(softmax_scale=dim**-0.5, causal=causal, deterministic=deterministic)
    out, lse = module.forward(q, k, v, options, AttentionExtras())
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = module.backward(dout, dlse, q, k, v, out, lse, options, AttentionExtras())
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        leaves = {
            n: x.detach().to(dtype).requires_grad_() for n, x in zip("qkv", (q, k, v), strict=True)
        }
        made = attention_ref(*leaves.values(), options, AttentionExtras(), dtype)
        results.append({"out": made[0].detach(), **gradients(made, leaves, dout, dlse)})
    exact, plain = results
    for name, value in zip(("out", *"qkv"), (out, got.dq, got.dk, got.dv), strict=True):
        error = (value.double() - exact[name]).abs().max()
        floor = (plain[name].double() - exact[name]).abs().max()
        assert error <= 2 * floor + 2**-8 * exact[name].abs().max() + 1e-6, name


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_thousand_backward_repeats(head_dim: int, causal: bool, deterministic: bool) -> None:
    """dK and dV bitwise always, dQ where the order of its additions is fixed."""
    module = cases.module_of("cute_sm90")
    q, k, v = (torch.randn(2, 1100, 8, head_dim, device="cuda").bfloat16() for _ in range(3))
    options = AttentionOptions(
        softmax_scale=1 / math.sqrt(head_dim), causal=causal, deterministic=deterministic
    )
    extras = AttentionExtras()
    out, lse = module.forward(q, k, v, options, extras)
    arguments = (torch.randn_like(out), None, q, k, v, out, lse, options, extras)
    first = module.backward(*arguments)
    for _ in range(1000):
        again = module.backward(*arguments)
        assert torch.equal(first.dk, again.dk) and torch.equal(first.dv, again.dv)
        assert not deterministic or torch.equal(first.dq, again.dq)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_thousand_repeats_are_bitwise_equal(head_dim: int, causal: bool) -> None:
    module = cases.module_of("cute_sm90")
    q, k, v = (torch.randn(2, 1100, 8, head_dim, device="cuda").bfloat16() for _ in range(3))
    options = AttentionOptions(softmax_scale=1 / math.sqrt(head_dim), causal=causal)
    out, lse = module.forward(q, k, v, options, AttentionExtras())
    for _ in range(1000):
        again, lse_again = module.forward(q, k, v, options, AttentionExtras())
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_query_row_stays_in_its_row(poison: float) -> None:
    module = cases.module_of("cute_sm90")
    q, k, v = (torch.randn(1, 500, 2, 128, device="cuda").bfloat16() for _ in range(3))
    options = AttentionOptions(softmax_scale=0.1, causal=True)
    clean, _ = module.forward(q, k, v, options, AttentionExtras())
    q[0, 150, 0, 3] = poison
    out, _ = module.forward(q, k, v, options, AttentionExtras())
    assert not out[0, 150, 0].isfinite().any()
    out[0, 150, 0] = clean[0, 150, 0]
    assert torch.equal(out, clean)


def test_launches_on_the_current_stream_and_in_a_graph() -> None:
    module = cases.module_of("cute_sm90")
    q, k, v = (torch.randn(1, 4096, 4, 128, device="cuda").bfloat16() for _ in range(3))
    options = AttentionOptions(softmax_scale=0.1, causal=True)
    expected, _ = module.forward(q, k, v, options, AttentionExtras())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        module.forward(q, k, v, options, AttentionExtras())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out, _ = module.forward(q, k, v, options, AttentionExtras())
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
