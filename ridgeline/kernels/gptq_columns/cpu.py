"""A block of GPTQ's columns on a CPU, step by step over rows of memory.

A step is nine passes over one row [N]: too short to be split over cores, so that what a call costs
is half of the time. NumPy's calls cost a third of PyTorch's, which is why it stands here. Inside a
part of 16 steps each error is taken from the part's later steps at once (a rank-1 update that stays
in the L2 cache); the steps after the part take the part's errors as one matrix product.
4 B FLOPs an element of the block, bound by the passes and by calls.
"""

from __future__ import annotations

import numpy as np
import torch

from ridgeline.kernels.gptq_columns.op import Columns

_PART = 16
"""Steps whose errors reach the rest of the block together."""


def launch(columns: Columns, signed_BN: torch.Tensor, error_BN: torch.Tensor) -> None:
    """Fill signed_BN and error_BN; work_BN is left with the errors taken from it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a product of 16 steps is not worth waking another core
    try:
        _steps(columns, signed_BN, error_BN)
    finally:
        torch.set_num_threads(threads)


def _steps(columns: Columns, signed_BN: torch.Tensor, error_BN: torch.Tensor) -> None:
    work_BN, unit_BB = columns.work_BN, columns.unit_BB
    work, unit, error = work_BN.numpy(), unit_BB.numpy(), error_BN.numpy()
    scale, low = columns.scale_RN.numpy(), -columns.zero_RN.numpy()
    grids = list(zip(scale, low, low + work.dtype.type(columns.max_code), strict=True))
    signed, groups = signed_BN.numpy(), columns.group_B.tolist()
    B, N = work.shape
    product_N, product_PN = np.empty(N, work.dtype), np.empty((_PART, N), work.dtype)
    for first in range(0, B, _PART):
        end = min(first + _PART, B)
        for step in range(first, end):
            scale_N, low_N, high_N = grids[groups[step]]
            w_N, signed_N, error_N = work[step], signed[step], error[step]
            np.divide(w_N, scale_N, out=signed_N)
            np.rint(signed_N, out=signed_N)
            np.maximum(signed_N, low_N, out=signed_N)
            np.minimum(signed_N, high_N, out=signed_N)
            np.multiply(signed_N, scale_N, out=product_N)
            np.subtract(w_N, product_N, out=error_N)
            if step + 1 < end:
                later, taken = work[step + 1 : end], product_PN[: end - step - 1]
                np.multiply(unit[step, step + 1 : end, None], error_N, out=taken)
                np.subtract(later, taken, out=later)
        if end < B:
            part = slice(first, end)
            work_BN[end:].addmm_(unit_BB[part, end:].T, error_BN[part], alpha=-1)
