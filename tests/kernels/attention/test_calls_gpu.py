"""Known kinds of calls on a Hopper GPU: streams, graphs, gradients, as of the operators."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.core import arch as arches
from ridgeline.kernels.attention import calls, flash_attn_func

HOPPER = torch.cuda.is_available() and arches.detect("cuda").name == "sm90"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
]
IMPL = "cute_sm90"


def _leaves(rows: int) -> list[torch.Tensor]:
    return [torch.randn(2, rows, 4, 128, device="cuda").bfloat16() for _ in range(3)]


def _attend(*qkv: torch.Tensor) -> torch.Tensor:
    out = flash_attn_func(*qkv, causal=True, impl=IMPL)
    assert isinstance(out, torch.Tensor)
    return out


def test_gradients_are_the_operators() -> None:
    """Output, dK and dV to the bit; dQ's additions have no fixed order."""
    leaves = [x.requires_grad_() for x in _leaves(300)]
    dout = torch.randn_like(leaves[0])
    found = []
    for _ in range(2):
        out = _attend(*leaves)
        assert "_Attention" in type(out.grad_fn).__name__
        found.append((out, *torch.autograd.grad(out, leaves, dout)))
    with FlopCounterMode(display=False):  # a mode is given operators
        out = _attend(*leaves)
        assert "_Attention" not in type(out.grad_fn).__name__
        want = (out, *torch.autograd.grad(out, leaves, dout))
    for got in found:
        assert all(torch.equal(got[n], want[n]) for n in (0, 2, 3))
        torch.testing.assert_close(got[1], want[1])


def test_a_known_call_follows_the_current_stream() -> None:
    """Its inputs are written on a side stream, late; on any other it would read too early."""
    q, k, v = _leaves(300)
    want = _attend(q * 2, k, v)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        late = torch.zeros_like(q)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            late.copy_(q * 2)
            got = _attend(late, k, v)
        side.synchronize()
        assert torch.equal(got, want)


# The leaves were made on another stream than the graph's; nothing is accumulated into them.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
def test_graphs_of_known_calls_replay_beside_each_other() -> None:
    """Captured on a stream that called before; forward and backward, new values at each replay."""
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    graphs = []
    for _ in range(2):
        leaves = [x.requires_grad_() for x in _leaves(1100)]
        dout = torch.randn_like(leaves[0])
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                torch.autograd.grad(_attend(*leaves), leaves, dout)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = _attend(*leaves)
            grads = torch.autograd.grad(out, leaves, dout)
        graphs.append((graph, leaves, dout, out, grads))
    calls.forget()
    for _ in range(5):
        for _, leaves, _, _, _ in graphs:
            with torch.no_grad():
                for leaf in leaves:
                    leaf.copy_(torch.randn_like(leaf))
        torch.cuda.synchronize()
        for (graph, *_), stream in zip(graphs, (side, other), strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for _, leaves, dout, out, grads in graphs:
            want = _attend(*leaves)
            wanted = torch.autograd.grad(want, leaves, dout)
            assert torch.equal(out, want)
            assert all(torch.equal(grads[n], wanted[n]) for n in (1, 2))
            torch.testing.assert_close(grads[0], wanted[0])
