"""A matmul of one row in Triton, Ampere and later: a stream of the weights, with the norm before it
and the gate after it in the same kernel.

    x' = x + delta ; n = x' w / sqrt(mean(x'^2) + eps) ; y = n W^T (+ b)      norm_linear
    y = silu(n G^T) * (n U^T), W = [G; U]                                     norm_linear, gated
    y = x W^T (+ b)                                                           row_linear

A program has BLOCK_N rows of W and goes along K; x (a few KiB) and the norm are computed again by
every program, from the L2 cache. W's bytes are read once and bound it. Products and sums in fp32,
each output in one fixed order; rounded where the separate operations round. x' goes to memory of
its own, as other programs still read x.

A program asks for its first tile of W before it reads x; overlapped (Hopper), also before the
previous kernel of the stream has ended, which W does not depend on.
Source: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsConfig:
    """How a program goes over its rows of W."""

    block_n: int = 8
    block_k: int = 512
    num_warps: int = 4
    num_stages: int = 3
    overlap: bool = False
    """Start before the previous kernel of the stream has ended (Hopper and later)."""


DEFAULT = RowsConfig()
CANDIDATES = (
    DEFAULT,
    RowsConfig(block_n=4, block_k=4096, num_warps=8, num_stages=1),
    RowsConfig(block_n=8, block_k=1024, num_warps=8, num_stages=3),
)
"""What an engine tries on its own weights when it records a step (engine/graphs.py)."""


@triton.jit
def _read_row(x_ptr, delta_ptr, cols, mask, HAS_DELTA: tl.constexpr):
    x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last")
    if HAS_DELTA:
        delta = tl.load(delta_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last")
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x_ptr.dtype.element_ty)
    return x


@triton.jit
def _read_tile(w_ptr, rows, cols, row_mask, K: tl.constexpr):
    mask = row_mask[:, None] & (cols < K)[None, :]
    where = rows.to(tl.int64)[:, None] * K + cols[None, :]
    return tl.load(w_ptr + where, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _read_normed(
    x_ptr,
    delta_ptr,
    norm_ptr,
    scale,
    cols,
    K: tl.constexpr,
    NORM: tl.constexpr,
    DELTA: tl.constexpr,
):
    """A piece of the row that meets W, fp32."""
    x = _read_row(x_ptr, delta_ptr, cols, cols < K, DELTA).to(tl.float32)
    if NORM:
        norm = tl.load(norm_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
        x = (x * scale * norm).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _rows(
    x_ptr,
    delta_ptr,
    norm_ptr,
    w_ptr,
    bias_ptr,
    kept_ptr,
    y_ptr,
    N,
    eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """N: outputs; gated: rows n and N + n of W make output n."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < N
    piece = tl.arange(0, BLOCK_K)
    if OVERLAP:
        gdc_launch_dependents()
    w = _read_tile(w_ptr, rows, piece, row_mask, K)
    if GATED:
        w_up = _read_tile(w_ptr, rows + N, piece, row_mask, K)
    if OVERLAP:
        gdc_wait()
    scale = 1.0
    if NORM:
        squares = tl.zeros([BLOCK_K], dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            cols = start + piece
            x = _read_row(x_ptr, delta_ptr, cols, cols < K, HAS_DELTA)
            if HAS_DELTA:
                tl.store(kept_ptr + cols, x, mask=(cols < K) & (tl.program_id(0) == 0))
            wide = x.to(tl.float32)
            squares += wide * wide
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
    x = _read_normed(x_ptr, delta_ptr, norm_ptr, scale, piece, K, NORM, HAS_DELTA)
    total = w.to(tl.float32) * x[None, :]
    total_up = total
    if GATED:
        total_up = w_up.to(tl.float32) * x[None, :]
    for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        cols = start + piece
        x = _read_normed(x_ptr, delta_ptr, norm_ptr, scale, cols, K, NORM, HAS_DELTA)
        total += _read_tile(w_ptr, rows, cols, row_mask, K).to(tl.float32) * x[None, :]
        if GATED:
            total_up += _read_tile(w_ptr, rows + N, cols, row_mask, K).to(tl.float32) * x[None, :]
    y = tl.sum(total, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(total_up, 1)
        if HAS_BIAS:
            up += tl.load(bias_ptr + N + rows, mask=row_mask, other=0.0).to(tl.float32)
        gate = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        up = up.to(x_ptr.dtype.element_ty).to(tl.float32)
        y = (gate / (1.0 + tl.exp(-gate))).to(x_ptr.dtype.element_ty).to(tl.float32) * up
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=row_mask)


def norm_linear(
    x_1C: torch.Tensor,
    delta_1C: torch.Tensor | None,
    norm_C: torch.Tensor,
    eps: float,
    weight_NC: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    gated: bool = False,
    config: RowsConfig = DEFAULT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ref.norm_linear; one row, all contiguous."""
    kept_1C = x_1C if delta_1C is None else torch.empty_like(x_1C)
    count = weight_NC.shape[0] // 2 if gated else weight_NC.shape[0]
    y_1N = x_1C.new_empty(1, count)
    _launch((x_1C, delta_1C, norm_C, weight_NC, bias_N, kept_1C, y_1N), eps, gated, config)
    return kept_1C, y_1N


def row_linear(
    x_1C: torch.Tensor,
    weight_NC: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    config: RowsConfig = DEFAULT,
) -> torch.Tensor:
    """ref.row_linear; one row, all contiguous."""
    y_1N = torch.empty(1, weight_NC.shape[0], dtype=dtype or x_1C.dtype, device=x_1C.device)
    _launch((x_1C, None, None, weight_NC, bias_N, x_1C, y_1N), 0.0, False, config)
    return y_1N


def _launch(
    tensors: tuple[torch.Tensor | None, ...], eps: float, gated: bool, config: RowsConfig
) -> None:
    x, delta, norm, weight, bias, kept, y = tensors
    assert x is not None and weight is not None and y is not None and x.shape[0] == 1
    count = y.shape[1]
    _rows[(triton.cdiv(count, config.block_n),)](
        x,
        x if delta is None else delta,
        x if norm is None else norm,
        weight,
        x if bias is None else bias,
        kept,
        y,
        count,
        eps,
        K=x.shape[1],
        NORM=norm is not None,
        HAS_DELTA=delta is not None,
        GATED=gated,
        HAS_BIAS=bias is not None,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        OVERLAP=config.overlap,
        num_warps=config.num_warps,
        **({"launch_pdl": True} if config.overlap else {}),
    )
