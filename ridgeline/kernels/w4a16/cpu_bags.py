"""One row of activations times a quantized weight, as a bag of embeddings.

    out[n] = sum_r scale[n, r] * (sum_{k in r} act[k] (code[n, k] - m) + (m - zero[n, r]) act_r)

with act_r the sum of a group's activations and m the middle code. The inner sums are what FBGEMM's
8-bit embedding bag computes (it is part of PyTorch on x86): the embedding of input k is the codes
of all outputs, a group of inputs is a bag, the activations are its weights. Codes are kept as
bytes, up to CHUNK outputs side by side for all inputs before the next ones, so that memory is read
in order; a row ends in the two floats 1 and -m that the kernel multiplies and adds.

    table[chunk K + slot] = codes of the chunk's outputs of the input in that slot, then 1.0, -m

Any width up to 8 bits, group size, scale dtype, zero point and act-order; inputs are sorted by
group at load, so groups of uneven size are bags of uneven size. Bound by N K (1 + 8 / CHUNK) bytes.
Numerics: everything in fp32, the scale multiplies the group's sum; one-hot activations give
scale * (code - zero) rounded once.
"""

from __future__ import annotations

import functools
import math
import platform
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ridgeline.formats.base import QuantizedWeight

CHUNK = 96
"""Most outputs side by side: twelve vectors of AVX2, one pass of the kernel. Microseconds for 576 x
3072 from memory, one thread of a busy EPYC (AVX2), 2026-11-30: 567 to 592 for 96 to 192, 855 for
256, 1,628 for whole rows, 861 for PyTorch's int4 kernel, 1,627 for the bf16 linear."""
_ENDING_BYTES = 8
_of_thread = threading.local()
"""`scratch` of `multiply`: memory that is asked for anew costs page faults, a third of the call."""


class Bags(NamedTuple):
    """A weight as bags; C chunks of outputs, R groups."""

    table: torch.Tensor
    """uint8 [C K, c + 8]."""
    index: torch.Tensor
    """int32 [C K], 0, 1, ...: shared by layers of a size."""
    offsets: torch.Tensor
    """int32 [C R + 1], where each bag starts."""
    scale_CRc: torch.Tensor
    """fp32; 0 for outputs that are padding."""
    shift_CRc: torch.Tensor
    """fp32 m - zero; empty: symmetric."""
    order_K: torch.Tensor
    """The input in each slot; empty: slot k is input k."""


def refusal(weight: QuantizedWeight) -> str | None:
    """Why a weight cannot be laid out so on this machine, or None."""
    if not has_bags():
        return "needs PyTorch's FBGEMM kernels, on x86-64 with AVX2"
    if weight.bits > 8:
        return f"takes up to 8 bits, not {weight.bits}"
    return None


@functools.cache
def has_bags() -> bool:
    """Whether this PyTorch has the vectorised kernel for this CPU."""
    vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and vectors and "fbgemm" in torch.backends.quantized.supported_engines


@functools.lru_cache(maxsize=64)
def _counting(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


def pack(weight: QuantizedWeight) -> Bags:
    """Lay a weight out; bits <= 8."""
    N, K = weight.shape_nk
    R = weight.scale_NR.shape[1]
    width = -(-N // (8 * -(-N // CHUNK))) * 8  # at most CHUNK, with little padding
    C = -(-N // width)
    middle = 2 ** (weight.bits - 1)
    groups_K = weight.groups_K()
    code_NK, order_K = weight.code_NK, torch.empty(0, dtype=torch.int64)
    if weight.group_of_K is not None:
        order_K = torch.argsort(groups_K, stable=True)
        code_NK = code_NK[:, order_K]
    padded = F.pad(code_NK, (0, 0, 0, C * width - N), value=middle)
    ending = torch.tensor([1.0, -middle]).view(torch.uint8).expand(C, K, _ENDING_BYTES)
    table = torch.cat([padded.view(C, width, K).transpose(1, 2), ending], dim=2)
    starts_R = torch.bincount(groups_K, minlength=R).cumsum(0)
    starts_CR = torch.arange(C)[:, None] * K + starts_R
    shift = torch.empty(0)
    if weight.zero_NR is not None:
        shift = _by_chunk(middle - weight.zero_NR.float(), width)
    return Bags(
        table=table.reshape(C * K, -1),
        index=_counting(C * K),
        offsets=F.pad(starts_CR.flatten(), (1, 0)).to(torch.int32),
        scale_CRc=_by_chunk(weight.scale_NR.float(), width),
        shift_CRc=shift,
        order_K=order_K,
    )


def _by_chunk(value_NR: torch.Tensor, width: int) -> torch.Tensor:
    N, R = value_NR.shape
    padded = F.pad(value_NR, (0, 0, 0, -N % width))
    return padded.view(-1, width, R).transpose(1, 2).contiguous()


def multiply(act_1K: torch.Tensor, bags: Bags, n: int) -> torch.Tensor:
    """out_1N in fp32 of one row."""
    if (scratch := getattr(_of_thread, "scratch", None)) is None:
        scratch = _of_thread.scratch = {}
    return row_function(bags, n, scratch)(act_1K.float())


def row_function(
    bags: Bags, n: int, scratch: dict[tuple[int, int], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x_1K fp32 -> out_1N fp32, with as few operations as will do, for whoever calls it often.

    scratch: the callers' own memory for spread activations, shared by layers of a size; two calls
    on one scratch must not overlap.
    """
    table, index, offsets, scale_CRc, shift_CRc, order_K = bags
    (C, R, width), K = scale_CRc.shape, index.numel() // len(scale_CRc)
    bag = torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default
    if (C, K) not in scratch:
        scratch[C, K] = torch.empty(C, K)
    spread_CK, scale = scratch[C, K], scale_CRc.view(-1, width)
    weights, group_offsets = spread_CK.view(-1), offsets[: R + 1]
    symmetric, in_order, padded = not shift_CRc.numel(), not order_K.numel(), C * width != n

    def call(row_1K: torch.Tensor) -> torch.Tensor:
        if not in_order:
            row_1K = row_1K[:, order_K]
        spread_CK.copy_(row_1K)
        sums = bag(table, index, offsets, False, 0, False, weights, None, True)
        if not symmetric:
            per_group = _group_sums(row_1K, group_offsets)
            sums.view(C, R, width).addcmul_(per_group[:, None], shift_CRc)
        out_1N = sums.mul_(scale).view(C, R, width).sum(1).view(1, -1)
        return out_1N[:, :n] if padded else out_1N

    return call


def _group_sums(row_1K: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Sums of the activations of each group, [R]."""
    return torch.segment_reduce(row_1K[0], "sum", offsets=offsets, axis=0, initial=0)


def read_bytes(bags: Bags) -> int:
    """Bytes that `multiply` reads: all but the index, which layers share."""
    parts = (bags.table, bags.offsets, bags.scale_CRc, bags.shift_CRc, bags.order_K)
    return sum(math.prod(part.shape) * part.element_size() for part in parts)
