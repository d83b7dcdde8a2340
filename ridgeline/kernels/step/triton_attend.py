"""Attention of one token a sequence over pages in Triton, Ampere and later: rotation, the write to
the cache, the split keys and their merge in one kernel.

    q' = R(pos) norm(q) ; k' = R(pos) norm(k) ; cache[slot] = (k', v) ; o = softmax(q' K^T s) V

Grid (splits, kv heads, sequences). The query heads that share a key/value head are the rows of one
tile; a sequence's keys are cut into as many ranges of whole tiles as it has tiles, at most SPLITS.
The new key is not read back from the cache: the program of the last range writes it there and adds
it from registers. Each program leaves its part of the sum in memory, and the one that arrives last
merges all parts, in the order of the ranges, so that the result does not depend on who that was.

Bytes: every key and value once; with few sequences it is bound by latency, which is why it is one
kernel and not four. Products on the tensor cores, sums in fp32, q' and k' rounded to the dtype as
the separate operations round them.

overlap (Hopper and later): the first tile of keys and values is asked for before the previous
kernel of the stream has ended. They were written by earlier steps, which are over: only the new
token's depend on it. Source of the last arriver: CUDA Programming Guide, threadFenceReduction;
of the split: Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.step.ref import DecodeTable
from ridgeline.kernels.step.triton_ask import NOTHING, Asked, ask
from ridgeline.kernels.step.triton_near import attend_head, normed, slots_of

LEAST_ROWS = tl.constexpr(16)
"""Rows of a tensor-core product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttendConfig:
    """How a sequence's keys are cut."""

    block_n: int = 64
    splits: int = 16
    num_warps: int = 4
    near: int = 0
    """Keys that a program takes at once, for one head, where a sequence has few (triton_near.py);
    0: never."""

    def __str__(self) -> str:
        near = f", {self.near} near" if self.near else ""
        return f"{self.block_n} keys {self.num_warps} warps{near}"

    def reach(self, sequences: int) -> int:
        """Keys of a sequence up to which its heads are attended one by one: few enough that
        reading them once a head is nothing, in no more ranges than a sequence has parts for."""
        return min(min(NEAR_SPLITS, self.splits) * self.near, NEAR_KEYS // sequences)


NEAR_SPLITS = 4
NEAR_KEYS = 1024
"""Of all sequences together."""
FEW = 8
"""Sequences up to which a step's programs do not fill the device."""
CANDIDATES = (
    AttendConfig(),
    AttendConfig(num_warps=8, near=256),
    AttendConfig(block_n=128, num_warps=16, near=256),
)
"""What an engine tries when it records a step (engine/graphs.py): few warps wait less for each
other, many read more at once."""
OF_MANY = (AttendConfig(splits=4),)
"""Of more sequences: fewer parts to merge."""


@dataclass(frozen=True, slots=True)
class AttendScratch:
    """Where programs leave their parts; counters are zero between kernels."""

    part: torch.Tensor
    lse: torch.Tensor
    count: torch.Tensor
    config: AttendConfig

    @staticmethod
    def of(
        sequences: int, heads: int, dim: int, device: torch.device,
        config: AttendConfig | None = None,
    ) -> AttendScratch:  # fmt: skip
        """For at most so many sequences."""
        config = config or AttendConfig()
        rows = (sequences, config.splits, heads)
        return AttendScratch(
            torch.empty(*rows, dim, dtype=torch.float32, device=device),
            torch.empty(*rows, dtype=torch.float32, device=device),
            torch.zeros(sequences, heads, dtype=torch.int32, device=device),
            config,
        )


@triton.jit
def _tile(ptr, slots, cols, mask, stride: tl.constexpr):
    return tl.load(ptr + slots[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _decode_attention(
    qkv_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    keys_ptr,
    table_ptr,
    part_ptr,
    lse_ptr,
    count_ptr,
    o_ptr,
    a0_ptr,
    a1_ptr,
    a2_ptr,
    a3_ptr,
    a0_bytes,
    a1_bytes,
    a2_bytes,
    a3_bytes,
    stride_qkv,
    stride_keys,
    stride_table,
    scale_log2,
    eps,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    W: tl.constexpr,
    WINDOW: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    NEAR: tl.constexpr,
    REACH: tl.constexpr,
    NEAR_RANGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASKED: tl.constexpr,
    PIECE: tl.constexpr,
    THREADS: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    program, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    asked = (a0_ptr, a1_ptr, a2_ptr, a3_ptr, a0_bytes, a1_bytes, a2_bytes, a3_bytes)
    H: tl.constexpr = G * GROUP
    T = tl.load(keys_ptr + b * stride_keys)
    new = T - 1  # the new key's position; the keys before it are in the cache
    first = 0
    if WINDOW > 0:
        first = tl.maximum(T - WINDOW, 0)
    row = (qkv_ptr + b * stride_qkv, table_ptr + b * stride_table)
    rotation = (cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr)
    parts = (part_ptr, lse_ptr, count_ptr + b * H, o_ptr)
    keys, numbers = (first, new), (scale_log2, eps)
    if NEAR > 0:
        if new - first <= REACH:
            active = tl.maximum(tl.cdiv(new - first, NEAR), 1)
            if program < H * active:
                attend_head(
                    row, (k_ptr, v_ptr), rotation, parts, (program % H, program // H, b),
                    (first, new, active), numbers,
                    G, GROUP, D, BLOCK_HALF, BLOCK_D, W, NORM, NEAR, SPLITS, NEAR_RANGES, OVERLAP,
                )  # fmt: skip
            elif ASKED > 0:
                if b == 0:
                    idle = tl.num_programs(0) - H * active
                    ask(asked, program - H * active, idle, ASKED, THREADS, PIECE)
        else:
            _attend_ranges(
                row, (k_ptr, v_ptr), rotation, parts, asked, (program, b), keys, numbers,
                G, GROUP, ROWS, D, BLOCK_HALF, BLOCK_D, W, NORM, BLOCK_N, SPLITS, PRECISION,
                OVERLAP, ASKED, PIECE, THREADS,
            )  # fmt: skip
    else:
        _attend_ranges(
            row, (k_ptr, v_ptr), rotation, parts, asked, (program, b), keys, numbers,
            G, GROUP, ROWS, D, BLOCK_HALF, BLOCK_D, W, NORM, BLOCK_N, SPLITS, PRECISION,
            OVERLAP, ASKED, PIECE, THREADS,
        )  # fmt: skip


@triton.jit
def _attend_ranges(
    row, caches, rotation, parts, asked, place, keys, numbers,
    G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_D: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
    ASKED: tl.constexpr, PIECE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """A program's group and range; those that the first sequence leaves idle ask for weights."""
    program, b = place
    first, new = keys
    start = first // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(tl.maximum(new - start, 0), BLOCK_N)
    active = tl.minimum(tl.maximum(tiles, 1), SPLITS)
    split, g = program % SPLITS, program // SPLITS
    if split < active and g < G:
        _attend_range(
            row, caches, rotation, parts, (g, split, b), (first, new, start, tiles, active),
            numbers, G, GROUP, ROWS, D, BLOCK_HALF, BLOCK_D, W, NORM, BLOCK_N, SPLITS, PRECISION,
            OVERLAP,
        )  # fmt: skip
    elif ASKED > 0:
        if (b == 0) & (g < G):
            idle = SPLITS - active
            ask(asked, g * idle + split - active, G * idle, ASKED, THREADS, PIECE)


@triton.jit
def _attend_range(
    row,
    caches,
    rotation,
    parts,
    place,
    keys,
    numbers,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    W: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """All heads of a group over one range of keys."""
    qkv_ptr, table_ptr = row
    k_ptr, v_ptr = caches
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr = rotation
    part_ptr, lse_ptr, count_ptr, o_ptr = parts
    g, split, b = place
    first, new, start, tiles, active = keys
    scale_log2, eps = numbers
    HALF: tl.constexpr = D // 2
    H: tl.constexpr = G * GROUP
    halves, cols, offs_n = (
        tl.arange(0, BLOCK_HALF),
        tl.arange(0, BLOCK_D),
        tl.arange(0, BLOCK_N),
    )
    in_half, in_head = halves < HALF, cols < D
    k_ptr += g * D
    v_ptr += g * D
    begin = start + tiles * split // active * BLOCK_N
    stop = start + tiles * (split + 1) // active * BLOCK_N
    n = begin + offs_n
    exists = (n >= first) & (n < tl.minimum(stop, new))
    slots = slots_of(table_ptr, n, new, W)
    k_mask = exists[:, None] & in_half[None, :]
    k_low = _tile(k_ptr, slots, halves, k_mask, G * D)
    k_high = _tile(k_ptr + HALF, slots, halves, k_mask, G * D)
    v = _tile(v_ptr, slots, cols, exists[:, None] & in_head[None, :], G * D)
    cos = tl.load(cos_ptr + new.to(tl.int64) * D + halves, mask=in_half, other=0.0)
    sin = tl.load(sin_ptr + new.to(tl.int64) * D + HALF + halves, mask=in_half, other=0.0)
    new_slot = slots_of(table_ptr, new, new + 1, W)
    if OVERLAP:
        gdc_wait()

    rows = tl.arange(0, ROWS)
    q_at = qkv_ptr + (g * GROUP + rows)[:, None] * D + halves[None, :]
    q_mask = (rows < GROUP)[:, None] & in_half[None, :]
    low = tl.load(q_at, mask=q_mask, other=0.0)
    high = tl.load(q_at + HALF, mask=q_mask, other=0.0)
    key_at = qkv_ptr + (H + g) * D + tl.arange(0, 1)[:, None] + halves[None, :]
    new_low = tl.load(key_at, mask=in_half[None, :], other=0.0)
    new_high = tl.load(key_at + HALF, mask=in_half[None, :], other=0.0)
    new_v = tl.load(qkv_ptr + (H + G + g) * D + cols, mask=in_head, other=0.0)
    dtype = qkv_ptr.dtype.element_ty
    low_32, high_32 = normed(low, high, q_norm_ptr, halves, in_half, eps, HALF, NORM)
    q_low = (low_32 * cos[None, :] - high_32 * sin[None, :]).to(dtype)
    q_high = (high_32 * cos[None, :] + low_32 * sin[None, :]).to(dtype)
    low_32, high_32 = normed(new_low, new_high, k_norm_ptr, halves, in_half, eps, HALF, NORM)
    new_low = (low_32 * cos[None, :] - high_32 * sin[None, :]).to(dtype)
    new_high = (high_32 * cos[None, :] + low_32 * sin[None, :]).to(dtype)

    # The new key first: its score is a number for every row.
    is_last = split == active - 1
    score = tl.sum(q_low.to(tl.float32) * new_low.to(tl.float32), 1)
    score += tl.sum(q_high.to(tl.float32) * new_high.to(tl.float32), 1)
    m = tl.where(is_last, score * scale_log2, float("-inf"))
    total = tl.where(is_last, tl.full((ROWS,), 1.0, tl.float32), 0.0)
    acc = total[:, None] * new_v.to(tl.float32)[None, :]
    if is_last:
        at = new_slot * (G * D)
        new_at = k_ptr + at + tl.arange(0, 1)[:, None] + halves[None, :]
        tl.store(new_at, new_low, mask=in_half[None, :])
        tl.store(new_at + HALF, new_high, mask=in_half[None, :])
        tl.store(v_ptr + at + cols, new_v, mask=in_head)
    if begin < stop:
        m, total, acc = _join(
            (m, total, acc), (q_low, q_high), (k_low, k_high, v), exists, scale_log2, PRECISION
        )
    for n_start in tl.range(begin + BLOCK_N, stop, BLOCK_N, num_stages=2):
        n = n_start + offs_n
        exists = n < new
        slots = slots_of(table_ptr, n, new, W)
        k_mask = exists[:, None] & in_half[None, :]
        k_low = _tile(k_ptr, slots, halves, k_mask, G * D)
        k_high = _tile(k_ptr + HALF, slots, halves, k_mask, G * D)
        v = _tile(v_ptr, slots, cols, exists[:, None] & in_head[None, :], G * D)
        m, total, acc = _join(
            (m, total, acc), (q_low, q_high), (k_low, k_high, v), exists, scale_log2, PRECISION
        )
    acc = acc / total[:, None]
    heads = g * GROUP + rows
    in_group = rows < GROUP
    o_mask = in_group[:, None] & in_head[None, :]
    o_at = o_ptr + (b * H + heads)[:, None] * D + cols[None, :]
    if active == 1:
        tl.store(o_at, acc.to(dtype), mask=o_mask)
    else:
        own = (b * SPLITS + split) * H + heads
        tl.store(part_ptr + own[:, None] * D + cols[None, :], acc, mask=o_mask)
        tl.store(lse_ptr + own, m + tl.log2(total), mask=in_group)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        arrived = tl.atomic_add(count_ptr + g, 1, sem="acq_rel", scope="gpu")
        if arrived == active - 1:
            _merge(
                (part_ptr, lse_ptr, o_ptr, b * SPLITS * H + g * GROUP, b * H + g * GROUP),
                active, H, GROUP, D, BLOCK_D, SPLITS,
            )  # fmt: skip
            tl.store(count_ptr + g, 0)


@triton.jit
def _merge(
    at,
    active,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Join the parts of one group of heads."""
    part_ptr, lse_ptr, o_ptr, first_part, first = at
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    heads, cols = tl.arange(0, HEADS), tl.arange(0, BLOCK_D)
    in_group = heads < GROUP
    mask = in_group[:, None] & (cols < D)[None, :]
    lse_ptr += first_part + heads
    part_ptr += (first_part + heads)[:, None] * D + cols[None, :]
    # Unrolled: all parts are on their way before the first is needed, and no thread needs another.
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    for i in tl.static_range(SPLITS):
        lse = tl.load(
            lse_ptr + i * H, mask=in_group & (i < active), other=float("-inf"),
            cache_modifier=".cg",
        )  # fmt: skip
        top = tl.maximum(top, lse)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((HEADS,), tl.float32)
    o = tl.zeros((HEADS, BLOCK_D), tl.float32)
    for i in tl.static_range(SPLITS):
        lse = tl.load(
            lse_ptr + i * H, mask=in_group & (i < active), other=float("-inf"),
            cache_modifier=".cg",
        )  # fmt: skip
        weight = tl.exp2(lse - safe)
        part = tl.load(
            part_ptr + i * H * D, mask=mask & (i < active), other=0.0, cache_modifier=".cg"
        )
        total += weight
        o += weight[:, None] * part
    o = o / tl.where(total == 0.0, 1.0, total)[:, None]
    o_at = o_ptr + (first + heads)[:, None] * D + cols[None, :]
    tl.store(o_at, o.to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _join(state, q, kv, exists, scale_log2, PRECISION: tl.constexpr):
    """Online softmax over one tile of keys."""
    m, total, acc = state
    q_low, q_high = q
    k_low, k_high, v = kv
    s = tl.dot(q_low, tl.trans(k_low), input_precision=PRECISION)
    s = tl.dot(q_high, tl.trans(k_high), s, input_precision=PRECISION)
    s = tl.where(exists[None, :], s * scale_log2, float("-inf"))
    m_next = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(m_next == float("-inf"), 0.0, m_next)
    p = tl.exp2(s - safe[:, None])
    old = tl.exp2(m - safe)
    total = total * old + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
    return m_next, total, acc


def decode_attention(
    qkv_BHD: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    flat: tuple[torch.Tensor, torch.Tensor],
    table: DecodeTable,
    scratch: AttendScratch,
    *,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    window: int | None = None,
    overlap: bool = False,
    asked: Asked = NOTHING,
) -> torch.Tensor:
    """ref.decode_attention; qkv's last two dims contiguous. Returns [B, H, D]. asked: weights to
    come, where overlapped."""
    B, _, D = qkv_BHD.shape
    k_flat, v_flat = flat
    G = k_flat.shape[1]
    H = qkv_BHD.shape[1] - 2 * G
    q_norm, k_norm, eps = norms or (k_flat, k_flat, 0.0)
    config = scratch.config
    o_BHD = qkv_BHD.new_empty(B, H, D)
    reach = config.reach(B) if config.near else 0
    ranges = -(-reach // max(config.near, 1))
    _decode_attention[(max(config.splits * G, H * ranges), B)](
        qkv_BHD,
        k_flat,
        v_flat,
        *angles,
        q_norm,
        k_norm,
        table.keys_B,
        table.pages_BU,
        scratch.part,
        scratch.lse,
        scratch.count,
        o_BHD,
        *asked.arguments(qkv_BHD),
        qkv_BHD.stride(0),
        table.keys_B.stride(0),
        table.pages_BU.stride(0),
        math.log2(math.e) / math.sqrt(D),
        eps,
        G=G,
        GROUP=H // G,
        ROWS=max(LEAST_ROWS.value, triton.next_power_of_2(H // G)),
        D=D,
        BLOCK_HALF=max(LEAST_ROWS.value, triton.next_power_of_2(D // 2)),
        BLOCK_D=max(LEAST_ROWS.value, triton.next_power_of_2(D)),
        W=table.page_tokens,
        WINDOW=window or 0,
        NORM=norms is not None,
        BLOCK_N=config.block_n,
        SPLITS=config.splits,
        NEAR=config.near if reach else 0,
        REACH=reach,
        NEAR_RANGES=ranges,
        PRECISION="ieee" if qkv_BHD.dtype == torch.float32 else None,
        OVERLAP=overlap,
        ASKED=len(asked.parts),
        PIECE=asked.piece,
        THREADS=32 * config.num_warps,
        num_warps=config.num_warps,
        **({"launch_pdl": True} if overlap else {}),
    )
    return o_BHD
