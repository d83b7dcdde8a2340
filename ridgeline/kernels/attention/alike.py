"""Whether tensors are like others, by one call into PyTorch's C++."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._dynamo import guards


def like(*tensors: torch.Tensor) -> Callable[..., bool]:
    """A check of as many tensors: the same types, dtypes, devices, shapes, strides and
    requires_grad, and the same listeners (modes, transforms, tracing, autocast) as now. Whether
    gradients are enabled it does not see.

    It is what a compiled function's guards do for its inputs, in a fifth of the time that a key of
    the same takes to make and look up (0.6 and 3.3 us here, CPU, 2026-11-30). It keeps no tensor
    alive. Where this PyTorch has none, the check never holds.
    """
    made = getattr(guards, "TensorGuards", None)
    if made is None:
        return _never
    shapes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    return made(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check


def _never(*tensors: torch.Tensor) -> bool:
    return False
