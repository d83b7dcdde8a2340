"""One block of GPTQ's columns at once: a fused kernel on a GPU, a loop over rows on a CPU.

    for each step k of the block:  q_k = round to the grid of k's group;  e_k = w_k - q_k;
                                   w_j -= V_kj e_k  for the later steps j of the block

V is the upper factor with every row divided by its diagonal entry.
Five launches a column otherwise. Rows (outputs) are independent, so a program takes a strip of them
through the whole block.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ridgeline.core import env

MAX_STEPS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """One block; tensors are views, rows are steps in processing order."""

    work_BN: torch.Tensor
    """fp32 (fp64 on a CPU), as all others: weights of the block's steps, earlier blocks' errors
    taken. May be overwritten."""
    unit_BB: torch.Tensor
    """The block of V; rows may be strided."""
    scale_RN: torch.Tensor
    zero_RN: torch.Tensor
    """Whole numbers."""
    group_B: torch.Tensor
    """int32, group of each step."""
    max_code: int


Solve = Callable[[Columns, torch.Tensor, torch.Tensor], None]
"""solve(columns, signed_BN, error_BN): fills codes minus zero, and errors."""


def fused(device: torch.device, dtype: torch.dtype) -> Solve | None:
    """The loop for a device, or None where columns go one by one (a GPU without Triton, fp64
    there)."""
    interpreted = env.triton_interpreted() and dtype == torch.float32
    if device.type == "cpu" and not interpreted:
        return importlib.import_module("ridgeline.kernels.gptq_columns.cpu").launch
    if dtype != torch.float32 or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("ridgeline.kernels.gptq_columns.triton").launch
