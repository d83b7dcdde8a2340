"""The gradient's norm over all meshes and stages, and clipping by it.

    norm^2 = all-reduce over the world of  sum over parameters here of |g_local|^2 / copies

copies: how many ranks hold the same elements (replicas, tensor ranks of a whole parameter, the two
stages of a tied table). One all-reduce of one number serves every layout, so there is nothing to be
grouped by mesh and nothing to be forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


@torch.no_grad()
def global_norm(gradients: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """2-norm of the whole gradient, an fp32 scalar, the same on every rank.

    gradients: this rank's parts; weights: fp32, 1 / (ranks that hold each part), on the device:
    made once, since a copy from the host would wait for all that is queued. A collective.
    """
    total = torch.zeros((), device=weights.device, dtype=torch.float32)
    if gradients:
        norms = torch._foreach_norm(list(gradients), 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
        total = (torch.stack(list(norms)).square() * weights).sum()
    dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def scale_to(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place such that a norm above `max_norm` becomes it."""
    if gradients:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(gradients), factor)  # pyright: ignore[reportPrivateImportUsage]
