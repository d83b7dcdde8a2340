"""Linears whose weight gradient is made later: what a schedule fills a pipeline's gaps with.

    backward pass:   dx = dy W          at once, the stage before waits for it
                     dW = dy^T x        queued with its operands, made when the schedule asks

Everything else (norms, biases, embedding, the loss's head) makes its gradients at once: they are a
small part of the work. The queue holds dy and x of each linear until then. PyTorch's schedules take
it as `dw_builder`. Source of the idea: Qi et al. 2023, "Zero Bubble Pipeline Parallelism"
(arXiv 2401.10241), section 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ridgeline.parallel.masters import add_gradient
from ridgeline.parallel.tensor import ColumnLinear, RowLinear


class Deferred:
    """The products of one stage's backward pass that are still to be made."""

    def __init__(self) -> None:
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> None:
        """Queue weight's gradient grad^T x."""
        self._waiting.append((weight, x, grad))

    def take(self) -> Callable[..., None]:
        """What makes the gradients queued so far, to be called once."""
        taken, self._waiting = self._waiting, []

        @torch.no_grad()
        def run() -> None:
            while taken:
                weight, x, grad = taken.pop(0)
                add_gradient(weight, grad.flatten(0, -2).T @ x.flatten(0, -2))

        return run

    def __len__(self) -> int:
        return len(self._waiting)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, queue: Deferred) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = weight, queue
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        grad = grads[0]
        ctx.queue.add(ctx.weight, x, grad)
        return (grad @ ctx.weight if ctx.needs_input_grad[0] else None), None, None


def linear(
    queue: Deferred, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight.T + bias, whose backward pass queues the weight's gradient."""
    y = _Linear.apply(x, weight, queue)
    return y if bias is None else y + bias


def defer(stack: nn.Module) -> Deferred:
    """Make the linears of a stack of blocks queue their weight gradients; returns the queue."""
    queue = Deferred()
    product = functools.partial(linear, queue)
    for module in stack.modules():
        if isinstance(module, (ColumnLinear, RowLinear)):
            module.product = product
        elif isinstance(module, nn.Linear):
            forward = functools.partial(_forward, module, product)
            module.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
    return queue


def _forward(module: nn.Linear, product: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return product(x, module.weight, module.bias)
