"""W4A16 in plain PyTorch: dequantize, multiply, add. The only reference.

    out[m, n] = sum_k act[m, k] * scale[n, g(k)] * (code[n, k] - zero[n, g(k)])  (+ bias[n])

`compute_dtype` is fp32 (the reference), fp64 (tests of exactness) or the activation's own (the
error baseline). Reads N K bytes of codes and writes the wide weight: nothing here is fast.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ridgeline.formats.base import QuantizedWeight
from ridgeline.kernels.w4a16.prepared import Prepared


def w4a16_ref(
    act_MK: torch.Tensor,
    weight: QuantizedWeight,
    bias_N: torch.Tensor | None = None,
    *,
    silu_mul: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """out_MN in the activation's dtype, computed in `compute_dtype` on the dequantized weight."""
    w_NK = weight.dequantize(act_MK.dtype).to(compute_dtype)
    return finish(act_MK.to(compute_dtype) @ w_NK.T, bias_N, silu_mul, act_MK.dtype)


def finish(
    acc_MN: torch.Tensor, bias_N: torch.Tensor | None, silu_mul: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Bias and silu(gate) * up in the accumulator's dtype, one rounding at the end."""
    if bias_N is not None:
        acc_MN = acc_MN + bias_N.to(acc_MN.dtype)
    if silu_mul:
        gate, up = acc_MN.chunk(2, dim=-1)
        acc_MN = F.silu(gate) * up
    return acc_MN.to(dtype).contiguous()


def prepare(
    weight: QuantizedWeight, dtype: torch.dtype, *, silu_mul: bool = False
) -> tuple[torch.Tensor, ...]:
    """The wide weight, rounded once to the activation's dtype."""
    return (weight.dequantize(dtype),)


def forward(
    act_MK: torch.Tensor,
    prepared: Prepared,
    bias_N: torch.Tensor | None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """The reference as an implementation; with batch_invariant a row at a time."""
    w_KN = prepared.tensors[0].float().T
    rows = act_MK.float().split(1) if batch_invariant else (act_MK.float(),)
    acc_MN = torch.cat([row @ w_KN for row in rows])
    return finish(acc_MN, bias_N, prepared.silu_mul, act_MK.dtype)
