"""Differentiable collectives of tensor parallel, each with its mirror in the backward pass.

    name        forward                backward
    copy        identity               all-reduce         before a column-split linear
    reduce      all-reduce             identity           after a row-split linear
    gather      all-gather along dim   reduce-scatter     the same two with sequence parallel,
    scatter     reduce-scatter         all-gather         of the same bytes in all
    split       own piece along dim    all-gather         replicated -> sequence parallel

Bytes a rank and call of n elements over t ranks: all-reduce 2 n (t-1)/t, the others n (t-1)/t.
The functional forms are used, which torch.compile can trace and overlap. Sources: Shoeybi et al.
2019 (arXiv 1909.08053) section 3; Korthikanti et al. 2022 (2205.05198) section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

_ops = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Group:
    """Some ranks, by name: what a compiler takes for a constant."""

    name: str
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Group:
        """The name and size of a process group."""
        return cls(group.group_name, group.size())


def all_reduce(x: torch.Tensor, group: Group, op: str = "sum") -> torch.Tensor:
    """The sum (or op) of all ranks' tensors; not differentiable."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group.name))


def all_gather(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """All ranks' pieces joined along a dim; not differentiable."""
    first = _first(x, dim)
    found = _ops.all_gather_into_tensor(first, group.size, group.name)
    return _back(_ops.wait_tensor(found), x, dim)


def reduce_scatter(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's piece along a dim of all ranks' sum; not differentiable."""
    first = _first(x, dim)
    found = _ops.reduce_scatter_tensor(first, "sum", group.size, group.name)
    return _back(_ops.wait_tensor(found), x, dim)


def _first(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A dim brought to the front: a view where only dims of size 1 lie before it, and a mere
    reshape then: what a compiler sees through to the product beside the collective."""
    if all(size == 1 for size in x.shape[:dim]):
        return x.reshape(x.shape[dim:]).contiguous()
    return x.movedim(dim, 0).contiguous()


def _back(found: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """The dim back in its place."""
    if all(size == 1 for size in x.shape[:dim]):
        return found.reshape(x.shape[:dim] + found.shape)
    return found.movedim(0, dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, size: int) -> torch.Tensor:
        ctx.group = (name, size)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return all_reduce(grads[0], Group(*ctx.group)), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, size: int) -> torch.Tensor:
        return all_reduce(x, Group(name, size))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, size: int, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = (name, size), dim
        return all_gather(x, Group(name, size), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return reduce_scatter(grads[0], Group(*ctx.group), ctx.dim), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, size: int, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = (name, size), dim
        return reduce_scatter(x, Group(name, size), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return all_gather(grads[0], Group(*ctx.group), ctx.dim), None, None, None


def copy(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Identity whose gradient is summed over the group."""
    return _Copy.apply(x, group.name, group.size)


def reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group, whose gradient every rank has already."""
    return _Reduce.apply(x, group.name, group.size)


def gather(x: torch.Tensor, group: Group, dim: int = 1) -> torch.Tensor:
    """Pieces joined along a dim; each rank's gradient is summed and cut again."""
    return _Gather.apply(x, group.name, group.size, dim)


def scatter(x: torch.Tensor, group: Group, dim: int = 1) -> torch.Tensor:
    """Own piece of the sum; its gradient is joined again."""
    return _Scatter.apply(x, group.name, group.size, dim)
