"""Calls of the public functions: checked and decided once a kind, then short.

A kind is what checks, choice and plan depend on: shapes, strides, dtypes, devices, numbers, whether
gradients are wanted, and the environment's switches. What a call of a known kind then takes the
host is a key, a look into a dictionary, the outputs and the launch. Gradients go through one
autograd.Function, which costs a third of an operator of `torch.library`; where somebody listens to
operators (compile, tracing, modes, functorch, subclasses of Tensor, second derivatives), the calls
are the operators of dispatch.py, with the same meaning.

An implementation's module may have, for dense calls without optional tensors,
    prepare_forward(q, k, v, options) -> (q, k, v) -> (out, lse)
    prepare_backward(options) -> (dout, dlse, q, k, v, out, lse) -> (dq, dk, dv)
Both take tensors of the kind that they were made for (the backward any strides).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from ridgeline.core import env
from ridgeline.kernels.attention.alike import like
from ridgeline.kernels.attention.arguments import (
    Arguments,
    check_static,
    check_values,
    with_fp32_sinks,
)
from ridgeline.kernels.attention.dispatch import (
    attention_op,
    backward_op,
    chosen,
    eager,
    gradients,
    module_for,
)
from ridgeline.kernels.attention.recent import Recent

_FIELDS = [field.name for field in fields(Arguments)]
_NUM_TENSORS = _FIELDS.index("seed_offset") + 1
_tensors_of = operator.attrgetter(*_FIELDS[:_NUM_TENSORS])
_numbers_of = operator.attrgetter(*_FIELDS[_NUM_TENSORS:])
_kinds: Recent[Kind] = Recent(2048)
_CONSTANT = (float, int, bool, str, type(None))
Pair = tuple[torch.Tensor, torch.Tensor]


MOST_LAST = 256


@dataclass(frozen=True, slots=True)
class Last:
    """The last call of nothing but q, k, v and some numbers: a model's layers repeat it."""

    alike: Callable[..., bool]
    enabled: bool
    """Whether gradients were."""
    switches: tuple[Any, Any]
    grad: bool
    kind: Kind

    def again(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether a call is of the same kind."""
        return (
            self.alike(q, k, v)
            and torch.is_grad_enabled() is self.enabled
            and self.switches == env.switches("attention")
        )


_last: dict[tuple[Any, ...], Last] = {}
"""By their numbers, as layers with and without a window alternate."""


def forget() -> None:
    """Learn every kind of call anew: for those who exchange an implementation's parts."""
    _kinds.clear()
    _last.clear()


def known(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: tuple[Any, ...]
) -> Pair | None:
    """(out, lse) of a call of nothing but q, k, v and numbers, where its kind is known; else None,
    and `attention` learns it."""
    if torch.compiler.is_compiling():
        return None
    last = _last.get(numbers)
    if last is None or not last.again(q, k, v):
        last = _looked_up(q, k, v, numbers)
        if last is None:
            return None
    kind = last.kind
    return _Attention.apply(kind, q, k, v) if last.grad else kind.forward(q, k, v)


def _looked_up(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: tuple[Any, ...]
) -> Last | None:
    """The same among all kinds; from now on it is the last."""
    if not eager((q, k, v)):
        return None
    enabled = torch.is_grad_enabled()
    grad = enabled and (q.requires_grad or k.requires_grad or v.requires_grad)
    kind = _kinds.get(_plain_key(q, k, v, numbers, grad))
    if kind is None:
        return None
    if len(_last) >= MOST_LAST:
        _last.clear()
    last = _last[numbers] = Last(like(q, k, v), enabled, env.switches("attention"), grad, kind)
    return last


def attention(a: Arguments, numbers: tuple[Any, ...] | None = None) -> Pair:
    """A call of the public functions -> (out, lse): checked, dispatched, differentiable.

    numbers: those that `known` is asked with, for a call without optional tensors.
    """
    if torch.compiler.is_compiling() or not eager(_tensors_of(a)):
        return attention_op(*[getattr(a, name) for name in _FIELDS])
    tensors = _tensors_of(a)
    if numbers is None:
        kind = kind_of(a)
    else:
        tensors = tensors[:3]
        kind = _learn(a, _plain_key(a.q, a.k, a.v, numbers, a.needs_grad), prepared=True)
    return _Attention.apply(kind, *tensors) if a.needs_grad else kind.run(a)


def kind_of(a: Arguments, more: Callable[[], None] | None = None) -> Kind:
    """The kind of an eager call, which is checked; more: checks after those of shapes.

    Raises: as arguments.check, and where nothing serves the call.
    """
    key = _key(a)
    kind = _kinds.get(key)
    if kind is None:
        return _learn(a, key, more, prepared=False)
    if more is not None:
        more()
    if not a.q.is_cuda:  # values on the host may be others than before
        check_values(a)
    return kind


def _learn(
    a: Arguments, key: tuple[Any, ...], more: Callable[[], None] | None = None, *, prepared: bool
) -> Kind:
    a = with_fp32_sinks(a)
    check_static(a)
    if more is not None:
        more()
    check_values(a)
    kind = Kind(a, prepared)
    if all(type(number) in _CONSTANT for number in _numbers_of(a)):
        _kinds[key] = kind  # not of a tensor, whose value may be another next time
    return kind


def _plain_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: tuple[Any, ...], grad: bool
) -> tuple[Any, ...]:
    return (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        numbers,
        grad,
        env.switches("attention"),
    )


def _key(a: Arguments) -> tuple[Any, ...]:
    """Without strides: an implementation makes its own plan of them at each call."""
    kinds = [None if t is None else (t.shape, t.dtype, t.device) for t in _tensors_of(a)]
    return (*kinds, _numbers_of(a), env.switches("attention"))


class Kind:
    """A kind of call that passed its checks: who serves it, and how."""

    __slots__ = ("_backward_module", "_module", "_numbers", "_options", "backward", "forward")

    forward: Callable[..., Pair]
    """tensors -> (out, lse), contiguous"""
    backward: Callable[..., tuple[torch.Tensor | None, ...]]
    """(dout, dlse, out, lse, *tensors) -> a gradient a tensor that is differentiable"""

    def __init__(self, a: Arguments, prepared: bool) -> None:
        self._numbers, self._options = _numbers_of(a), a.options()
        self._module = chosen(a)
        self._backward_module = module_for(a, "bwd") if a.needs_grad else None
        self.forward, self.backward = self._forward, self._backward
        if prepared and hasattr(self._module, "prepare_forward"):
            self.forward = self._module.prepare_forward(a.q, a.k, a.v, self._options)
        if prepared and hasattr(self._backward_module, "prepare_backward"):
            assert self._backward_module is not None
            run = self._backward_module.prepare_backward(self._options)
            self.backward = lambda dout, dlse, out, lse, *qkv: run(dout, dlse, *qkv, out, lse)

    def values(self, tensors: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
        """The operators' arguments."""
        return (*tensors, *(None,) * (_NUM_TENSORS - len(tensors)), *self._numbers)

    def _forward(self, *tensors: torch.Tensor | None) -> Pair:
        return self.run(Arguments(*self.values(tensors)))

    def run(self, a: Arguments) -> Pair:
        """The forward of a call of this kind."""
        a = with_fp32_sinks(a)
        out, lse = self._module.forward(a.q, a.k, a.v, self._options, a.extras())
        return out.contiguous(), lse.contiguous()

    def _backward(
        self,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
        *tensors: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        given = Arguments(*self.values(tensors))
        return gradients(given, self._backward_module, (dout, dlse, out, lse))


class _Attention(torch.autograd.Function):
    """The operators' autograd without the operators. What it saves, and in which order, is what
    they save: recomputation may take either."""

    @staticmethod
    def forward(ctx: Any, kind: Kind, *tensors: torch.Tensor | None) -> Pair:
        out, lse = kind.forward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.kind = kind
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        dout, dlse = grads
        out, lse, *tensors = ctx.saved_tensors
        found: list[torch.Tensor | None] = [None] * (1 + len(tensors))
        if dout is None and dlse is None:
            return tuple(found)
        dout = torch.zeros_like(out) if dout is None else dout
        if torch.is_grad_enabled() or not eager((dout, dlse, out, lse, *tensors)):
            made = backward_op(dout, dlse, out, lse, *ctx.kind.values(tuple(tensors)))
        else:
            made = ctx.kind.backward(dout, dlse, out, lse, *tensors)
        wanted = ctx.needs_input_grad
        for index, grad in enumerate(made[: len(tensors)], start=1):
            found[index] = grad if wanted[index] else None
        return tuple(found)
