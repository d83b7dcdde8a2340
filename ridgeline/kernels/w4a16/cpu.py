"""W4A16 on a CPU with what PyTorch does well.

Three layouts are made at load, each where it is the fastest:
- few rows: bags of byte codes (cpu_bags), up to four rows a pass, any format, group size and dtype,
  fp32 inside, of weights that are not small. The engine's row path takes them for all weights,
  since it stays in fp32 from norm to residual (not on a CPU with bf16 instructions and an int4
  weight);
- several rows: PyTorch's int4 packing where it is exact. It computes (code - 8) * s + z with s, z
  in the activation's dtype: bf16 activations, 4 bits, symmetric, scales that bf16 holds. Without
  bags also for one row;
- many rows: the weight widened once, and a plain matmul.
All lie in large pages (core/large_pages), read from end to end as they are.
What a layer's first call works out (views, starts of bags) is kept in `Prepared.memo`.
Measured, 2048 x 2048: AVX-512 with bf16 instructions, int4 218 us against bf16 348 at one row on 2
threads, bf16 ahead from 16 rows; with AMX too bf16 is ahead from 5 (docs/log/w4a16.md). AVX2:
docs/w4a16.md (bf16 is emulated there for more than one row, so the wide weight is float32).
Widening costs 2 (bf16) or 4 (float32) bytes a weight of memory, bags 1.1, int4 a half.
Numerics: fp32 accumulation inside; one-hot activations return the weight bit for bit; with a bias
the int4 path rounds to the activation's dtype before the bias is added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ridgeline.core.large_pages import in_large_pages
from ridgeline.formats.base import QuantizedWeight
from ridgeline.kernels.w4a16 import cpu_bags
from ridgeline.kernels.w4a16.cpu_bags import Bags
from ridgeline.kernels.w4a16.prepared import Prepared
from ridgeline.kernels.w4a16.ref import finish

_INT4_GROUPS = (32, 64, 128, 256)
_INT4_COLUMNS = 16
"""Output features come in multiples of this in PyTorch's packing."""


class _Int4(NamedTuple):
    words: torch.Tensor
    scale_zero: torch.Tensor
    """[R, N, 2]."""
    order_K: torch.Tensor
    """Input order; empty: as it is."""


_NUM_BAGS = len(Bags._fields)
LEAST_WEIGHTS = 1 << 19
"""Weights of a layer from which `forward` takes the bags: their fixed cost is some 30 us, in which
a matrix-vector product reads a small layer whole (two busy cores, AVX2, 2026-11-30)."""
MOST_KNOWN_ROWS = 64
"""Rows up to which a call through the wide weight goes the public call's short way: its checks are
10 us, 3 % of 2048 x 2048 with AMX. More rows take long enough, and come in too many lengths."""
BAGS_BEFORE_INT4 = 1
"""Most rows that an int4-exact weight sends through its bags (then int4)."""


@functools.cache
def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 natively (x86; taken as no where PyTorch does not say)."""
    return has_amx() or _torch_says("_is_avx512_bf16_supported")


@functools.cache
def has_amx() -> bool:
    """Whether it multiplies tiles of bf16: many rows then cost hardly more than one."""
    return _torch_says("_is_amx_tile_supported")


def _torch_says(name: str) -> bool:
    ask = getattr(torch.cpu, name, None)
    return ask is not None and bool(ask())


def int4_refusal(weight: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why PyTorch's int4 matmul cannot hold this weight exactly, or None."""
    N, K = weight.shape_nk
    if dtype != torch.bfloat16:
        return f"fast with bfloat16 activations only, not {dtype}"
    if weight.bits != 4:
        return f"4 bits only, not {weight.bits}"
    if weight.zero_NR is not None:
        return "zero points are rounded to bfloat16"
    if weight.group_size not in _INT4_GROUPS or K % weight.group_size:
        return f"groups of {_INT4_GROUPS} that divide {K} only, not {weight.group_size}"
    if N % _INT4_COLUMNS:
        return f"output features in multiples of {_INT4_COLUMNS} only, not {N}"
    if weight.group_of_K is not None and not _groups_are_full(weight):
        return "act-order groups of unequal size"
    scale = weight.scale_NR.float()
    if not torch.equal(scale.to(torch.bfloat16).float(), scale):
        return "scales have more bits than bfloat16"
    return None


def one_row_refusal(weight: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why one row of activations goes through the widened weight, or None."""
    return cpu_bags.refusal(weight) and int4_refusal(weight, dtype)


def _groups_are_full(weight: QuantizedWeight) -> bool:
    counts = torch.bincount(weight.groups_K(), minlength=weight.scale_NR.shape[1])
    return bool((counts == weight.group_size).all())


def prepare(
    weight: QuantizedWeight, dtype: torch.dtype, *, silu_mul: bool = False
) -> tuple[torch.Tensor, ...]:
    """The wide weight [N, K], then Bags where they can be made, then _Int4 likewise."""
    wide_dtype = dtype if dtype == torch.float32 or _wide_is_fast(dtype) else torch.float32
    wide_NK = weight.dequantize(dtype).to(wide_dtype)
    tensors: tuple[torch.Tensor, ...] = (in_large_pages(wide_NK),)
    int4 = int4_refusal(weight, dtype) is None
    if cpu_bags.refusal(weight) is None and not (int4 and has_fast_bf16()):
        tensors += cpu_bags.pack(weight)
    return tensors + _pack_int4(weight, dtype) if int4 else tensors


def _pack_int4(weight: QuantizedWeight, dtype: torch.dtype) -> _Int4:
    code_NK = weight.code_NK
    order_K = torch.empty(0, dtype=torch.int64)
    if weight.group_of_K is not None:
        order_K = torch.argsort(weight.groups_K(), stable=True)
        code_NK = code_NK[:, order_K]
    words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(code_NK.to(torch.int32), 1)
    scale_RN = weight.scale_NR.T.to(dtype)
    scale_zero = torch.stack([scale_RN, torch.zeros_like(scale_RN)], dim=-1).contiguous()
    return _Int4(in_large_pages(words), in_large_pages(scale_zero), order_K)


def _wide_is_fast(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and has_fast_bf16()


def bags_of(prepared: Prepared) -> Bags | None:
    """The layout for a few rows, where it was made."""
    tensors = prepared.tensors
    return Bags(*tensors[1 : 1 + _NUM_BAGS]) if len(tensors) > _NUM_BAGS else None


def _int4_of(prepared: Prepared) -> _Int4 | None:
    tensors = prepared.tensors
    return _Int4(*tensors[-3:]) if len(tensors) in (4, 4 + _NUM_BAGS) else None


def decode_bytes(prepared: Prepared) -> int:
    """Bytes of the layout for one row: the bags (which the engine's row path reads whatever the
    layer's size), else the int4 words with their scales, else the whole widened weight."""
    bags = bags_of(prepared)
    if bags is not None:
        return cpu_bags.read_bytes(bags)
    read = _int4_of(prepared) or prepared.tensors[:1]
    return sum(t.numel() * t.element_size() for t in read)


def rows_for_wide(*, int4: bool) -> int:
    """Rows from which the widened weight is faster than the layouts for fewer (measured; module
    docstring)."""
    if not has_fast_bf16():
        return 32 if int4 else 24
    if int4:
        return 5 if has_amx() else 16
    return 3


class _Ways(NamedTuple):
    """How a layer's rows are multiplied."""

    wide_from: int
    """Rows that go through the widened weight, and all above."""
    int4: _Int4 | None
    bags: Bags | None
    """None also where the layer is too small for them."""
    bags_to: int
    """Most rows that go through the bags; more, up to the wide weight, are for int4."""


def _ways_of(prepared: Prepared) -> _Ways:
    bags, int4 = bags_of(prepared), _int4_of(prepared)
    if prepared.n * prepared.k < LEAST_WEIGHTS:
        bags = None
    wide_from = rows_for_wide(int4=int4 is not None) if int4 or bags else 0
    bags_to = 0 if bags is None else wide_from - 1
    if int4 is not None:
        bags_to = min(bags_to, BAGS_BEFORE_INT4)
    return _Ways(wide_from, int4, bags, bags_to)


def forward(
    act_MK: torch.Tensor,
    prepared: Prepared,
    bias_N: torch.Tensor | None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Few rows through the bags or the int4 kernel where the weight allows; many through a matmul
    on the wide weight."""
    M = act_MK.shape[0]
    if batch_invariant and M > 1:
        rows = [forward(row, prepared, bias_N) for row in act_MK.split(1)]
        return torch.cat(rows)
    ways: _Ways | None = prepared.memo.get("ways")
    if ways is None:
        ways = prepared.memo["ways"] = _ways_of(prepared)
    simple = bias_N is None and not prepared.silu_mul
    if M <= ways.bags_to and ways.bags is not None:
        if simple:
            if M <= cpu_bags.ROWS_TOGETHER:
                return _known(act_MK, prepared, ways.bags)(act_MK)
            return _by_bags(act_MK, prepared, ways.bags, act_MK.dtype)
        out_MN = _by_bags(act_MK, prepared, ways.bags, torch.float32)
        return finish(out_MN, bias_N, prepared.silu_mul, act_MK.dtype)
    if M < ways.wide_from and ways.int4 is not None:
        return _int4(act_MK, ways.int4, prepared, bias_N)
    wide_NK = prepared.tensors[0]
    if wide_NK.dtype == act_MK.dtype and simple:
        if M <= MOST_KNOWN_ROWS:
            prepared.memo[act_MK.shape] = functools.partial(_linear, wide_NK)
        return F.linear(act_MK, wide_NK)
    acc_MN = F.linear(act_MK.to(wide_NK.dtype), wide_NK).float()
    return finish(acc_MN, bias_N, prepared.silu_mul, act_MK.dtype)


def _linear(wide_NK: torch.Tensor, act_MK: torch.Tensor) -> torch.Tensor:
    """What the public call finds in the memo for a shape that the wide weight serves."""
    return F.linear(act_MK, wide_NK)


def _by_bags(
    act_MK: torch.Tensor, prepared: Prepared, bags: Bags, dtype: torch.dtype
) -> torch.Tensor:
    """out_MN in `dtype`."""
    out_MN = act_MK.new_empty(act_MK.shape[0], prepared.n, dtype=dtype)
    together = cpu_bags.ROWS_TOGETHER
    if len(act_MK) <= together:
        return out_MN.copy_(_rows(prepared, bags, len(act_MK))(act_MK))
    for out, act in zip(out_MN.split(together), act_MK.split(together), strict=True):
        out.copy_(_rows(prepared, bags, len(act))(act))
    return out_MN


def _known(
    act_MK: torch.Tensor, prepared: Prepared, bags: Bags
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of this shape; the public call finds it in the memo."""
    known: Callable[[torch.Tensor], torch.Tensor] | None = prepared.memo.get(act_MK.shape)
    if known is None:
        known = prepared.memo[act_MK.shape] = _rows(prepared, bags, act_MK.shape[0]).alone()
    return known


def _rows(prepared: Prepared, bags: Bags, M: int) -> cpu_bags.Rows:
    rows: cpu_bags.Rows | None = prepared.memo.get(M)
    if rows is None:
        rows = prepared.memo[M] = cpu_bags.Rows(bags, prepared.n, M)
    return rows


def _int4(
    act_MK: torch.Tensor, int4: _Int4, prepared: Prepared, bias_N: torch.Tensor | None
) -> torch.Tensor:
    if int4.order_K.numel():
        act_MK = torch.index_select(act_MK, 1, int4.order_K)
    out_MN = torch.ops.aten._weight_int4pack_mm_for_cpu(
        act_MK.contiguous(), int4.words, prepared.group_size, int4.scale_zero
    )
    if bias_N is None and not prepared.silu_mul:
        return out_MN
    return finish(out_MN.float(), bias_N, prepared.silu_mul, act_MK.dtype)
