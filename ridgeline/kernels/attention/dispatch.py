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
registry.load_early("attention")
_FIELDS = [field.name for field in fields(Arguments)]
DIFFERENTIABLE = ("q", "k", "v", "sinks", "bias")
"""The first arguments, in their order."""
_USUAL = (torch.Tensor, torch.nn.Parameter)

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
    problem: AttentionProblem, device: torch.device, impl: str | None, switches: tuple[Any, ...]
) -> ModuleType:
    arch = arch_of(device)
    chosen = registry.select(problem, arch, impl)
    if impl in (None, "auto") and env.impl_override("attention") is None:
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
    return _decide(problem, device, impl, env.switches("attention"))


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


def gradients(
    given: Arguments,
    module: Any,
    results: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of what is differentiable, in the dtypes it was given in; None where there is none.
    results: dout, dlse, out, lse."""
    a, (dout, dlse, out, lse) = with_fp32_sinks(given), results
    grads = module.backward(dout, dlse, a.q, a.k, a.v, out, lse, a.options(), a.extras())
    found = (grads.dq, grads.dk, grads.dv, grads.dsinks, grads.dbias)
    return tuple(
        None if grad is None else grad.to(getattr(given, name).dtype).contiguous()
        for grad, name in zip(found, DIFFERENTIABLE, strict=True)
    )


def eager(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether a call may pass by the dispatcher, as nobody listens there.

    False under compile, tracing, modes, functorch transforms and for subclasses of Tensor.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    for tensor in tensors:  # noqa: SIM110 (a generator takes twice the time)
        if tensor is not None and type(tensor) not in _USUAL:
            return False
    return True


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
    module = module_for(with_fp32_sinks(given), "bwd")
    found = gradients(given, module, (dout, dlse, out, lse))
    return tuple(dout.new_empty(0) if grad is None else grad for grad in found)


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
    given = (getattr(a, name) for name in DIFFERENTIABLE)
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
    for name, grad in zip(DIFFERENTIABLE, found, strict=True):
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
