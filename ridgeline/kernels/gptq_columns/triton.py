"""A block of GPTQ's columns in Triton: one program takes BLOCK_N outputs through all steps.

The strip's weights [BLOCK_B, BLOCK_N] stay in registers: a step picks its row with a masked sum,
rounds it, and takes the rank-1 update of the rows after it. No step waits for another program.
Bytes a program: the strip in, codes and errors out, each once; the block of V (64 KiB) from L2.
4 BLOCK_B^2 FLOPs an output, bound by them: Llama-3-8B's 7.5 G weights take 4 TFLOP in all.

Legend: B steps of the block, N outputs, R groups; i step, n output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.kernels.gptq_columns.op import MAX_STEPS, Columns

BLOCK_N = 32


@triton.jit
def _columns_kernel(
    work_ptr, unit_ptr, scale_ptr, zero_ptr, group_ptr, signed_ptr, error_ptr, B, N,
    stride_wb, stride_ub, stride_gr, stride_sb, stride_eb, max_code,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_B)
    inside = n < N
    w_BN = tl.load(
        work_ptr + i[:, None] * stride_wb + n[None, :],
        mask=(i < B)[:, None] & inside[None, :],
        other=0.0,
    )
    for step in range(B):
        w = tl.sum(tl.where((i == step)[:, None], w_BN, 0.0), axis=0)
        group = tl.load(group_ptr + step).to(tl.int64)
        scale = tl.load(scale_ptr + group * stride_gr + n, mask=inside, other=1.0)
        zero = tl.load(zero_ptr + group * stride_gr + n, mask=inside, other=0.0)
        # Adding 1.5 * 2^23 rounds to a whole number, ties to even; codes are far below 2^20.
        ratio = tl.minimum(tl.maximum(tl.math.div_rn(w, scale), -1048576.0), 1048576.0)
        whole = (ratio + 12582912.0) - 12582912.0
        signed = tl.minimum(tl.maximum(whole + zero, 0.0), max_code) - zero
        error = w - signed * scale
        tl.store(signed_ptr + step * stride_sb + n, signed, mask=inside)
        tl.store(error_ptr + step * stride_eb + n, error, mask=inside)
        later = (i > step) & (i < B)
        unit = tl.load(unit_ptr + step * stride_ub + i, mask=later, other=0.0)
        w_BN -= unit[:, None] * error[None, :]


def launch(columns: Columns, signed_BN: torch.Tensor, error_BN: torch.Tensor) -> None:
    """Fill signed_BN and error_BN; work_BN is only read."""
    work_BN, scale_RN = columns.work_BN, columns.scale_RN
    B, N = work_BN.shape
    assert B <= MAX_STEPS and scale_RN.stride() == columns.zero_RN.stride()
    assert all(t.stride(-1) == 1 for t in (work_BN, columns.unit_BB, scale_RN, signed_BN))
    _columns_kernel[(triton.cdiv(N, BLOCK_N),)](
        work_BN, columns.unit_BB, scale_RN, columns.zero_RN, columns.group_B, signed_BN, error_BN,
        B, N, work_BN.stride(0), columns.unit_BB.stride(0), scale_RN.stride(0),
        signed_BN.stride(0), error_BN.stride(0), float(columns.max_code),
        BLOCK_B=max(16, triton.next_power_of_2(B)), BLOCK_N=BLOCK_N, num_warps=4,
    )  # fmt: skip
