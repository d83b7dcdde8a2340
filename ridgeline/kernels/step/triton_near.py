"""A short sequence's attention, a program a query head: what triton_attend.py does where there are
few keys, with fewer waits.

A range of keys and values (all of them, up to `NEAR`) lies in a program's registers before the
previous kernel of the stream has ended; what is left after it is one row's rotation, products and
a softmax within the program, and where one range holds all keys no merge. The query heads of a
group read the same keys, from the L2 cache; products are fp32 and not on tensor cores: for one row
those would wait for shared memory. Bound by the latency of this chain.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def normed(low, high, norm_ptr, cols, mask, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """Halves of heads after their RMS norm, in fp32 and rounded to the dtype."""
    low_32, high_32 = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        squares = tl.sum(low_32 * low_32, 1) + tl.sum(high_32 * high_32, 1)
        scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        w_low = tl.load(norm_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        w_high = tl.load(norm_ptr + HALF + cols, mask=mask, other=0.0).to(tl.float32)
        low_32 = (low_32 * scale * w_low[None, :]).to(low.dtype).to(tl.float32)
        high_32 = (high_32 * scale * w_high[None, :]).to(low.dtype).to(tl.float32)
    return low_32, high_32


@triton.jit
def slots_of(table_ptr, n, end, W: tl.constexpr):
    """Where keys lie in the cache; those from `end` on at the first one's page."""
    page = tl.load(table_ptr + tl.where(n < end, n, 0) // W)
    return page.to(tl.int64) * W + n % W


@triton.jit
def attend_head(
    row,
    caches,
    rotation,
    parts,
    place,
    keys,
    numbers,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    W: tl.constexpr,
    NORM: tl.constexpr,
    NEAR: tl.constexpr,
    SPLITS: tl.constexpr,
    NEAR_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One query head over one range of at most NEAR keys; arguments as _decode_attention has
    them."""
    qkv_ptr, table_ptr = row
    k_ptr, v_ptr = caches
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr = rotation
    part_ptr, lse_ptr, count_ptr, o_ptr = parts
    h, split, b = place
    first, new, active = keys
    scale_log2, eps = numbers
    HALF: tl.constexpr = D // 2
    H: tl.constexpr = G * GROUP
    g = h // GROUP
    halves, cols = tl.arange(0, BLOCK_HALF), tl.arange(0, BLOCK_D)
    in_half, in_head = halves < HALF, cols < D
    k_ptr += g * D
    v_ptr += g * D
    each = tl.cdiv(new - first, active)
    n = first + split * each + tl.arange(0, NEAR)
    exists = (n < first + (split + 1) * each) & (n < new)
    slots = slots_of(table_ptr, n, new, W)
    k_at = k_ptr + slots[:, None] * (G * D) + halves[None, :]
    k_mask = exists[:, None] & in_half[None, :]
    k_low = tl.load(k_at, mask=k_mask, other=0.0)
    k_high = tl.load(k_at + HALF, mask=k_mask, other=0.0)
    v_at = v_ptr + slots[:, None] * (G * D) + cols[None, :]
    v = tl.load(v_at, mask=exists[:, None] & in_head[None, :], other=0.0)
    cos = tl.load(cos_ptr + new.to(tl.int64) * D + halves, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + new.to(tl.int64) * D + HALF + halves, mask=in_half, other=0.0)[None, :]
    new_slot = slots_of(table_ptr, new, new + 1, W)
    if OVERLAP:
        gdc_wait()

    dtype = qkv_ptr.dtype.element_ty
    one = tl.arange(0, 1)[:, None]
    q_at = qkv_ptr + h * D + one + halves[None, :]
    key_at = qkv_ptr + (H + g) * D + one + halves[None, :]
    low = tl.load(q_at, mask=in_half[None, :], other=0.0)
    high = tl.load(q_at + HALF, mask=in_half[None, :], other=0.0)
    new_low = tl.load(key_at, mask=in_half[None, :], other=0.0)
    new_high = tl.load(key_at + HALF, mask=in_half[None, :], other=0.0)
    new_v = tl.load(qkv_ptr + (H + G + g) * D + cols, mask=in_head, other=0.0)
    low_32, high_32 = normed(low, high, q_norm_ptr, halves, in_half, eps, HALF, NORM)
    q_low = (low_32 * cos - high_32 * sin).to(dtype).to(tl.float32)
    q_high = (high_32 * cos + low_32 * sin).to(dtype).to(tl.float32)
    low_32, high_32 = normed(new_low, new_high, k_norm_ptr, halves, in_half, eps, HALF, NORM)
    new_low = (low_32 * cos - high_32 * sin).to(dtype)
    new_high = (high_32 * cos + low_32 * sin).to(dtype)
    is_last = split == active - 1
    if is_last & (h % GROUP == 0):
        at = new_slot * (G * D)
        new_at = k_ptr + at + one + halves[None, :]
        tl.store(new_at, new_low, mask=in_half[None, :])
        tl.store(new_at + HALF, new_high, mask=in_half[None, :])
        tl.store(v_ptr + at + cols, new_v, mask=in_head)

    s = tl.sum(k_low.to(tl.float32) * q_low + k_high.to(tl.float32) * q_high, 1) * scale_log2
    s = tl.where(exists, s, float("-inf"))
    own = tl.sum(q_low * new_low.to(tl.float32) + q_high * new_high.to(tl.float32))
    own = tl.where(is_last, own * scale_log2, float("-inf"))
    m = tl.maximum(tl.max(s, 0), own)  # a range has a key, or is the last
    p = tl.exp2(s - m)
    p_own = tl.exp2(own - m)
    total = tl.sum(p, 0) + p_own
    acc = tl.sum(p[:, None] * v.to(tl.float32), 0) + p_own * new_v.to(tl.float32)
    acc = acc / total
    o_ptr += (b * H + h) * D
    if active == 1:
        tl.store(o_ptr + cols, acc.to(dtype), mask=in_head)
    else:
        at = (b * SPLITS + split) * H + h
        tl.store(part_ptr + at * D + cols, acc, mask=in_head)
        tl.store(lse_ptr + at, m + tl.log2(total))
        tl.debug_barrier()  # every thread's part is written before one of them says so
        arrived = tl.atomic_add(count_ptr + h, 1, sem="acq_rel", scope="gpu")
        if arrived == active - 1:
            at = b * SPLITS * H + h
            acc = _merged(part_ptr + at * D, lse_ptr + at, active, cols, in_head, H, D, NEAR_SPLITS)
            tl.store(o_ptr + cols, acc.to(dtype), mask=in_head)
            tl.store(count_ptr + h, 0)


@triton.jit
def _merged(
    part_ptr, lse_ptr, active, cols, mask, H: tl.constexpr, D: tl.constexpr, MOST: tl.constexpr
):
    """The parts of one head joined, in their order."""
    top = tl.load(lse_ptr, cache_modifier=".cg")
    for i in tl.static_range(1, MOST):
        lse = tl.load(lse_ptr + i * H, mask=i < active, other=float("-inf"), cache_modifier=".cg")
        top = tl.maximum(top, lse)
    total = 0.0
    acc = tl.zeros(cols.shape, tl.float32)
    for i in tl.static_range(MOST):
        lse = tl.load(lse_ptr + i * H, mask=i < active, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            part_ptr + i * H * D + cols, mask=mask & (i < active), other=0.0, cache_modifier=".cg"
        )
        weight = tl.exp2(lse - top)
        total += weight
        acc += weight * part
    return acc / total
