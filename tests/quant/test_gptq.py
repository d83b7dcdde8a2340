"""GPTQ against the textbook in fp64, and what it does with Hessians that misbehave."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.errors import UserError
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.formats.grid import GridSpec
from ridgeline.quant.gptq import (
    GPTQOptions,
    Hessian,
    factorize,
    output_error,
    quantize_layers,
)

from .models import textbook_gptq

PLAIN = {"clip_search": False, "refits": 0}


def layer(n: int = 24, k: int = 96, tokens: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and a Hessian with correlated inputs of very different strength."""
    mix = torch.randn(k, k, dtype=torch.float64) * torch.logspace(0, 1.5, k, dtype=torch.float64)
    x = torch.randn(tokens, k, dtype=torch.float64) @ mix.T / k
    return torch.randn(n, k, dtype=torch.float64), x.T @ x / tokens


def solve(w, H, spec=None, group=16, **options):
    spec = spec or GridSpec()
    return quantize_layers([w], H, spec, group, GPTQOptions(**options))[0]


@pytest.mark.parametrize("order", ["natural", "static", "activation"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("block", [7, 32, 128])
@pytest.mark.parametrize("group", [16, 40, 96])
def test_equals_the_textbook(order, symmetric, bits, block, group) -> None:
    w, H = layer()
    H[5], H[:, 5] = 0.0, 0.0
    spec = GridSpec(bits=bits, symmetric=symmetric)
    weight, report = solve(w, H, spec, group, order=order, block=block, damping=0.02, **PLAIN)
    expected = textbook_gptq(
        w, H, group=group, order=order, damping=0.02, bits=bits, symmetric=symmetric
    )
    torch.testing.assert_close(weight.dequantize().double(), expected, rtol=1e-6, atol=1e-9)
    assert report.dead_columns == 1 and report.damping == 0.02
    error = weight.dequantize().double() - w
    assert report.loss == pytest.approx(float(torch.trace(error @ H @ error.T)), rel=1e-6)


def test_float32_agrees_with_float64_nearly_everywhere() -> None:
    w, H = layer()
    exact = solve(w, H, **PLAIN)[0].code_NK
    close = solve(w.float(), H.float(), **PLAIN)[0].code_NK
    assert (exact != close).float().mean() < 0.01


def test_stacked_layers_equal_the_same_ones_alone() -> None:
    w, H = layer(n=40)
    options = GPTQOptions()
    together = quantize_layers([w[:24], w[24:]], H, GridSpec(), 16, options)
    for (weight, report), part in zip(together, (w[:24], w[24:]), strict=True):
        alone, alone_report = quantize_layers([part], H, GridSpec(), 16, options)[0]
        assert torch.equal(weight.code_NK, alone.code_NK)
        assert torch.equal(weight.scale_NR, alone.scale_NR)
        assert report.loss == pytest.approx(alone_report.loss)


def test_what_each_addition_is_worth() -> None:
    """Rounding > textbook > searched scales >= refitted scales, in output error."""
    w, H = layer(n=64)
    rounded = GPTQFormat(group_size=16).quantize_ref(w).dequantize().double()
    losses = [
        output_error(w, rounded, H)[0],
        solve(w, H, **PLAIN)[1].loss,
        solve(w, H, clip_search=True, refits=0)[1].loss,
        solve(w, H, clip_search=True, refits=2)[1].loss,
    ]
    assert losses[1] < 0.6 * losses[0]
    assert losses[2] < 0.9 * losses[1]
    assert losses[3] < losses[2]


def test_act_order_stores_its_groups() -> None:
    w, H = layer()
    weight, _ = solve(w, H, order="activation")
    table = weight.group_of_K
    assert table is not None
    order = torch.argsort(H.diagonal(), descending=True, stable=True)
    assert torch.equal(table[order], torch.arange(96, dtype=torch.int32) // 16)
    form = GPTQFormat(group_size=16, desc_act=True)
    assert torch.equal(form.dequant_ref(form.pack(weight)), weight.dequantize())
    assert solve(w, H, order="static")[0].group_of_K is None


def test_scales_are_what_the_file_holds() -> None:
    """Codes are nearest for the stored scale: in natural order the last column has no later one to
    lean on, and an identity Hessian makes every column plain rounding."""
    w = torch.randn(8, 32)
    spec = GridSpec(scale_mantissa_bits=7)
    weight, _ = solve(w, torch.eye(32), spec, order="natural", refits=1)
    scale = weight.scale_NR.float()[:, weight.groups_K()]
    nearest = (w / scale).round().clamp(-8, 7) + 8
    assert torch.equal(weight.code_NK, nearest.to(torch.uint8))
    assert torch.equal(weight.scale_NR.to(torch.bfloat16).half(), weight.scale_NR)


def test_dead_columns_get_the_code_of_zero() -> None:
    w, H = layer()
    H[[3, 50]], H[:, [3, 50]] = 0.0, 0.0
    weight, report = solve(w, H)
    assert report.dead_columns == 2
    assert torch.equal(weight.dequantize()[:, [3, 50]], torch.zeros(24, 2))


def test_damping_is_raised_and_reported() -> None:
    """An indefinite matrix is refused at 0.01 and taken once the diagonal outweighs it."""
    H = torch.eye(32)
    H[0, 1] = H[1, 0] = 1.045
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.cholesky(H + 0.01 * torch.eye(32))
    factor = factorize(H, GPTQOptions(damping=0.01, damping_step=0.02))
    assert factor.raises == 2 and factor.damping == pytest.approx(0.05)
    _, report = solve(torch.randn(8, 32), H)
    assert report.damping_raises == 3 and report.damping == pytest.approx(0.05)


def test_a_hopeless_hessian_is_refused_not_rounded() -> None:
    H = torch.eye(16)
    H[0, 1] = H[1, 0] = 5.0
    with pytest.raises(UserError, match="Hessian of blocks.0.q must be positive definite"):
        quantize_layers([torch.randn(8, 16)], H, GridSpec(), 16, GPTQOptions(), name="blocks.0.q")


def test_not_finite_inputs_are_refused() -> None:
    hessian = Hessian.zeros(16)
    x = torch.randn(10, 16)
    x[3, 3] = float("nan")
    hessian.add(x)
    with pytest.raises(UserError, match="inputs of q must be finite, got NaN or infinity"):
        quantize_layers(
            [torch.randn(8, 16)], hessian.mean(), GridSpec(), 16, GPTQOptions(), name="q"
        )


def test_hessian_is_the_mean_over_all_tokens() -> None:
    x = torch.randn(7, 5, 16)
    hessian = Hessian.zeros(16)
    hessian.add(x[:3])
    hessian.add(x[3:])
    flat = x.reshape(-1, 16)
    assert hessian.tokens == 35
    torch.testing.assert_close(hessian.mean(), flat.T @ flat / 35)


def test_upper_factor_is_that_of_the_inverse() -> None:
    _, H = layer(k=40)
    factor = factorize(H, GPTQOptions(damping=0.05))
    damped = H + 0.05 * H.diagonal().mean() * torch.eye(40)
    inverse = torch.linalg.inv(damped[factor.order_K][:, factor.order_K])
    upper = factor.upper_KK
    torch.testing.assert_close(upper.T @ upper, inverse)
    assert torch.equal(upper, upper.triu())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "random"}, "gptq: order must be natural, static or activation"),
        ({"damping": 0.0}, r"gptq: damping must lie in \(0, 1\], got 0.0"),
        ({"damping_step": 0.0}, "gptq: damping_limit must be at least damping"),
        ({"block": 0}, "gptq: block must be at least 1"),
        ({"refits": -1}, "gptq: refits must be 0 or more"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTQOptions(**options)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad) -> None:
    w, H = layer()
    w[3, 7] = bad
    with pytest.raises(UserError, match="weights of layer must be finite, got NaN or infinity"):
        solve(w, H)
