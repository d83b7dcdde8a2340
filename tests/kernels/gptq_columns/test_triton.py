"""The fused column loop against the columns one by one: on a GPU, in the interpreter
(test_triton_interpreted.py runs this file so), else the CPU's own loop."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core import env
from ridgeline.formats.grid import GridSpec
from ridgeline.kernels.gptq_columns import op
from ridgeline.kernels.gptq_columns.cpu import launch as loop
from ridgeline.quant.gptq import GPTQOptions, quantize_layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
SHAPES = [
    (1, 1, 1, "natural", True),
    (33, 40, 16, "natural", False),
    (31, 40, 16, "static", True),
    (33, 136, 136, "activation", True),
    (33, 136, 64, "activation", False),
    (32, 130, 64, "static", False),
]


def layer(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * 1000 + k)
    mix = torch.randn(k, k, generator=generator) / k**0.5
    x = torch.randn(4 * k, k, generator=generator) @ mix * torch.logspace(-1, 1, k)
    w_NK = torch.randn(n, k, generator=generator)
    return w_NK.to(DEVICE), (x.T @ x / len(x)).to(DEVICE)


@pytest.mark.parametrize(("n", "k", "group", "order", "symmetric"), SHAPES)
def test_same_codes_as_column_by_column(monkeypatch, n, k, group, order, symmetric):
    """The order of sums differs, so a weight at a tie may go the other way: none more."""
    w_NK, H = layer(n, k)
    spec = GridSpec(symmetric=symmetric)
    options = GPTQOptions(order=order)
    ((fast, report),) = quantize_layers([w_NK], H, spec, group, options)
    monkeypatch.setattr(op, "fused", lambda *_: None)
    ((slow, plain),) = quantize_layers([w_NK], H, spec, group, options)
    differ = (fast.code_NK != slow.code_NK).float().mean()
    assert float(differ) <= 0.01
    assert report.loss == pytest.approx(plain.loss, rel=0.02)


def test_ties_go_to_even_and_codes_are_clamped():
    w = torch.tensor([[0.5, 1.5, 2.5, -0.5, 99.0, -99.0, 1e30]], device=DEVICE)
    ones, zeros = torch.ones(1, 7, device=DEVICE), torch.full((1, 7), 8.0, device=DEVICE)
    columns = op.Columns(
        work_BN=w, unit_BB=torch.ones(1, 1, device=DEVICE), scale_RN=ones, zero_RN=zeros,
        group_B=torch.zeros(1, dtype=torch.int32, device=DEVICE), max_code=15,
    )  # fmt: skip
    signed, error, given = torch.empty_like(w), torch.empty_like(w), w.clone()
    solve = op.fused(w.device, w.dtype)
    assert solve is not None
    solve(columns, signed, error)
    assert signed[0].tolist() == [0.0, 2.0, 2.0, -0.0, 7.0, -8.0, 7.0]
    assert torch.equal(error, given - signed)


def test_what_serves_where(monkeypatch):
    """fp64 is not fused on a GPU; a CPU has its own loop, for both."""
    cpu = torch.device("cpu")
    assert (op.fused(torch.device(DEVICE), torch.float64) is None) == (DEVICE == "cuda")
    assert op.fused(cpu, torch.float64) is loop
    monkeypatch.setattr(env, "triton_interpreted", lambda: False)
    assert op.fused(cpu, torch.float32) is loop
