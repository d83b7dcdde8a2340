"""The two passes over logits in Triton, Ampere and later.

    _statistics   m = max l ; s = sum exp(l - m), both in one pass that corrects s when m grows
    _gradient     g = (exp(l - logsumexp) - [column]) valid

Each logit is read twice and its gradient written once: 10 bytes for fp32 logits and a bf16
gradient, against about 60 of the passes that plain PyTorch makes. Memory-bound, arithmetic in fp32.
Source of correcting the sum on the way: Milakov and Gimelshein 2018 (arXiv 1805.02867).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _statistics(
    logits_ptr,
    columns_ptr,
    largest_ptr,
    total_ptr,
    target_ptr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + n * V
    largest = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        logit = tl.load(row_ptr + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(logit, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(logit - larger), 0)
        largest = larger
    column = tl.load(columns_ptr + n)
    target = tl.load(row_ptr + tl.maximum(column, 0)).to(tl.float32)
    tl.store(largest_ptr + n, largest)
    tl.store(total_ptr + n, total)
    tl.store(target_ptr + n, tl.where(column >= 0, target, 0.0))


@triton.jit
def _gradient(logits_ptr, grad_ptr, logsumexp_ptr, columns_ptr, valid_ptr, V, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < V
    place = n * V + cols
    logit = tl.load(logits_ptr + place, mask=mask, other=0.0).to(tl.float32)
    grad = tl.exp(logit - tl.load(logsumexp_ptr + n))
    grad = tl.where(cols == tl.load(columns_ptr + n), grad - 1.0, grad)
    grad = tl.where(tl.load(valid_ptr + n) != 0, grad, 0.0)
    tl.store(grad_ptr + place, grad.to(grad_ptr.dtype.element_ty), mask=mask)


def statistics(
    logits_NV: torch.Tensor, columns_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As op.statistics, for logits of up to 32 bits."""
    N, V = logits_NV.shape
    found = torch.empty(3, N, dtype=torch.float32, device=logits_NV.device)
    if N:
        _statistics[(N,)](logits_NV, columns_N, *found.unbind(), V=V, BLOCK=_BLOCK, num_warps=8)
    return found[0], found[1], found[2]


def to_gradient(
    logits_NV: torch.Tensor,
    logsumexp_N: torch.Tensor,
    columns_N: torch.Tensor,
    valid_N: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As op.to_gradient, for logits of up to 32 bits."""
    N, V = logits_NV.shape
    same = dtype == logits_NV.dtype
    grad_NV = logits_NV if same else torch.empty_like(logits_NV, dtype=dtype)
    if N:
        _gradient[(N, triton.cdiv(V, _BLOCK))](
            logits_NV, grad_NV, logsumexp_N, columns_N, valid_N.view(torch.uint8), V, BLOCK=_BLOCK
        )
    return grad_NV
