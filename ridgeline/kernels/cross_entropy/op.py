"""Which form of the two passes over logits a device runs: Triton's on a GPU, else PyTorch's."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from types import ModuleType

import torch


@lru_cache(maxsize=8)
def _module_for(device_type: str) -> ModuleType:
    fused = device_type == "cuda" and importlib.util.find_spec("triton") is not None
    return importlib.import_module(
        f"ridgeline.kernels.cross_entropy.{'triton' if fused else 'ref'}"
    )


def statistics(
    logits_NV: torch.Tensor, columns_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Largest logit of each row, sum of exp(logit - largest), and the logit in a column.

    Shapes: logits [N, V], contiguous; columns int64 [N], -1: none, which gives 0. Returns three [N]
    in fp32 (fp64 for fp64 logits).
    """
    return _module_for(logits_NV.device.type).statistics(logits_NV, columns_N)


def to_gradient(
    logits_NV: torch.Tensor,
    logsumexp_N: torch.Tensor,
    columns_N: torch.Tensor,
    valid_N: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(exp(logits - logsumexp) - one at the column) where valid, else 0, in a dtype; where that is
    the logits' own their memory is used for it.

    Shapes: logits [N, V], contiguous; logsumexp fp32 [N] (fp64 for fp64 logits); columns int64 [N],
    -1: none; valid bool [N].
    """
    module = _module_for(logits_NV.device.type)
    return module.to_gradient(logits_NV, logsumexp_N, columns_N, valid_N, dtype)
