"""Logits that are not rounded to 16 bits: y = x W^T with fp32 sums kept as fp32.

Logits of a language model reach 10 to 30, where neighbouring bf16 numbers are 1/16 to 1/8 apart: to
round them costs more than all other roundings of a forward pass together (docs/log/engine.md has
numbers). On a GPU the matmul keeps its sums for free. PyTorch's CPU matmul of 16-bit operands
cannot, so there the weight is widened, a slice at a time. Bound by the bytes of W.
"""

from __future__ import annotations

import torch

_SLICE_ROWS = 4096


def wide_logits(x_PC: torch.Tensor, weight_VC: torch.Tensor) -> torch.Tensor:
    """Logits [P, V] in fp32 (fp64 for fp64 operands); no gradient flows through.

    Shapes: x [P, C] and weight [V, C] of one floating dtype.
    Numerics: products and sums in fp32 or fp64, never rounded to the operands' dtype.
    """
    if x_PC.dtype.itemsize >= 4:
        return x_PC @ weight_VC.T
    if x_PC.is_cuda:
        return torch.mm(x_PC, weight_VC.T, out_dtype=torch.float32)
    x = x_PC.float()
    return torch.cat([x @ rows.float().T for rows in weight_VC.split(_SLICE_ROWS)], dim=-1)
