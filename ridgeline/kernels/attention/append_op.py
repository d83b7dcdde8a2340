"""The append operator ridgeline::kv_append_; it mutates the cache, so compiled code keeps order."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ridgeline.core import registry
from ridgeline.kernels.attention import kvcache
from ridgeline.kernels.attention.dispatch import arch_of
from ridgeline.kernels.attention.kvcache import Where

_lib = torch.library.Library("ridgeline", "FRAGMENT")
_lib.define(
    "kv_append_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, "
    "Tensor? kv_batch_idx, Tensor? block_table, Tensor? rotary_cos, Tensor? rotary_sin, "
    "bool rotary_interleaved) -> ()"
)
append_op = torch.ops.ridgeline.kv_append_.default


@lru_cache(maxsize=64)
def _fused(name: str, device: torch.device) -> Callable[..., Any] | None:
    """A function of the best implementation on a GPU that has it."""
    arch = arch_of(device)
    for impl in registry.impls("attention") if arch.is_gpu else ():
        installed = all(importlib.util.find_spec(package) for package in impl.needs)
        if registry.runs_on(impl, arch) and installed:
            found = getattr(registry.load(impl), name, None)
            if found is not None:
                return found
    return None


@torch.library.impl("ridgeline::kv_append_", ("cpu", "cuda"), lib=_lib)
def _kv_append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *where: torch.Tensor | bool | None,
) -> None:
    target = Where(*where)  # type: ignore[arg-type]
    kvcache.check_append(k_cache, v_cache, k, v, target)
    append_checked(k_cache, v_cache, k, v, target)


def append_checked(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: Where
) -> None:
    """The append of a checked call, past the dispatcher: one launch, or plain PyTorch."""
    append = _fused("append_kv", k_cache.device) or kvcache.append
    append(k_cache, v_cache, k, v, where)


def rotate_checked(q_BSHD: torch.Tensor, where: Where, advance: bool) -> torch.Tensor:
    """The queries of a checked call, rotated: one launch, or plain PyTorch."""
    rotate = _fused("rotate_queries", q_BSHD.device) or kvcache.rotate_queries
    return rotate(q_BSHD, where, advance)


@torch.library.register_fake("ridgeline::kv_append_", lib=_lib)
def _kv_append_fake(*values: object) -> None:
    return None
