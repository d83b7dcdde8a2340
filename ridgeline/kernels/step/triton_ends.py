"""The first and the last kernel of a decode step in Triton, Ampere and later.

    embed_norm        x = table[token] ; y = x w / sqrt(mean(x^2) + eps)      a row a program
    choose            token = argmax(logits) ; the row's numbers one token on

`choose` reads a row's logits with CHOOSERS programs; the one that arrives last looks through what
they found, so the whole vocabulary is one kernel. Equal logits: the smallest id. Bound by the
logits' bytes, with few rows by latency. Source of the last arriver: triton_attend.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHOOSERS = 64
"""Programs a row at most."""
LEAST_PIECE = 1024


@triton.jit
def _embed_norm(
    tokens_ptr, table_ptr, weight_ptr, x_ptr, y_ptr, stride_token, C, eps,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < C
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    token = tl.load(tokens_ptr + row * stride_token).to(tl.int64)
    x = tl.load(table_ptr + token * C + cols, mask=mask, other=0.0)
    tl.store(x_ptr + row * C + cols, x, mask=mask)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / C + eps)
    tl.store(y_ptr + row * C + cols, (wide * scale * weight).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _choose(
    logits_ptr, numbers_ptr, tokens_ptr, best_ptr, place_ptr, count_ptr, V, stride_row,
    stride_numbers, PIECES: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (pieces, rows)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.full((BLOCK,), 0, tl.int32) + piece * PIECE
    for start in range(0, PIECE, BLOCK):
        at = piece * PIECE + start + cols
        inside = (start + cols < PIECE) & (at < V)
        logit = tl.load(logits_ptr + row * stride_row + at, mask=inside, other=float("-inf"))
        better = logit > best  # the first of equals
        best = tl.where(better, logit, best)
        where = tl.where(better, at, where)
    top = tl.max(best, 0)
    own = row * PIECES + piece
    tl.store(best_ptr + own, top)
    tl.store(place_ptr + own, tl.min(tl.where(best == top, where, V - 1), 0))
    tl.debug_barrier()
    arrived = tl.atomic_add(count_ptr + row, 1, sem="acq_rel", scope="gpu")
    if arrived == PIECES - 1:
        pieces = tl.arange(0, PIECES)
        best_P = tl.load(best_ptr + row * PIECES + pieces, cache_modifier=".cg")
        place_P = tl.load(place_ptr + row * PIECES + pieces, cache_modifier=".cg")
        found = tl.where(best_P == tl.max(best_P, 0), place_P, V - 1)
        token = tl.minimum(tl.min(found, 0), V - 1)
        tl.store(tokens_ptr + row, token.to(tl.int64))
        numbers_ptr += row * stride_numbers
        by = tl.load(numbers_ptr + 4)
        tl.store(numbers_ptr, token)
        for column in tl.static_range(1, 4):
            tl.store(numbers_ptr + column, tl.load(numbers_ptr + column) + by)
        tl.store(count_ptr + row, 0)


def embed_norm(
    tokens_P: torch.Tensor,
    table_VC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    *,
    overlap: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of a table, their RMS norm); tokens may be a column of a wider tensor.

    overlap: lets the next kernel start; it is a step's first and waits for nothing itself."""
    P, C = tokens_P.shape[0], table_VC.shape[1]
    x_PC, y_PC = table_VC.new_empty(2, P, C)
    block = triton.next_power_of_2(C)
    _embed_norm[(P,)](
        tokens_P, table_VC, weight_C, x_PC, y_PC, tokens_P.stride(0), C, eps,
        BLOCK=block, OVERLAP=overlap, num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return x_PC, y_PC


def chooser(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `choose` needs for at most so many rows; its counters are zero between kernels."""
    return (
        torch.empty(rows, CHOOSERS, dtype=torch.float32, device=device),
        torch.empty(rows, CHOOSERS, dtype=torch.int32, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )


def choose(
    logits_RV: torch.Tensor,
    numbers_RN: torch.Tensor,
    scratch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    overlap: bool = False,
) -> torch.Tensor:
    """The likeliest tokens, int64 [R]. Each row of numbers (int32: token, position, slot, keys,
    tokens a step, ..) gets its token and is moved on."""
    R, V = logits_RV.shape
    tokens_R = torch.empty(R, dtype=torch.int64, device=logits_RV.device)
    pieces = min(CHOOSERS, triton.next_power_of_2(triton.cdiv(V, LEAST_PIECE)))
    piece = triton.cdiv(V, pieces)
    _choose[(pieces, R)](
        logits_RV, numbers_RN, tokens_R, *scratch, V, logits_RV.stride(0), numbers_RN.stride(0),
        PIECES=pieces, PIECE=piece, BLOCK=min(1024, triton.next_power_of_2(piece)),
        OVERLAP=overlap, num_warps=4, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip
    return tokens_R
