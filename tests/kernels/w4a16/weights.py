"""Quantized weights of every kind for the tests of this folder."""

from __future__ import annotations

import torch

from ridgeline.formats.base import QuantizedWeight


def make_weight(
    n: int,
    k: int,
    group: int,
    *,
    bits: int = 4,
    symmetric: bool = True,
    act_order: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    coarse: bool = False,
) -> QuantizedWeight:
    """Random codes, scales of both signs (coarse: exact in bf16), zero points, shuffled groups."""
    R = -(-k // group)
    scale = 0.05 * torch.randn(n, R)
    scale = torch.where(scale.abs() < 1e-3, 1e-3, scale)
    if coarse:
        scale = scale.to(torch.bfloat16)
    table = None
    if act_order and R > 1:
        table = (torch.arange(k, dtype=torch.int32) // group)[torch.randperm(k)]
    return QuantizedWeight(
        code_NK=torch.randint(0, 2**bits, (n, k), dtype=torch.uint8),
        scale_NR=scale.to(scale_dtype),
        zero_NR=None if symmetric else torch.randint(0, 2**bits, (n, R), dtype=torch.uint8),
        bits=bits,
        group_size=group,
        group_of_K=table,
    )
