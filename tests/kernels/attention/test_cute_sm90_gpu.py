"""The Hopper kernels on a Hopper GPU: the registry's grid, races, poison, launch overlap."""

from __future__ import annotations

import math

import pytest
import torch

from ridgeline.core import arch as arches
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions

from . import cases

HOPPER = torch.cuda.is_available() and arches.detect("cuda").name == "sm90"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
]
PAIRS = [c for n, c in cases.accepted("fwd", "cuda") if n == "cute_sm90"] if HOPPER else []


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: case.name)
def test_forward(case: cases.Case) -> None:
    cases.check_forward("cute_sm90", case, "cuda")


BACKWARD = [c for n, c in cases.accepted("bwd", "cuda") if n == "cute_sm90"] if HOPPER else []


@pytest.mark.parametrize("case", BACKWARD, ids=lambda case: case.name)
def test_backward(case: cases.Case) -> None:
    cases.check_backward("cute_sm90", case, "cuda")


@pytest.mark.parametrize("head_dim", [64, 96, 128])
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
