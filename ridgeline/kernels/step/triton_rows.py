"""A matmul of one row in Triton, Ampere and later: a stream of the weights, with the norm before it
and the gate after it in the same kernel.

    x' = x + delta ; n = x' w / sqrt(mean(x'^2) + eps) ; y = n W^T (+ b)      norm_linear
    y = silu(n G^T) * (n U^T), W = [G; U]                                     norm_linear, gated
    y = x W^T (+ b)                                                           row_linear

A program has BLOCK_N rows of W and goes along K; x (a few KiB) and the norm are computed again by
every program, from the L2 cache. W's bytes are read once and bound it. Products and sums in fp32,
each output in one fixed order; rounded where the separate operations round. x' goes to memory of
its own, as other programs still read x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsConfig:
    """How a program goes over its rows of W."""

    block_n: int = 8
    block_k: int = 512
    num_warps: int = 4
    num_stages: int = 3


DEFAULT = RowsConfig()
CANDIDATES = tuple(
    RowsConfig(block_n=n, block_k=k, num_warps=w, num_stages=s)
    for n, k, w in ((4, 1024, 4), (8, 512, 4), (8, 1024, 8), (16, 256, 4), (16, 512, 8))
    for s in (2, 3, 4)
)
"""What the benchmark tries; none has been measured here."""


@triton.jit
def _read_row(x_ptr, delta_ptr, cols, mask, HAS_DELTA: tl.constexpr):
    x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last")
    if HAS_DELTA:
        delta = tl.load(delta_ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last")
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x_ptr.dtype.element_ty)
    return x


@triton.jit
def _product(w_ptr, x, rows, cols, row_mask, col_mask, K: tl.constexpr):
    """fp32 products of a piece of x with a tile of W."""
    mask = row_mask[:, None] & col_mask[None, :]
    where = rows.to(tl.int64)[:, None] * K + cols[None, :]
    w = tl.load(w_ptr + where, mask=mask, other=0.0, eviction_policy="evict_first")
    return w.to(tl.float32) * x[None, :]


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
):
    """N: outputs; gated: rows n and N + n of W make output n."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < N
    piece = tl.arange(0, BLOCK_K)
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
    total = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    total_up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        cols = start + piece
        col_mask = cols < K
        x = _read_row(x_ptr, delta_ptr, cols, col_mask, HAS_DELTA).to(tl.float32)
        if NORM:
            norm = tl.load(norm_ptr + cols, mask=col_mask, other=0.0).to(tl.float32)
            x = (x * scale * norm).to(x_ptr.dtype.element_ty).to(tl.float32)
        total += _product(w_ptr, x, rows, cols, row_mask, col_mask, K)
        if GATED:
            total_up += _product(w_ptr, x, rows + N, cols, row_mask, col_mask, K)
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
        num_warps=config.num_warps,
    )
