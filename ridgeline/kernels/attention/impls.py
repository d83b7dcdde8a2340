"""The attention implementations, one registration each: name, where it runs, what it refuses.

Priorities: cute_sm90 400 > triton 300 > cpu 200 > ref 100 > tiled 0 (documentation, asked for by
name). A module is imported only when its implementation is chosen, but cute_sm90's: TVM-FFI takes
longer to import than a first call may add. It imports neither the DSL nor asks for a device.
"""

from __future__ import annotations

from typing import Any

from ridgeline.core import env
from ridgeline.core.arch import Arch
from ridgeline.core.registry import Impl, register
from ridgeline.kernels.attention import cute_sm90_backward_config, cute_sm90_cached_config
from ridgeline.kernels.attention.config import attention_config, config_source
from ridgeline.kernels.attention.cute import cache as cute_cache
from ridgeline.kernels.attention.cute_sm90_choice import forward_kernel
from ridgeline.kernels.attention.problem import AttentionProblem

_MODULE = "ridgeline.kernels.attention"
_LARGEST_GRID = 65535
"""Blocks of a CUDA grid in y and z."""
_WIDE = ("bfloat16", "float16", "float32", "float64")


def _ref_refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    return None


def _cpu_refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    if problem.page_size is not None and problem.direction == "bwd":
        return "no backward through a paged cache"
    return None


def _triton_refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    if problem.batch > _LARGEST_GRID or problem.heads > _LARGEST_GRID:
        return f"batch and heads up to {_LARGEST_GRID}"
    for name in ("head_dim", "head_dim_v"):
        dim = getattr(problem, name)
        if not 16 <= dim <= 256 or dim % 8:
            return f"{name} from 16 to 256 in steps of 8, not {dim}"
    if problem.page_size is not None:
        if problem.direction == "bwd":
            return "no backward through a paged cache"
        if problem.page_size < 16 or problem.page_size & (problem.page_size - 1):
            return f"page sizes that are powers of two from 16, not {problem.page_size}"
    return None


def _cute_sm90_refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    if problem.direction == "bwd":
        why = cute_sm90_backward_config.refuses(problem, arch)
    else:
        why = cute_sm90_cached_config.forward_refuses(problem, arch)
    if why is not None or arch.pretended:
        return why
    return cute_cache.why_missing(
        _cute_sm90_traits(problem, arch), _cute_sm90_config(problem, arch)
    )


def _cute_sm90_traits(problem: AttentionProblem, arch: Arch) -> Any:
    if problem.direction == "bwd":
        return cute_sm90_backward_config.backward_traits(problem)
    return forward_kernel(problem, arch)[0]


def _cute_sm90_config(problem: AttentionProblem, arch: Arch) -> Any:
    if problem.direction == "bwd":
        return cute_sm90_backward_config.backward_config(problem, arch)
    return forward_kernel(problem, arch)[1]


def _tiled_refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    taken = ("causal",)
    for option in ("window_left", "window_right", "page_size"):
        if getattr(problem, option) is not None:
            return f"takes only {', '.join(taken)}, not {option}"
    for option in (
        "softcap dropout alibi sinks bias varlen seqused kv_cache leftpad kv_batch_idx mods"
    ).split():
        if getattr(problem, option):
            return f"takes only {', '.join(taken)}, not {option}"
    return None


register(
    Impl(
        op="attention",
        name="ref",
        archs=("any",),
        dtypes=_WIDE,
        refuses=_ref_refuses,
        priority=100,
        module=f"{_MODULE}.ref",
        fallback=True,
        summary="plain PyTorch, every option; the reference",
    )
)

register(
    Impl(
        op="attention",
        name="cpu",
        archs=("cpu",),
        dtypes=_WIDE,
        refuses=_cpu_refuses,
        priority=200,
        module=f"{_MODULE}.cpu",
        summary="PyTorch's fused CPU kernel, blocks of rows for the rest; memory linear in length",
    )
)

register(
    Impl(
        op="attention",
        name="tiled",
        archs=("any",),
        dtypes=_WIDE,
        refuses=_tiled_refuses,
        priority=0,
        module=f"{_MODULE}.tiled",
        fallback=True,
        summary="FlashAttention-2 written plainly, counting bytes moved; on request",
    )
)

register(
    Impl(
        op="attention",
        name="triton",
        archs=("sm80", "cpu") if env.triton_interpreted() else ("sm80",),
        dtypes=("bfloat16", "float16", "float32"),
        refuses=_triton_refuses,
        priority=300,
        module=f"{_MODULE}.triton",
        needs=("triton",),
        config=attention_config,
        config_source=config_source,
        summary="FlashAttention-2 in Triton, Ampere and later",
    )
)

register(
    Impl(
        op="attention",
        name="cute_sm90",
        archs=("=sm90",),
        dtypes=("bfloat16", "float16"),
        refuses=_cute_sm90_refuses,
        priority=400,
        module=f"{_MODULE}.cute_sm90",
        needs=("tvm_ffi",),
        early=True,
        extra="hopper",
        config=_cute_sm90_config,
        summary="FlashAttention-3 in the CuTe DSL, Hopper",
    )
)
