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
from ridgeline.kernels.logits import wide_logits
from ridgeline.parallel.collectives import Group, all_reduce

IGNORE = -100
"""Target of a token that has none."""

_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabPart:
    """Which rows of the head's weight are here, and who has the others."""

    group: Group
    start: int


def chunk_tokens(vocab_size: int, itemsize_bytes: int = 4) -> int:
    """Tokens whose fp32 logits fit 64 MiB, at least 16."""
    return max(16, _CHUNK_BYTES // (vocab_size * itemsize_bytes))


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
    IGNORE (-100) where a token has none. chunk: tokens at once (None: as many as fit 64 MiB).
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
    chunk = chunk_tokens(len(weight_VC)) if chunk is None else chunk
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
    size = chunk or chunk_tokens(len(weight_VC))
    found = []
    for x, targets in zip(x_PC.split(size), targets_P.split(size), strict=True):
        valid = targets != IGNORE
        losses = _chunk_losses(wide_logits(x, weight_VC), targets, valid, None).losses
        found.append(torch.where(valid, -losses, 0.0))
    return torch.cat(found)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Losses of some tokens and what d logits is made of."""

    losses: torch.Tensor
    logsumexp: torch.Tensor
    """[n, 1]."""
    column: torch.Tensor
    """[n, 1], the target's column of these logits (0 where it is not here)."""
    here: torch.Tensor
    """[n], whether the target's logit is among these."""


def _chunk_losses(
    logits: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor, part: VocabPart | None
) -> _Chunk:
    if part is None:
        column = torch.where(valid, targets, 0)[:, None]
        logsumexp = torch.logsumexp(logits, dim=1, keepdim=True)
        losses = (logsumexp - logits.gather(1, column)).squeeze(1)
        return _Chunk(losses, logsumexp, column, valid)
    local = targets - part.start
    here = valid & (local >= 0) & (local < logits.shape[1])
    column = torch.where(here, local, 0)[:, None]
    largest = all_reduce(logits.amax(dim=1), part.group, "max")
    total = (logits - largest[:, None]).exp_().sum(dim=1)
    target_logit = torch.where(here, logits.gather(1, column).squeeze(1), 0.0)
    total, target_logit = all_reduce(torch.stack((total, target_logit)), part.group)
    logsumexp = largest + total.log()
    return _Chunk(logsumexp - target_logit, logsumexp[:, None], column, here)


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
            found = _chunk_losses(logits, targets, valid, part)
            loss += torch.where(valid, found.losses, 0.0).sum()
            if grad_x is None and grad_weight is None:
                continue
            grad = logits.sub_(found.logsumexp).exp_()
            grad.scatter_add_(1, found.column, -found.here[:, None].to(wide))
            grad = grad.mul_(valid[:, None]).to(x.dtype)
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
