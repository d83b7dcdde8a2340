"""The CPU implementation takes PyTorch's int4 kernel exactly where that is exact."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ridgeline.kernels.w4a16 import cpu, op
from ridgeline.kernels.w4a16.ref import w4a16_ref

from .weights import make_weight

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("weight", "dtype", "reason"),
    [
        ({}, BF16, None),
        ({"act_order": True}, BF16, None),
        ({}, torch.float32, "bfloat16 activations only"),
        ({"symmetric": False}, BF16, "zero points"),
        ({"coarse": False}, BF16, "more bits than bfloat16"),
        ({"bits": 8}, BF16, "4 bits only"),
        ({"group": 24}, BF16, "groups of"),
        ({"n": 40}, BF16, "multiples of 16"),
    ],
)
def test_which_weights_go_through_int4(weight: dict, dtype: torch.dtype, reason) -> None:
    arguments = {"n": 48, "k": 192, "group": 64, "coarse": True} | weight
    made = make_weight(**arguments)
    why = cpu.int4_refusal(made, dtype)
    assert (why is None) if reason is None else (why is not None and reason in why)
    assert len(cpu.prepare(made, dtype)) == (4 if reason is None else 1)


def test_act_order_with_unequal_groups_is_not_taken() -> None:
    weight = make_weight(32, 128, 64, act_order=True, coarse=True)
    assert weight.group_of_K is not None
    table = weight.group_of_K.clone()
    table[:] = 0
    table[:3] = 1
    uneven = dataclasses.replace(weight, group_of_K=table)
    assert "unequal" in (cpu.int4_refusal(uneven, BF16) or "")
    prepared = op.prepare(uneven, BF16)
    eye = torch.eye(128, dtype=BF16)
    assert torch.equal(op.w4a16_linear(eye, prepared).T, uneven.dequantize(BF16))


def test_both_layouts_are_used(monkeypatch) -> None:
    """Below the measured row count the int4 kernel runs, from it on the wide matmul."""
    prepared = op.prepare(make_weight(32, 64, 32, coarse=True), BF16)
    calls = []
    original = cpu._int4
    monkeypatch.setattr(cpu, "_int4", lambda *a: calls.append(a[0].shape[0]) or original(*a))
    limit = cpu.rows_for_wide()
    for rows in (1, limit - 1, limit, limit + 1):
        op.w4a16_linear(torch.randn(rows, 64, dtype=BF16), prepared)
    assert calls == [1, limit - 1]


@pytest.mark.parametrize("m", [1, 15, 40])
def test_act_order_gathers_the_activations(m: int) -> None:
    weight = make_weight(48, 192, 64, act_order=True, coarse=True)
    act_MK = torch.randn(m, 192, dtype=BF16)
    out = op.w4a16_linear(act_MK, op.prepare(weight, BF16)).float()
    exact = w4a16_ref(act_MK.float(), weight)
    plain = w4a16_ref(act_MK, weight, compute_dtype=BF16).float()
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-5
