"""The W4A16 operation: validation, choice of implementation at load, the custom op.

    prepared = prepare(weight, torch.bfloat16)        # once, at load: picks and lays out
    out = w4a16_linear(act, prepared, bias)           # [..., K] -> [..., N]

`torch.ops.ridgeline.w4a16` has a fake, so torch.compile(fullgraph=True) and torch.export see one
opaque op; eager calls go to the implementation directly (the dispatcher's 100 us would double a
small layer's time on a CPU). Inference only: a backward raises by name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import torch
from torch.compiler import is_dynamo_compiling

from ridgeline.core import arch as arches
from ridgeline.core.dtypes import dtype_name
from ridgeline.core.errors import bad_type, bad_value, unsupported
from ridgeline.core.registry import impls, load, select, warn_fallback
from ridgeline.formats.base import QuantizedWeight
from ridgeline.kernels.w4a16 import impls as _registered  # noqa: F401
from ridgeline.kernels.w4a16.prepared import Prepared
from ridgeline.kernels.w4a16.problem import W4A16Problem

_ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)


def problem_of(
    weight: QuantizedWeight, dtype: torch.dtype, *, m: int = 1, silu_mul: bool = False
) -> W4A16Problem:
    """The problem that a weight poses with m rows of activations."""
    n, k = weight.shape_nk
    return W4A16Problem(
        m=m,
        n=n,
        k=k,
        group_size=weight.group_size,
        dtype=dtype_name(dtype),
        scale_dtype=dtype_name(weight.scale_NR.dtype),
        symmetric=weight.zero_NR is None,
        act_order=weight.group_of_K is not None,
        bias=weight.bias_N is not None,
        silu_mul=silu_mul,
        bits=weight.bits,
    )


def prepare(
    weight: QuantizedWeight,
    dtype: torch.dtype,
    *,
    impl: str = "auto",
    silu_mul: bool = False,
) -> Prepared:
    """Choose an implementation for a weight on its device and lay the weight out for it, once.

    Raises: TypeError for a dtype no implementation takes; ValueError for a weight that is not
    consistent or whose scales are not finite; NotImplementedError, with every refusal, when nothing
    takes it.
    """
    _check_weight(weight, dtype, silu_mul)
    problem = problem_of(weight, dtype, silu_mul=silu_mul)
    arch = arches.detect(weight.code_NK.device)
    chosen = select(problem, arch, impl)
    warn_fallback(chosen, arch, "nothing faster accepts this weight")
    tensors = load(chosen).prepare(weight, dtype, silu_mul=silu_mul)
    return Prepared(
        impl=chosen.name,
        n=problem.n,
        k=problem.k,
        bits=problem.bits,
        group_size=problem.group_size,
        dtype=dtype,
        symmetric=problem.symmetric,
        act_order=problem.act_order,
        silu_mul=silu_mul,
        tensors=tuple(tensors),
    )


def decode_bytes(prepared: Prepared) -> int:
    """Bytes of a prepared weight that one row of activations makes its implementation read."""
    own = getattr(_module(prepared.impl), "decode_bytes", None)
    return prepared.resident_bytes if own is None else own(prepared)


def restore_codes(prepared: Prepared) -> torch.Tensor | None:
    """code_NK uint8 [N, K] from a prepared weight; None where its layout does not give them back
    (the CPU's and the reference's, or with silu_mul)."""
    own = getattr(_module(prepared.impl), "restore_codes", None)
    return None if own is None or prepared.silu_mul else own(prepared)


def w4a16_linear(
    act: torch.Tensor,
    prepared: Prepared,
    bias_N: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """out = act @ dequant(W)^T (+ bias), or silu(gate) * up of it when prepared so.

    Shapes: act [..., K] in prepared.dtype on the weight's device; bias [N] likewise; out [..., N],
    or [..., N / 2] with silu_mul. batch_invariant: a row's bits do not depend on the other rows.
    Numerics: fp32 accumulation, one rounding at the end (the CPU's int4 path rounds before the
    bias).
    Raises: TypeError for dtypes, ValueError for shapes and devices, in the project's form.
    """
    if bias_N is None and not batch_invariant and not is_dynamo_compiling():
        known = prepared.memo.get(act.shape)
        if (
            known is not None
            and act.dtype is prepared.dtype
            and act.is_cpu
            and type(act) is torch.Tensor
            and not act.requires_grad
        ):
            return known(act)
    _check_call(act, prepared, bias_N)
    rows = act.dim() == 2
    act_MK = act if rows else act.reshape(-1, prepared.k)
    if act_MK.shape[0] == 0:
        return act.new_empty(*act.shape[:-1], prepared.columns)
    if act_MK.stride(-1) != 1:
        act_MK = act_MK.contiguous()
    if type(act_MK) is torch.Tensor and not torch.compiler.is_compiling() and not _tracked(act_MK):
        out_MN = _module(prepared.impl).forward(
            act_MK, prepared, bias_N, batch_invariant=batch_invariant
        )
        return out_MN if rows else out_MN.reshape(*act.shape[:-1], prepared.columns)
    shape = [prepared.n, prepared.k, prepared.bits, prepared.group_size]
    flags = [prepared.symmetric, prepared.act_order, prepared.silu_mul]
    out_MN = torch.ops.ridgeline.w4a16(
        act_MK, list(prepared.tensors), bias_N, prepared.impl, shape, flags, batch_invariant
    )
    return out_MN.reshape(*act.shape[:-1], prepared.columns)


@torch.library.custom_op("ridgeline::w4a16", mutates_args=())
def _w4a16(
    act_MK: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias_N: torch.Tensor | None,
    impl: str,
    shape: Sequence[int],
    flags: Sequence[bool],
    batch_invariant: bool,
) -> torch.Tensor:
    """shape: n, k, bits, group_size; flags: symmetric, act_order, silu_mul (fields of Prepared)."""
    n, k, bits, group_size = shape
    symmetric, act_order, silu_mul = flags
    prepared = Prepared(
        impl=impl,
        n=n,
        k=k,
        bits=bits,
        group_size=group_size,
        dtype=act_MK.dtype,
        symmetric=symmetric,
        act_order=act_order,
        silu_mul=silu_mul,
        tensors=tuple(tensors),
    )
    return _module(impl).forward(act_MK, prepared, bias_N, batch_invariant=batch_invariant)


@_w4a16.register_fake
def _w4a16_fake(
    act_MK: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias_N: torch.Tensor | None,
    impl: str,
    shape: Sequence[int],
    flags: Sequence[bool],
    batch_invariant: bool,
) -> torch.Tensor:
    columns = shape[0] // 2 if flags[2] else shape[0]
    return act_MK.new_empty(act_MK.shape[0], columns)


def _no_backward(ctx: object, grad: torch.Tensor) -> None:
    raise unsupported(
        "w4a16",
        "act",
        "not require grad",
        "a backward pass",
        "run under torch.no_grad(), or train the unquantized model",
    )


_w4a16.register_autograd(_no_backward)


def _tracked(act_MK: torch.Tensor) -> bool:
    return act_MK.requires_grad and torch.is_grad_enabled()


@functools.cache
def _module(name: str) -> ModuleType:
    return load(next(impl for impl in impls("w4a16") if impl.name == name))


def _check_weight(weight: QuantizedWeight, dtype: torch.dtype, silu_mul: bool) -> None:
    if dtype not in _ACTIVATIONS:
        raise bad_type("w4a16", "dtype", "be bfloat16, float16 or float32", dtype, "cast the input")
    n, k = weight.shape_nk
    if silu_mul and n % 2:
        raise bad_value("w4a16", "weight", "have an even N with silu_mul", n, "fuse gate and up")
    groups = -(-k // weight.group_size)
    if weight.group_of_K is not None:
        # A row shard of an act-order layer holds few inputs and every group.
        groups = max(groups, weight.scale_NR.shape[1])
    for name, table in (("scale_NR", weight.scale_NR), ("zero_NR", weight.zero_NR)):
        if table is not None and tuple(table.shape) != (n, groups):
            raise bad_value(
                "w4a16", name, f"have shape {[n, groups]}", list(table.shape), "check group_size"
            )
    scale = weight.scale_NR.float()
    if not bool((torch.isfinite(scale) & (scale != 0)).all()):
        raise bad_value(
            "w4a16",
            "scale_NR",
            "be finite and not zero",
            "0, infinity or NaN",
            "the checkpoint is damaged or was quantized in a dtype too narrow",
        )


def _check_call(act: torch.Tensor, prepared: Prepared, bias_N: torch.Tensor | None) -> None:
    if act.dtype != prepared.dtype:
        raise bad_type(
            "w4a16",
            "act",
            f"be {prepared.dtype}, as the weight was prepared for",
            act.dtype,
            "cast it or prepare again",
        )
    if act.dim() < 1 or act.shape[-1] != prepared.k:
        raise bad_value(
            "w4a16", "act", f"end in K = {prepared.k}", list(act.shape), "check the layer's input"
        )
    device = prepared.tensors[0].device
    if act.device != device:
        raise bad_value(
            "w4a16", "act", f"be on {device}, as the weight", act.device, "move one of them"
        )
    if bias_N is None:
        return
    if tuple(bias_N.shape) != (prepared.n,):
        raise bad_value(
            "w4a16", "bias_N", f"have shape [{prepared.n}]", list(bias_N.shape), "one per output"
        )
    if bias_N.dtype != act.dtype or bias_N.device != act.device:
        raise bad_type(
            "w4a16",
            "bias_N",
            f"be {act.dtype} on {act.device}",
            f"{bias_N.dtype} on {bias_N.device}",
            "cast or move it",
        )
