"""The fused operations of a step in Triton, Ampere and later.

    add_rms_norm   x += delta ; y = x w / sqrt(mean(x^2) + eps)      a row a program
    silu_mul       y = silu(gate) up                                 a piece of a row a program
    rope_append    q' = R(pos) q ; cache[slot] = (R(pos) k, v)       some heads of a token a program

Each reads and writes its tensors once; at decode sizes all are bound by their launch, which is why
there are three of them and not a dozen. Arithmetic in fp32, rounded where PyTorch's own operations
round, so that the engine and the trainer agree. Source of fused rotation with cache writes:
FlashAttention's flash_attn_with_kvcache (semantics).

overlap (Hopper and later): a kernel starts while the previous one of the stream ends and waits for
it before it reads, and lets the next one start at once: what that reads of its own, a matmul's
weights, comes meanwhile. Source: as triton_rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.step.triton_ask import NOTHING, Asked, ask
from ridgeline.kernels.step.triton_rows import norm_linear, row_linear

__all__ = ["add_rms_norm", "norm_linear", "rope_append", "row_linear", "silu_mul"]

_PIECE = 1024
_ASKERS = 128
"""Programs of a norm that do nothing but ask for weights: about one a unit of the device."""
_NORM_WARPS = 16
"""Of a norm's program at most."""
_HEADS = 8
"""Of a token, in one program of rope_append: with one each, programs cost more than their bytes."""


@triton.jit
def _start(OVERLAP: tl.constexpr):
    """Let the next kernel start, and wait for the previous one."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit(do_not_specialize=["P"])  # one kernel for any number of rows
def _add_rms_norm(
    x_ptr,
    delta_ptr,
    weight_ptr,
    y_ptr,
    a0_ptr,
    a1_ptr,
    a2_ptr,
    a3_ptr,
    a0_bytes,
    a1_bytes,
    a2_bytes,
    a3_bytes,
    P,
    C,
    eps,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASKED: tl.constexpr,
    PIECE: tl.constexpr,
    THREADS: tl.constexpr,
):
    """The first P programs have a row each; others, where there are any, ask for weights."""
    if OVERLAP:
        gdc_launch_dependents()
    program = tl.program_id(0)
    has_row = True
    if ASKED > 0:
        has_row = program < P
    if has_row:
        row = program.to(tl.int64) * C
        cols = tl.arange(0, BLOCK)
        mask = cols < C
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if OVERLAP:
            gdc_wait()  # what no kernel of the step wrote is on its way
        x = tl.load(x_ptr + row + cols, mask=mask, other=0.0)
        if HAS_DELTA:
            delta = tl.load(delta_ptr + row + cols, mask=mask, other=0.0)
            x = (x.to(tl.float32) + delta.to(tl.float32)).to(x_ptr.dtype.element_ty)
            tl.store(x_ptr + row + cols, x, mask=mask)
        wide = x.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / C + eps)
        tl.store(y_ptr + row + cols, (wide * scale * weight).to(y_ptr.dtype.element_ty), mask=mask)
    else:
        asked = (a0_ptr, a1_ptr, a2_ptr, a3_ptr, a0_bytes, a1_bytes, a2_bytes, a3_bytes)
        ask(asked, program - P, tl.num_programs(0) - P, ASKED, THREADS, PIECE)


@triton.jit
def _silu_mul(both_ptr, y_ptr, F, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    _start(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    gate = tl.load(both_ptr + row * 2 * F + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * F + F + cols, mask=mask, other=0.0).to(tl.float32)
    turned = (gate / (1.0 + tl.exp(-gate))).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * F + cols, (turned * up).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_append(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    stride_p,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid (tokens, groups of heads); a program holds both halves of each head."""
    HALF: tl.constexpr = D // 2
    p = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, BLOCK)
    in_half = (cols < HALF)[None, :]
    mask = (heads < H + 2 * G)[:, None] & in_half
    _start(OVERLAP)
    slot = tl.load(slots_ptr + p).to(tl.int64)
    position = tl.load(positions_ptr + p).to(tl.int64)
    source = qkv_ptr + p * stride_p + heads[:, None] * D + cols[None, :]
    low = tl.load(source, mask=mask, other=0.0)
    high = tl.load(source + HALF, mask=mask, other=0.0)
    turns = mask & (heads < H + G)[:, None]
    angle = position * D + cols[None, :]
    cos = tl.load(cos_ptr + angle, mask=in_half, other=0.0)
    sin = tl.load(sin_ptr + HALF + angle, mask=in_half, other=0.0)
    low_32, high_32 = low.to(tl.float32), high.to(tl.float32)
    low = tl.where(turns, (low_32 * cos - high_32 * sin).to(qkv_ptr.dtype.element_ty), low)
    high = tl.where(turns, (high_32 * cos + low_32 * sin).to(qkv_ptr.dtype.element_ty), high)
    q_at = q_ptr + (p * H + heads)[:, None] * D + cols[None, :]
    k_at = k_ptr + (slot * G + heads - H)[:, None] * D + cols[None, :]
    v_at = v_ptr + (slot * G + heads - H - G)[:, None] * D + cols[None, :]
    is_q, is_k = (heads < H)[:, None], ((heads >= H) & (heads < H + G))[:, None]
    is_v = (heads >= H + G)[:, None]
    tl.store(q_at, low, mask=mask & is_q)
    tl.store(q_at + HALF, high, mask=mask & is_q)
    tl.store(k_at, low, mask=mask & is_k)
    tl.store(k_at + HALF, high, mask=mask & is_k)
    tl.store(v_at, low, mask=mask & is_v)
    tl.store(v_at + HALF, high, mask=mask & is_v)


def _launch_options(overlap: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if overlap else {}


def add_rms_norm(
    x_PC: torch.Tensor,
    delta_PC: torch.Tensor | None,
    weight_C: torch.Tensor,
    eps: float,
    *,
    overlap: bool = False,
    asked: Asked = NOTHING,
) -> torch.Tensor:
    """ref.add_rms_norm; x and delta contiguous. asked: weights to come, where overlapped."""
    P, C = x_PC.shape
    y_PC = torch.empty_like(x_PC)
    block = triton.next_power_of_2(C)
    warps = min(_NORM_WARPS, max(1, block // 256))
    _add_rms_norm[(P + (_ASKERS if asked.parts else 0),)](
        x_PC,
        x_PC if delta_PC is None else delta_PC,
        weight_C,
        y_PC,
        *asked.arguments(x_PC),
        P,
        C,
        eps,
        HAS_DELTA=delta_PC is not None,
        BLOCK=block,
        OVERLAP=overlap,
        ASKED=len(asked.parts),
        PIECE=asked.piece,
        THREADS=32 * warps,
        num_warps=warps,
        **_launch_options(overlap),
    )
    return y_PC


def silu_mul(both_PF: torch.Tensor, *, overlap: bool = False) -> torch.Tensor:
    """ref.silu_mul; contiguous."""
    P, F = both_PF.shape[0], both_PF.shape[1] // 2
    y_PF = both_PF.new_empty(P, F)
    _silu_mul[(P, triton.cdiv(F, _PIECE))](
        both_PF, y_PF, F, BLOCK=_PIECE, OVERLAP=overlap, num_warps=4, **_launch_options(overlap)
    )
    return y_PF


def rope_append(
    qkv_PHD: torch.Tensor,
    heads: int,
    angles: tuple[torch.Tensor, torch.Tensor],
    positions_P: torch.Tensor,
    slots_P: torch.Tensor,
    flat: tuple[torch.Tensor, torch.Tensor],
    *,
    overlap: bool = False,
) -> torch.Tensor:
    """ref.rope_append; the last two dims of qkv contiguous."""
    P, _, D = qkv_PHD.shape
    G = flat[0].shape[1]
    q_PHD = qkv_PHD.new_empty(P, heads, D)
    _rope_append[(P, triton.cdiv(heads + 2 * G, _HEADS))](
        qkv_PHD,
        q_PHD,
        *flat,
        *angles,
        positions_P,
        slots_P,
        qkv_PHD.stride(0),
        H=heads,
        G=G,
        D=D,
        BLOCK=triton.next_power_of_2(D // 2),
        HEADS=_HEADS,
        OVERLAP=overlap,
        num_warps=1,
        **_launch_options(overlap),
    )
    return q_PHD
