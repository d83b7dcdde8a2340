"""The two passes over logits in plain PyTorch: their meaning, and what a CPU runs."""

from __future__ import annotations

import torch


def statistics(
    logits_NV: torch.Tensor, columns_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As op.statistics."""
    wide = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    largest = wide.amax(dim=1)
    total = (wide - largest[:, None]).exp_().sum(dim=1)
    here = wide.gather(1, columns_N.clamp(min=0)[:, None]).squeeze(1)
    return largest, total, torch.where(columns_N >= 0, here, 0.0)


def to_gradient(
    logits_NV: torch.Tensor,
    logsumexp_N: torch.Tensor,
    columns_N: torch.Tensor,
    valid_N: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As op.to_gradient."""
    wide = logits_NV.to(logsumexp_N.dtype)
    grad = wide.sub_(logsumexp_N[:, None]).exp_()
    one = (columns_N >= 0).to(grad.dtype)[:, None]
    grad.scatter_add_(1, columns_N.clamp(min=0)[:, None], -one)
    return grad.mul_(valid_N[:, None]).to(dtype)
