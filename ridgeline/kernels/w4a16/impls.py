"""Implementations of W4A16 and what each refuses; importing this registers them.

One implementation is chosen at load (m = 1) and serves every batch, since the layout is its own; it
refuses only what it can never do.
"""

from __future__ import annotations

from ridgeline.core.arch import Arch
from ridgeline.core.registry import Impl, register
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
        summary="PyTorch's int4 matmul for few rows, a matmul on weights widened once above",
    )
)

# GPU implementations
