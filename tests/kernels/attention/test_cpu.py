"""The CPU implementation's own promises: memory linear in length, no dtype narrowed on the way."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.kernels.attention import cpu, cpu_blocks
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions

from . import cases


class _Memory(TorchDispatchMode):
    """Bytes of the tensors alive, by storage, and the most elements of one."""

    def __init__(self):
        super().__init__()
        self.alive: dict[int, list[int]] = {}
        self.now = self.peak = self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._born(tensor)
        return result

    def _born(self, tensor):
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        self.largest = max(self.largest, tensor.numel())
        entry = self.alive.setdefault(place, [0, size])
        if entry[0] == 0:
            entry[1] = size
            self.now += size
        entry[0] += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(tensor, self._died, place)

    def _died(self, place):
        entry = self.alive[place]
        entry[0] -= 1
        if entry[0] == 0:
            self.now -= entry[1]


def _both_ways(length, options, extras, memory):
    q, k, v, dout = (torch.randn(1, length, 2, 32) for _ in range(4))
    with memory:
        out, lse = cpu.forward(q, k, v, options, extras)
        forward = memory.peak
        cpu.backward(dout, None, q, k, v, out, lse, options, extras)
    return forward, memory.peak


@pytest.mark.parametrize("window", [(16, 16), (16, 0), (700, 3)])
def test_a_block_of_a_window_stays_within_its_budget(window):
    left, right = window
    options = AttentionOptions(softmax_scale=0.2, softcap=3.0, window_left=left, window_right=right)
    memory = _Memory()
    _both_ways(2048, options, AttentionExtras(), memory)
    assert 0 < memory.largest <= cpu_blocks._BLOCK_SCORES


@pytest.mark.parametrize("kind", ["one-sided", "alibi", "softcap-window"])
def test_memory_is_linear_in_the_length(kind):
    options = AttentionOptions(softmax_scale=0.2, window_right=2)
    extras = AttentionExtras()
    if kind == "alibi":
        options = AttentionOptions(softmax_scale=0.2, causal=True)
        extras = AttentionExtras(alibi_slopes=torch.tensor([0.1, 0.01]))
    if kind == "softcap-window":
        options = AttentionOptions(softmax_scale=0.2, softcap=3.0, window_left=16, window_right=0)
    short, long = (_both_ways(n, options, extras, _Memory()) for n in (1024, 3072))
    for at_1024, at_3072 in zip(short, long, strict=True):
        assert at_3072 < 3.4 * at_1024


@pytest.mark.parametrize("causal", [True, False])
def test_fp64_gradients_of_grouped_heads_keep_their_precision(causal):
    case = cases.Case(name="fp64", heads=6, kv_heads=2, dtype="float64", causal=causal, batch=1)
    built = cases.build(case)
    a = built.arguments
    out, lse = cpu.forward(a.q, a.k, a.v, a.options(), a.extras())
    grads = cpu.backward(built.dout, None, a.q, a.k, a.v, out, lse, a.options(), a.extras())
    expected = cases.reference(built, torch.float64)
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(getattr(grads, name), expected[name], rtol=0, atol=1e-13)
