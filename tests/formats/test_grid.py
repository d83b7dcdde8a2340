"""Grids: the formulas of scale and zero point, storage rounding, ties, empty groups."""

from __future__ import annotations

import pytest
import torch

from ridgeline.formats.grid import GridSpec, group_view, quantize_rtn, range_params, to_codes


def test_symmetric_scale_is_absmax_over_seven_and_a_half() -> None:
    spec = GridSpec(scale_dtype=torch.float32)
    scale, zero = range_params(torch.tensor([-3.0]), torch.tensor([1.5]), spec)
    assert scale.item() == pytest.approx(0.4) and zero.item() == 8.0


def test_asymmetric_range_includes_zero() -> None:
    spec = GridSpec(symmetric=False, scale_dtype=torch.float32)
    scale, zero = range_params(torch.tensor([2.0, -4.0]), torch.tensor([5.0, -1.0]), spec)
    assert scale.tolist() == pytest.approx([5 / 15, 4 / 15])
    assert zero.tolist() == [0.0, 15.0]


def test_scale_is_rounded_before_codes() -> None:
    """Rounding codes with the unrounded scale would give another code here."""
    spec = GridSpec(scale_dtype=torch.float16)
    torch.manual_seed(1)
    w_NK = torch.randn(64, 64)
    weight = quantize_rtn(w_NK, spec, 64)
    scale = (w_NK.abs().amax(1, keepdim=True) / 7.5).half().float()
    assert torch.equal(weight.scale_NR, scale.half())
    code = (w_NK / scale).round().clamp(-8, 7) + 8
    assert torch.equal(weight.code_NK, code.to(torch.uint8))


def test_empty_group_has_scale_one() -> None:
    for symmetric in (True, False):
        weight = quantize_rtn(torch.zeros(2, 8), GridSpec(symmetric=symmetric), 4)
        assert torch.equal(weight.scale_NR, torch.ones(2, 2, dtype=torch.float16))
        assert torch.equal(weight.dequantize(), torch.zeros(2, 8))


def test_round_error_is_at_most_half_a_step() -> None:
    w_NK = torch.randn(8, 96)
    for bits in (2, 3, 4, 8):
        spec = GridSpec(bits=bits, symmetric=False)
        weight = quantize_rtn(w_NK, spec, 32)
        step = weight.scale_NR.float()[:, weight.groups_K()]
        # Half a step, and as much again at the ends of the range for the rounded zero point.
        assert ((weight.dequantize() - w_NK).abs() <= step * 1.01).all()
        inside = (weight.code_NK > 0) & (weight.code_NK < spec.max_code)
        assert ((weight.dequantize() - w_NK).abs() <= step * 0.501)[inside].all()


def test_ties_go_to_even_before_the_zero_point() -> None:
    code = to_codes(torch.tensor([0.5, 1.5, 2.5]), torch.ones(3), torch.full((3,), 3.0), 15)
    assert code.tolist() == [3.0, 5.0, 5.0]


def test_store_keeps_sign_and_limits() -> None:
    spec = GridSpec(scale_dtype=torch.float16)
    stored = spec.store(torch.tensor([1e9, -1e9, 1e-12, -0.1]))
    assert stored.tolist() == [65504.0, -65504.0, 2.0**-24, -0.0999755859375]


def test_mantissa_bits_make_scales_exact_in_bf16() -> None:
    spec = GridSpec(scale_mantissa_bits=7)
    scale = spec.store(torch.rand(1000) * torch.logspace(-4, 3, 1000))
    assert torch.equal(scale.to(torch.bfloat16).float(), scale)
    assert torch.equal(scale.half().float(), scale)


def test_short_last_group() -> None:
    w_NK = torch.randn(3, 10)
    grouped = group_view(w_NK, 4)
    assert grouped.shape == (3, 3, 4)
    assert torch.equal(grouped[:, 2].amax(-1), w_NK[:, 8:].amax(-1))
    weight = quantize_rtn(w_NK, GridSpec(), 4)
    assert weight.scale_NR.shape == (3, 3) and weight.code_NK.shape == (3, 10)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_refused(bad) -> None:
    w_NK = torch.randn(4, 16)
    w_NK[2, 5] = bad
    with pytest.raises(ValueError, match="grid: w_NK must be finite, got NaN or infinity"):
        quantize_rtn(w_NK, GridSpec(), 8)
