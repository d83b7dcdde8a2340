"""A kept row through linears of every kind, beside the widened weight in fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ridgeline.engine.host_products import Kept, Normed, Product
from ridgeline.engine.weights import Dense, Packed
from ridgeline.kernels.w4a16 import cpu_bags
from ridgeline.kernels.w4a16.op import prepare
from tests.kernels.w4a16.weights import make_weight

K, N = 192, 96
KINDS = {
    "symmetric": {},
    "zero points": {"symmetric": False},
    "zero points apart": {"symmetric": False, "bits": 8},
    "act-order": {"symmetric": False, "act_order": True},
    "whole rows": {"group": K},
    "outputs that fill no chunk": {"n": 2 * (N + 2)},
}


@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("bags", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_linear(monkeypatch, kind, bags, silu_mul):
    """Twice, with other rows, as the buffers are kept; with a bias, a norm before it or not."""
    if bags and not cpu_bags.has_bags():
        pytest.skip("this PyTorch has no byte bags")
    monkeypatch.setattr(cpu_bags, "has_bags", lambda: bags)
    weight = make_weight(**({"n": 2 * N, "k": K, "group": 32} | KINDS[kind]))
    n = weight.shape_nk[0]
    bias_N = torch.randn(n)
    linear = Packed(prepare(weight, torch.float32, silu_mul=silu_mul), bias_N, False)
    x_1K, norm_K = torch.empty(1, K), torch.randn(K)
    out_1N = torch.full((1, n // 2 if silu_mul else n), float("nan"))
    scratch: cpu_bags.Scratch = {}
    plain = Product(linear, Kept(x_1K), out_1N, scratch, dtype=torch.float32)
    normed = Product(linear, Normed(x_1K, norm_K), out_1N, scratch, dtype=torch.float32)
    for product, factor in ((plain, 1.0), (normed, 0.7), (plain, 1.0)):
        x_1K.copy_(torch.randn(1, K))
        product(factor)
        y_1K = x_1K.double() * (norm_K.double() * factor if product is normed else 1)
        want = y_1K @ weight.dequantize().double().T + bias_N.double()
        if silu_mul:
            gate, up = want.chunk(2, dim=1)
            want = torch.nn.functional.silu(gate) * up
        assert (out_1N - want).abs().max() <= 2e-6 * want.abs().max()


@pytest.mark.parametrize("gate", [False, True])
def test_a_plain_linear(gate):
    weight_NK, bias_N, x_1K = torch.randn(2 * N, K), torch.randn(2 * N), torch.randn(1, K)
    out_1N = torch.empty(1, N if gate else 2 * N)
    linear = Dense(weight_NK, bias_N, False)
    Product(linear, Kept(x_1K), out_1N, {}, dtype=torch.float32, gate=gate)()
    want = x_1K @ weight_NK.T + bias_N
    if gate:
        want = torch.nn.functional.silu(want[:, :N]) * want[:, N:]
    torch.testing.assert_close(out_1N, want)


def test_uneven_groups_are_sorted_first():
    """Groups that no input uses, or a few."""
    weight = make_weight(N, K, 64, symmetric=False, act_order=True)
    assert weight.group_of_K is not None
    uneven = dataclasses.replace(weight, group_of_K=weight.group_of_K.clamp(max=1))
    x_1K, out_1N = torch.randn(1, K), torch.empty(1, N)
    linear = Packed(prepare(uneven, torch.float32), None, False)
    Product(linear, Kept(x_1K), out_1N, {}, dtype=torch.float32)()
    torch.testing.assert_close(out_1N, x_1K @ uneven.dequantize().T, rtol=1e-5, atol=1e-5)
