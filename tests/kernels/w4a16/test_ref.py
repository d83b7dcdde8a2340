"""The reference against element-by-element loops."""

from __future__ import annotations

import math

import torch

from ridgeline.kernels.w4a16.ref import w4a16_ref

from .weights import make_weight


def test_against_loops() -> None:
    weight = make_weight(4, 6, 4, symmetric=False, act_order=True)
    act_MK, bias_N = torch.randn(3, 6), torch.randn(4)
    out_MN = w4a16_ref(act_MK, weight, bias_N, compute_dtype=torch.float64)
    table, zero = weight.group_of_K, weight.zero_NR
    assert table is not None and zero is not None
    for m in range(3):
        for n in range(4):
            total = float(bias_N[n])
            for k in range(6):
                g = int(table[k])
                w = float(weight.scale_NR[n, g]) * (int(weight.code_NK[n, k]) - int(zero[n, g]))
                total += float(act_MK[m, k]) * w
            assert math.isclose(float(out_MN[m, n]), total, rel_tol=1e-5, abs_tol=1e-6)


def test_silu_mul_is_silu_of_the_first_half_times_the_second() -> None:
    weight = make_weight(8, 16, 8)
    act_MK = torch.randn(5, 16)
    gate, up = w4a16_ref(act_MK, weight).chunk(2, dim=1)
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(w4a16_ref(act_MK, weight, silu_mul=True), expected)


def test_the_weight_is_rounded_to_the_activations_dtype() -> None:
    weight = make_weight(8, 16, 8)
    eye = torch.eye(16, dtype=torch.bfloat16)
    assert torch.equal(w4a16_ref(eye, weight).T, weight.dequantize(torch.bfloat16))
