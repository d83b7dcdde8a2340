"""Implementations of W4A16 and what each refuses; importing this registers them.

One implementation is chosen at load (m = 1) and serves every batch, since the layout is its own; it
refuses only what it can never do.
"""

from __future__ import annotations

from ridgeline.core.arch import Arch
from ridgeline.core.registry import Impl, register
from ridgeline.kernels.w4a16 import cute_cache
from ridgeline.kernels.w4a16.config import launch_for, launch_for_triton
from ridgeline.kernels.w4a16.problem import W4A16Problem

_PACKAGE = "ridgeline.kernels.w4a16"


def _accepts(problem: W4A16Problem, arch: Arch) -> str | None:
    return None


register(
    Impl(
        op="w4a16",
        name="ref",
        archs=("any",),
        dtypes=("bfloat16", "float16", "float32"),
        refuses=_accepts,
        priority=0,
        module=f"{_PACKAGE}.ref",
        fallback=True,
        summary="plain fp32 on the dequantized weight",
    )
)

register(
    Impl(
        op="w4a16",
        name="cpu",
        archs=("cpu",),
        dtypes=("bfloat16", "float16", "float32"),
        refuses=_accepts,
        priority=50,
        module=f"{_PACKAGE}.cpu",
        summary="a few rows as int4 where exact, else as FBGEMM bags; many on weights widened once",
    )
)

# GPU implementations


def _packable(problem: W4A16Problem, arch: Arch) -> str | None:
    if problem.bits != 4:
        return f"takes 4 bits, not {problem.bits}"
    if problem.group_size % 32 and problem.group_size != problem.k:
        return (
            f"takes groups of a multiple of 32 inputs or whole channels, not {problem.group_size}"
        )
    if problem.scale_dtype not in ("float16", "bfloat16", "float32"):
        return f"takes fp16, bf16 or fp32 scales, not {problem.scale_dtype}"
    return None


def _hopper(problem: W4A16Problem, arch: Arch) -> str | None:
    if problem.group_size not in (32, 64, 128, 256, problem.k):
        return f"takes groups of 32, 64, 128, 256 or whole channels, not {problem.group_size}"
    if not arch.pretended and not cute_cache.can_run():
        return "needs the package nvidia-cutlass-dsl, or a cache that ridgeline warmup filled"
    return _packable(problem, arch)


register(
    Impl(
        op="w4a16",
        name="cute_sm90",
        archs=("=sm90",),
        dtypes=("bfloat16", "float16"),
        refuses=_hopper,
        priority=100,
        module=f"{_PACKAGE}.cute_sm90",
        needs=("tvm_ffi",),
        config=launch_for,
        summary="Hopper: streamed packed words for few rows, WGMMA from registers for more",
    )
)

register(
    Impl(
        op="w4a16",
        name="triton",
        archs=("sm80",),
        dtypes=("bfloat16", "float16"),
        refuses=_packable,
        priority=60,
        module=f"{_PACKAGE}.triton",
        needs=("triton",),
        config=launch_for_triton,
        summary="portable GPU kernel on the same packed layout",
    )
)
