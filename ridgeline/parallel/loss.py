"""Cross-entropy of a vocabulary projection in chunks of tokens: all logits never exist at once.

    loss = sum over valid tokens of  logsumexp(W x) - (W x)[target]

For each chunk of n tokens the logits [n, V] are made, their loss is added up, and where gradients
are wanted, d logits = softmax - onehot is turned at once into its share of dx and dW; the backward
pass only scales them. Memory: two fp32 arrays of n V and dW in fp32, instead of P V; nothing is
computed twice. Bound by the matmuls (6 P C V FLOPs). Source of the idea of making the gradient in
the forward pass: Hsu et al., "Liger Kernel" (arXiv 2410.10989), section 3.2.

With the vocabulary split over ranks each has the logits of its rows of W. A chunk then costs two
all-reduces of n and 2 n numbers (largest logit; sum of exponentials and the target's logit), and
the share of dx that a rank makes is summed by whatever handed x to the ranks.
Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ridgeline.core.errors import bad_value
from ridgeline.kernels.cross_entropy.op import statistics, to_gradient
from ridgeline.kernels.logits import wide_logits
from ridgeline.parallel.collectives import Group, all_reduce

IGNORE = -100
"""Target of a token that has none."""

_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""fp32 logits at once. Each chunk reads the head's weight and adds to its fp32 gradient, about 12
bytes an element: on a GPU that takes 2,000 tokens or so to hide behind the chunk's products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabPart:
    """Which rows of the head's weight are here, and who has the others."""

    group: Group
    start: int


def chunk_tokens(vocab_size: int, device_type: str = "cpu") -> int:
    """Tokens whose fp32 logits fit 64 MiB (on a GPU 1 GiB), at least 16."""
    return max(16, _CHUNK_BYTES.get(device_type, _CHUNK_BYTES["cpu"]) // (vocab_size * 4))


def linear_cross_entropy(
    x_PC: torch.Tensor,
    weight_VC: torch.Tensor,
    targets_P: torch.Tensor,
    *,
    chunk: int | None = None,
    part: VocabPart | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy of `x @ weight.T` against targets, and how many targets count.

    Shapes: x_PC [tokens, width], weight_VC [vocabulary, width] of the same dtype; targets_P int64,
    IGNORE (-100) where a token has none. chunk: tokens at once (None: as chunk_tokens says).
    part: weight_VC is this rank's rows; every rank of the group gives the same x and targets and
    gets the same sum, and the gradient of x is this rank's share.
    Returns (sum, count): a scalar in fp32 (fp64 for fp64 inputs) and an int64 scalar, both on the
    device; divide by the count of the whole global batch.
    Numerics: operands in the inputs' dtype; logits, softmax and sums in fp32 or fp64, dW summed in
    the same.
    Raises: ValueError where shapes do not fit or chunk is below 1.
    """
    if x_PC.dim() != 2 or weight_VC.dim() != 2 or x_PC.shape[1] != weight_VC.shape[1]:
        raise bad_value(
            "loss",
            "x and weight",
            "be [tokens, width] and [vocabulary, width]",
            (tuple(x_PC.shape), tuple(weight_VC.shape)),
            "flatten the batch",
        )
    if targets_P.shape != x_PC.shape[:1]:
        raise bad_value(
            "loss", "targets", f"have {len(x_PC)} entries", tuple(targets_P.shape), "flatten them"
        )
    if chunk is None:
        chunk = chunk_tokens(len(weight_VC), x_PC.device.type)
    if chunk < 1:
        raise bad_value("loss", "chunk", "be at least 1", chunk, "leave it out")
    loss = _LinearCrossEntropy.apply(
        x_PC, weight_VC, targets_P, chunk, part, torch.is_grad_enabled()
    )
    return loss, (targets_P != IGNORE).sum()


@torch.no_grad()
def token_logprobs(
    x_PC: torch.Tensor,
    weight_VC: torch.Tensor,
    targets_P: torch.Tensor,
    *,
    chunk: int | None = None,
) -> torch.Tensor:
    """Log-probability of each target under the vocabulary projection of x: what the loss sums.

    Shapes and numerics: linear_cross_entropy. Returns fp32 (fp64) [P], 0 where a token has none.
    """
    size = chunk or chunk_tokens(len(weight_VC), x_PC.device.type)
    found = []
    for x, targets in zip(x_PC.split(size), targets_P.split(size), strict=True):
        valid = targets != IGNORE
        columns = _columns(targets, valid, len(weight_VC), None)
        logsumexp, target = _reduced(statistics(wide_logits(x, weight_VC), columns), None)
        found.append(torch.where(valid, target - logsumexp, 0.0))
    return torch.cat(found)


def _columns(
    targets: torch.Tensor, valid: torch.Tensor, num_columns: int, part: VocabPart | None
) -> torch.Tensor:
    """Each target's column of the logits here, -1 where it has none or it is another rank's."""
    columns = targets if part is None else targets - part.start
    return torch.where(valid & (columns >= 0) & (columns < num_columns), columns, -1)


def _reduced(
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor], part: VocabPart | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logsumexp, the target's logit) of each token over the whole vocabulary."""
    largest, total, target = found
    if part is not None:
        here, largest = largest, all_reduce(largest, part.group, "max")
        total = total * (here - largest).exp()
        total, target = all_reduce(torch.stack((total, target)), part.group)
    return largest + total.log(), target


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_PC: torch.Tensor,
        weight_VC: torch.Tensor,
        targets_P: torch.Tensor,
        chunk: int,
        part: VocabPart | None,
        grad_enabled: bool,
    ) -> torch.Tensor:
        wide = torch.promote_types(x_PC.dtype, torch.float32)
        want_x = grad_enabled and ctx.needs_input_grad[0]
        want_weight = grad_enabled and ctx.needs_input_grad[1]
        loss = torch.zeros((), dtype=wide, device=x_PC.device)
        grad_x = torch.empty_like(x_PC) if want_x else None
        grad_weight = torch.zeros_like(weight_VC, dtype=wide) if want_weight else None
        for start in range(0, len(x_PC), chunk):
            rows = slice(start, start + chunk)
            x, targets = x_PC[rows], targets_P[rows]
            valid = targets != IGNORE
            logits = wide_logits(x, weight_VC)
            columns = _columns(targets, valid, len(weight_VC), part)
            logsumexp, target = _reduced(statistics(logits, columns), part)
            loss += torch.where(valid, logsumexp - target, 0.0).sum()
            if grad_x is None and grad_weight is None:
                continue
            grad = to_gradient(logits, logsumexp, columns, valid, x.dtype)
            if grad_x is not None:
                torch.mm(grad, weight_VC, out=grad_x[rows])
            if grad_weight is not None and x.dtype == wide:
                grad_weight.addmm_(grad.T, x)
            elif grad_weight is not None:
                grad_weight += grad.T @ x
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight_VC.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad_loss = grad_outputs[0]
        grad_x, grad_weight = ctx.saved_tensors
        if grad_x is not None:
            grad_x = (grad_x * grad_loss).to(grad_x.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None
