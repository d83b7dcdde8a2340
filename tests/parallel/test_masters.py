"""Masters take gradients over in their own dtype; deferred products give the plain ones'."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.parallel.deferred import defer
from ridgeline.parallel.masters import add_gradient, master_of


def test_a_master_adds_up_without_rounding_to_bf16():
    low = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    master = master_of(low, torch.float32)
    parts = [torch.randn(64).bfloat16() for _ in range(5)]
    for part in parts:
        (low * part).sum().backward()
    assert low.grad is None and master.grad is not None and master.grad.dtype == torch.float32
    assert torch.equal(master.grad, sum(part.float() for part in parts))
    assert not torch.equal(master.grad, sum(parts).float())  # what accumulating in bf16 gives
    add_gradient(low, parts[0])
    assert torch.equal(master.grad, sum(part.float() for part in [*parts, parts[0]]))


def test_a_parameter_of_the_same_dtype_is_its_own_master():
    parameter = nn.Parameter(torch.ones(3))
    assert master_of(parameter, torch.float32) is parameter


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_deferred_products_are_the_plain_ones_once_they_are_made(bias, dtype):
    stack = nn.Sequential(nn.Linear(6, 5, bias), nn.SiLU(), nn.Linear(5, 4, bias)).to(dtype)
    masters = [master_of(p, torch.promote_types(dtype, torch.float32)) for p in stack.parameters()]
    for master, parameter in zip(masters, stack.parameters(), strict=True):
        master.data.copy_(parameter)
    x = torch.randn(2, 3, 6, dtype=dtype, requires_grad=True)
    stack(x).square().sum().backward()
    wanted, dx = [master.grad for master in masters], x.grad
    for tensor in (*masters, x):
        tensor.grad = None
    queue = defer(stack)
    stack(x).square().sum().backward()
    rounding = 2 * torch.finfo(dtype).eps  # a bias is added apart
    torch.testing.assert_close(x.grad, dx, rtol=rounding, atol=rounding)
    assert len(queue) == 2
    weights = [m for m in masters if m.dim() == 2]
    assert all(m.grad is None for m in weights)
    make = queue.take()
    assert len(queue) == 0
    make()
    for master, want in zip(masters, wanted, strict=True):
        torch.testing.assert_close(master.grad, want, rtol=4 * rounding, atol=4 * rounding)


def test_two_backward_passes_wait_apart():
    stack = nn.Sequential(nn.Linear(3, 2, bias=False))
    queue = defer(stack)
    makers = []
    xs = torch.randn(2, 4, 3)
    for x in xs:
        stack(x).sum().backward()
        makers.append(queue.take())
    makers[1]()
    assert torch.equal(stack[0].weight.grad, F.linear(torch.ones(2, 4), xs[1].T))
    makers[0]()
    makers[0]()  # made once
    total = F.linear(torch.ones(2, 8), xs.flatten(0, 1).T)
    torch.testing.assert_close(stack[0].weight.grad, total)
