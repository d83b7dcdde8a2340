"""The attention operators ridgeline::attention and its backward: registrations and dispatch.

One forward operator returns (out, lse), both differentiable; one backward operator returns every
gradient (empty tensors where there is none). Both validate nothing twice: forward checks its
arguments, chooses an implementation (the decision is cached by problem) and calls its module.
torch.compile sees two opaque operators, so fullgraph works and nothing recompiles for lengths.
Source: PyTorch, "Custom operators",
https://pytorch.org/tutorials/advanced/custom_ops_landing_page.html
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from ridgeline.core import arch as arches
from ridgeline.core import env, registry
from ridgeline.core.arch import Arch
from ridgeline.core.errors import unsupported
from ridgeline.kernels.attention import impls as _registrations
from ridgeline.kernels.attention.arguments import SCHEMA, Arguments, check, with_fp32_sinks
from ridgeline.kernels.attention.config import DecodeConfig, TileConfig
from ridgeline.kernels.attention.cute_sm90_config import ForwardConfig
from ridgeline.kernels.attention.problem import AttentionProblem

assert _registrations is not None  # imported for its registrations
_FIELDS = [field.name for field in fields(Arguments)]
_TENSORS = _FIELDS[: _FIELDS.index("seed_offset") + 1]
_DIFFERENTIABLE = ("q", "k", "v", "sinks", "bias")
_known: dict[tuple[Any, ...], Any] = {}
_MOST_KNOWN = 4096

_lib = torch.library.Library("ridgeline", "FRAGMENT")
_lib.define(f"attention({SCHEMA}) -> (Tensor out, Tensor lse)")
_lib.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {SCHEMA}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dbias)"
)
attention_op = torch.ops.ridgeline.attention.default
backward_op = torch.ops.ridgeline.attention_backward.default


@lru_cache(maxsize=64)
def arch_of(device: torch.device) -> Arch:
    """The architecture of a device, looked up once."""
    return arches.detect(device)


@lru_cache(maxsize=4096)
def _decide(
    problem: AttentionProblem, device: torch.device, impl: str | None, override: str | None
) -> ModuleType:
    arch = arch_of(device)
    chosen = registry.select(problem, arch, impl)
    if impl in (None, "auto") and override is None:
        registry.warn_fallback(chosen, arch, "nothing faster accepts the problem")
        registry.warn_lacking(problem, arch, chosen)
    return registry.load(chosen)


def keys_of_tile(problem: AttentionProblem, arch: Arch) -> int | None:
    """Keys of a tile of the implementation that takes a problem; None where it has no tiles."""
    impl = registry.select(problem, arch)
    config = None if impl.config is None else impl.config(problem, arch)
    if isinstance(config, ForwardConfig):
        return config.block_k
    tile = config.tile if isinstance(config, DecodeConfig) else config
    return tile.block_n if isinstance(tile, TileConfig) else None


def module_for(a: Arguments, direction: str) -> Any:
    """The module of the implementation that takes a call; the decision is cached."""
    return module_of(a.problem(direction), a.q.device, a.impl)


def module_of(problem: AttentionProblem, device: torch.device, impl: str | None) -> Any:
    """The module of the implementation that takes a problem on a device."""
    return _decide(problem, device, impl, env.impl_override("attention"))


def chosen(a: Arguments) -> Any:
    """The module for a checked call's forward.

    Raises: NotImplementedError, where a gradient is needed also for a backward that is refused:
    better now than after a whole forward.
    """
    if a.needs_grad:
        module_for(a, "bwd")
    return module_for(a, "fwd")


def run(a: Arguments, module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward of a checked call whose sinks are fp32."""
    out, lse = module.forward(a.q, a.k, a.v, a.options(), a.extras())
    return out.contiguous(), lse.contiguous()


def eager(tensors: Iterable[torch.Tensor | None], needs_grad: bool) -> bool:
    """Whether nothing but the result is wanted of a call: it then passes by the dispatcher.

    False under compile, tracing, modes, functorch transforms and for subclasses of Tensor.
    """
    if torch.compiler.is_compiling() or needs_grad or torch._C._is_tracing():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    return all(t is None or type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)


def plain_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scalars: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What the checks and the choice of a call of nothing but q, k, v and numbers depend on, so
    that they are made once a kind of call."""
    shapes, dtypes = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype)
    devices = (q.device, k.device, v.device)
    return (shapes, dtypes, devices, scalars, env.impl_override("attention"))


def known_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scalars: tuple[Any, ...]
) -> torch.Tensor | None:
    """The output where nothing but it is wanted of a call whose kind is known; else None, and
    `remember` learns the kind. What a call then takes the host: half of the long way."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if not eager((q, k, v), False):
        return None
    found = _known.get(plain_key(q, k, v, scalars))
    return None if found is None else found[0].forward(q, k, v, *found[1:])[0].contiguous()


def remember(a: Arguments, scalars: tuple[Any, ...]) -> None:
    """A call that passed its checks, without optional tensors, is the next one's short way."""
    if a.needs_grad or not eager((a.q, a.k, a.v), False):
        return
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[plain_key(a.q, a.k, a.v, scalars)] = (chosen(a), a.options(), a.extras())


def attention(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """A call of the public functions -> (out, lse): checked, dispatched, differentiable."""
    if not eager((getattr(a, name) for name in _TENSORS), a.needs_grad):
        return attention_op(*[getattr(a, name) for name in _FIELDS])
    a = with_fp32_sinks(a)
    check(a)
    with torch.no_grad():
        return run(a, chosen(a))


@torch.library.impl("ridgeline::attention", ("cpu", "cuda"), lib=_lib)
def _attention(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a = with_fp32_sinks(Arguments(*values))
    check(a)
    return run(a, chosen(a))


@torch.library.impl("ridgeline::attention_backward", ("cpu", "cuda"), lib=_lib)
def _attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *values: Any,
) -> tuple[torch.Tensor, ...]:
    given = Arguments(*values)
    a = with_fp32_sinks(given)
    module = module_for(a, "bwd")
    grads = module.backward(dout, dlse, a.q, a.k, a.v, out, lse, a.options(), a.extras())
    found = (grads.dq, grads.dk, grads.dv, grads.dsinks, grads.dbias)
    wanted = zip(found, _DIFFERENTIABLE, strict=True)
    return tuple(
        dout.new_empty(0) if grad is None else grad.to(getattr(given, name).dtype).contiguous()
        for grad, name in wanted
    )


@torch.library.register_fake("ridgeline::attention", lib=_lib)
def _attention_fake(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a = Arguments(*values)
    q = a.q
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((*q.shape[:-1], a.v.shape[-1]))
    return out, q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=wide)


@torch.library.register_fake("ridgeline::attention_backward", lib=_lib)
def _attention_backward_fake(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *values: Any,
) -> tuple[torch.Tensor, ...]:
    a = Arguments(*values)
    given = (getattr(a, name) for name in _DIFFERENTIABLE)
    return tuple(
        dout.new_empty(0)
        if t is None
        else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in given
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    tensors = [value if isinstance(value, torch.Tensor) else None for value in inputs]
    ctx.save_for_backward(*output, *tensors)
    ctx.scalars = [None if isinstance(value, torch.Tensor) else value for value in inputs]


def _differentiate(
    ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    out, lse, *tensors = ctx.saved_tensors
    pairs = zip(tensors, ctx.scalars, strict=True)
    inputs = [scalar if tensor is None else tensor for tensor, scalar in pairs]
    grads: list[torch.Tensor | None] = [None] * len(inputs)
    if dout is None and dlse is None:
        return tuple(grads)
    dout = torch.zeros_like(out) if dout is None else dout
    found = backward_op(dout, dlse, out, lse, *inputs)
    for name, grad in zip(_DIFFERENTIABLE, found, strict=True):
        index = _FIELDS.index(name)
        grads[index] = grad if ctx.needs_input_grad[index] else None
    return tuple(grads)


def _refuse_second_derivative(ctx: Any, *grads: torch.Tensor | None) -> None:
    raise unsupported(
        "attention", "create_graph", "be False", True, "a second derivative is not implemented"
    )


torch.library.register_autograd(
    "ridgeline::attention", _differentiate, setup_context=_save, lib=_lib
)
torch.library.register_autograd(
    "ridgeline::attention_backward", _refuse_second_derivative, lib=_lib
)
