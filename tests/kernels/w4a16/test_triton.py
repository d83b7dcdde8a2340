"""The portable kernel, under Triton's interpreter on a CPU and compiled on a GPU."""

import os

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "run by test_triton_interpreted.py, in a process of its own", allow_module_level=True
    )
pytest.importorskip("triton")

from ridgeline.kernels.w4a16 import triton as kernel
from ridgeline.kernels.w4a16.prepared import Prepared
from ridgeline.kernels.w4a16.ref import w4a16_ref

from .test_layout import make

# Of the interpreter itself, with NumPy 2: a loop bound that is a one-element array.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (n, k, group, asymmetric, act_order)
WEIGHTS = [
    (64, 256, 128, False, False),
    (40, 136, 32, True, False),
    (32, 264, None, True, False),
    (24, 192, 64, True, True),
]


def prepared_of(weight, dtype, silu_mul=False):
    n, k = weight.shape_nk
    return Prepared(
        impl="triton",
        n=n,
        k=k,
        bits=4,
        group_size=weight.group_size,
        dtype=dtype,
        symmetric=weight.zero_NR is None,
        act_order=weight.group_of_K is not None,
        silu_mul=silu_mul,
        tensors=tuple(t.to(DEVICE) for t in kernel.prepare(weight, dtype)),
    )


@pytest.mark.parametrize("m", [1, 17])
@pytest.mark.parametrize(("n", "k", "group", "asymmetric", "act_order"), WEIGHTS)
def test_matches_reference(n, k, group, asymmetric, act_order, m):
    weight = make(n, k, group, asymmetric=asymmetric, act_order=act_order)
    prepared = prepared_of(weight, torch.float16)
    act = torch.randn(m, k).half()
    bias = torch.randn(n).half()
    out = kernel.forward(act.to(DEVICE), prepared, bias.to(DEVICE)).cpu().float()
    exact = w4a16_ref(act.double(), weight, bias.double(), compute_dtype=torch.float64)
    plain = w4a16_ref(act, weight, bias, compute_dtype=torch.float16).double()
    limit = 2 * (plain - exact).abs().max() + 1e-3
    assert (out.double() - exact).abs().max() <= limit


@pytest.mark.parametrize(("n", "k", "group", "asymmetric", "act_order"), WEIGHTS)
def test_one_hot_returns_the_weight(n, k, group, asymmetric, act_order):
    weight = make(n, k, group, asymmetric=asymmetric, act_order=act_order)
    picked = torch.tensor([0, 1, k // 2, k - 1])
    hot = torch.zeros(4, k).half()
    hot[torch.arange(4), picked] = 1
    out = kernel.forward(hot.to(DEVICE), prepared_of(weight, torch.float16), None).cpu()
    assert torch.equal(out, weight.dequantize(torch.float16)[:, picked].T)


def test_batch_invariant_rows():
    weight = make(32, 512, 128)
    prepared = prepared_of(weight, torch.float16)
    act = torch.randn(20, 512).half().to(DEVICE)
    whole = kernel.forward(act, prepared, None, batch_invariant=True)
    alone = kernel.forward(act[7:8], prepared, None, batch_invariant=True)
    assert torch.equal(whole[7:8], alone)


def test_silu_mul_and_no_rows():
    weight = make(64, 128, 64, asymmetric=True)
    prepared = prepared_of(weight, torch.float16, silu_mul=True)
    act = torch.randn(3, 128).half()
    out = kernel.forward(act.to(DEVICE), prepared, None).cpu().float()
    want = w4a16_ref(act, weight, silu_mul=True).float()
    assert out.shape == (3, 32)
    torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)
    assert kernel.forward(act[:0].to(DEVICE), prepared, None).shape == (0, 32)
