"""A few rows of activations times a quantized weight, as bags of embeddings.

    out[m, n] = sum_r scale[n, r] * sum_{k in r} act[m, k] (code[n, k] - zero[n, r])

The inner sums are what FBGEMM's 8-bit embedding bag computes (it is part of PyTorch on x86): the
embedding of input k is the codes of all outputs, a group of inputs is a bag, the activations are
its weights. Codes are kept as bytes, up to CHUNK outputs side by side for all inputs before the
next ones, so that memory is read in order, once for all rows; a row ends in the two floats 1 and
-z that the kernel multiplies and adds (z: the middle code).

    table[chunk slots + slot] = codes of the chunk's outputs of the input in that slot, then 1.0, -z

Zero points are taken off the codes at load; where a byte cannot hold the difference (8 bits) they
are one more input of each group: its codes are the group's zero points, its activation minus the
sum of the group's. Any width up to 8 bits, group size, scale dtype, zero point and
act-order; inputs are sorted by group at load, so groups of uneven size are bags of uneven size.
Bound by N K (1 + 8 / CHUNK) bytes. Numerics: everything in fp32, the scale multiplies the group's
sum; one-hot activations give scale * (code - zero) rounded once.
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

from ridgeline.core.large_pages import in_large_pages
from ridgeline.formats.base import QuantizedWeight

CHUNK = 96
"""Most outputs side by side: twelve vectors of AVX2, one pass of the kernel. Microseconds for 576 x
3072 from memory, one thread of a busy EPYC (AVX2), 2026-11-30: 567 to 592 for 96 to 192, 855 for
256, 1,628 for whole rows, 861 for PyTorch's int4 kernel, 1,627 for the bf16 linear."""
ROWS_TOGETHER = 4
"""Most rows that one pass over the table serves; indices and spread activations are as many
times as large."""
_ENDING_BYTES = 8
_of_thread = threading.local()
"""`scratch`: memory that is asked for anew costs page faults, a third of a call."""

Sizes = tuple[int, int, int, int, int]
"""C, M, S, c, N of a product."""


class Kept(NamedTuple):
    """A product's memory, with the views of it that a call wants: each costs some 10 us there,
    where streams of weights have thrown PyTorch's code out of the cache."""

    spread_CMS: torch.Tensor
    """The activations side by side for every chunk, fp32."""
    spread: torch.Tensor
    """The same, flat."""
    out_CMc: torch.Tensor
    row_1N: torch.Tensor
    """The same memory without padding, if it is for one row."""


Scratch = dict[Sizes, Kept]
"""Two calls on one must not overlap, and a result is there until the next."""


class Bags(NamedTuple):
    """A weight as bags; C chunks of c outputs, R groups, S slots: an input each, and one a group
    where zero points are apart."""

    table: torch.Tensor
    """uint8 [C S, c + 8]."""
    index: torch.Tensor
    """int32 [C S], 0, 1, ...: shared by layers of a size."""
    offsets: torch.Tensor
    """int32 [C R + 1], where each bag starts."""
    scale_CRc: torch.Tensor
    """fp32; 0 for outputs that are padding."""
    sizes_R: torch.Tensor
    """int64, inputs of each group."""
    order_K: torch.Tensor
    """The inputs sorted by group; empty: they are."""

    @property
    def has_zeros(self) -> bool:
        """Whether a group has a slot for its zero points."""
        slots = self.index.numel() // len(self.scale_CRc)
        return slots != int(self.sizes_R.sum())


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
    return in_large_pages(torch.arange(count, dtype=torch.int32))


def pack(weight: QuantizedWeight) -> Bags:
    """Lay a weight out; bits <= 8."""
    N, K = weight.shape_nk
    R = weight.scale_NR.shape[1]
    width = -(-N // (8 * -(-N // CHUNK))) * 8  # at most CHUNK, with little padding
    C = -(-N // width)
    groups_K = weight.groups_K()
    code_NS, zero_NR, middle = _codes(weight, groups_K)
    order_K = torch.empty(0, dtype=torch.int64)
    if weight.group_of_K is not None:
        order_K = torch.argsort(groups_K, stable=True)
        code_NS = code_NS[:, order_K]
    sizes_R = slots_R = torch.bincount(groups_K, minlength=R)
    if zero_NR is not None:
        slots_R = sizes_R + 1
        codes = torch.cat([code_NS, zero_NR], dim=1)
        code_NS = codes[:, _interleaved(sizes_R)]
    S = code_NS.shape[1]
    padded = F.pad(code_NS, (0, 0, 0, C * width - N), value=middle)
    ending = torch.tensor([1.0, -middle]).view(torch.uint8).expand(C, S, _ENDING_BYTES)
    table = torch.cat([padded.view(C, width, S).transpose(1, 2), ending], dim=2)
    starts_CR = torch.arange(C)[:, None] * S + slots_R.cumsum(0)
    return Bags(
        table=in_large_pages(table.reshape(C * S, -1)),
        index=_counting(C * S),
        offsets=F.pad(starts_CR.flatten(), (1, 0)).to(torch.int32),
        scale_CRc=in_large_pages(_by_chunk(weight.scale_NR.float(), width)),
        sizes_R=sizes_R,
        order_K=order_K,
    )


def _codes(
    weight: QuantizedWeight, groups_K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Bytes [N, K], the zero points that are not in them, what the kernel takes off: with up to 7
    bits a byte holds 2^bits + code - zero, so that zero points cost nothing."""
    if weight.zero_NR is None:
        return weight.code_NK, None, 2 ** (weight.bits - 1)
    zero_NR = weight.zero_NR.to(torch.uint8)
    if weight.bits > 7:
        return weight.code_NK, zero_NR, 2 ** (weight.bits - 1)
    middle = 2**weight.bits
    return weight.code_NK + (middle - zero_NR)[:, groups_K], None, middle


def _interleaved(sizes_R: torch.Tensor) -> torch.Tensor:
    """Each group's inputs, then its number after all inputs."""
    group_K = torch.repeat_interleave(torch.arange(len(sizes_R)), sizes_R)
    return torch.argsort(torch.cat([group_K, torch.arange(len(sizes_R))]), stable=True)


def _by_chunk(value_NR: torch.Tensor, width: int) -> torch.Tensor:
    N, R = value_NR.shape
    padded = F.pad(value_NR, (0, 0, 0, -N % width))
    return padded.view(-1, width, R).transpose(1, 2).contiguous()


def scratch_of(scratch: Scratch, sizes: Sizes) -> Kept:
    """A product's memory, made where there is none."""
    if (found := scratch.get(sizes)) is None:
        C, M, S, width, n = sizes
        with torch.inference_mode(False):  # else nobody outside that mode could write to it
            spread_CMS, out_CMc = torch.empty(C, M, S), torch.empty(C, M, width)
            row_1N = out_CMc[:, 0].reshape(1, -1)[:, :n]
            found = scratch[sizes] = Kept(spread_CMS, spread_CMS.view(-1), out_CMc, row_1N)
    return found


def kept_of_thread(sizes: Sizes) -> Kept:
    """The calling thread's memory for products of these sizes."""
    try:
        return _of_thread.scratch[sizes]
    except (AttributeError, KeyError):
        return scratch_of(_of_thread.__dict__.setdefault("scratch", {}), sizes)


@functools.lru_cache(maxsize=16)
def _index(chunks: int, rows: int, slots: int) -> torch.Tensor:
    """The slots of each chunk once for every row."""
    once = torch.arange(chunks * slots, dtype=torch.int32).view(chunks, 1, slots)
    return once.expand(chunks, rows, slots).reshape(-1)


def _starts(bags: Bags, rows: int) -> torch.Tensor:
    """Where each bag starts, chunk by chunk and row by row in it."""
    C, R, _ = bags.scale_CRc.shape
    if rows == 1:
        return bags.offsets
    S = bags.index.numel() // C
    first = torch.arange(C * rows, dtype=torch.int32)[:, None] * S
    last = torch.tensor([C * rows * S], dtype=torch.int32)
    return torch.cat([(first + bags.offsets[:R]).flatten(), last])


class Rows:
    """The product of a number of rows with a weight, prepared for whoever asks often: as few
    operations and views as will do.

    What is large is written and read by operators that give a thread the same part of it as the
    bags do: on one thread, the rest of the call took twice as long (the other core's cache).
    """

    def __init__(self, bags: Bags, n: int, rows: int) -> None:
        (C, R, width), S = bags.scale_CRc.shape, bags.index.numel() // len(bags.scale_CRc)
        self.sizes: Sizes = C, rows, S, width, n
        """Of the memory that a call wants."""
        self._table, self._order_1K = bags.table, bags.order_K[None]
        self._index = bags.index if rows == 1 else _index(C, rows, S)
        self._starts = _starts(bags, rows)
        self._in_order, self._one_group = not bags.order_K.numel(), R == 1
        self._sums_shape, self._scale = (C, rows, R, width), bags.scale_CRc[:, None]
        self._ones_C1R = None
        if R == 1:
            self._sums_shape, self._scale = (C, rows, width), bags.scale_CRc
        elif rows == 1:
            self._sums_shape, self._scale = (C, R, width), bags.scale_CRc
            self._ones_C1R = torch.ones(C, 1, R)
        self._with_zeros = _with_group_sums(bags, rows) if bags.has_zeros else None
        self._bag = torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default

    @property
    def is_plain(self) -> bool:
        """Whether the slots of a chunk are the inputs as they come: a caller may spread them."""
        return self._in_order and self._with_zeros is None

    def __call__(self, x_MK: torch.Tensor, kept: Kept | None = None) -> torch.Tensor:
        """out_MN fp32 of x_MK in any float dtype, perhaps in the kept memory (default: the calling
        thread's): it is there until the next call on it."""
        if kept is None:
            kept = kept_of_thread(self.sizes)
        if not self._in_order:
            x_MK = _in_order(x_MK, self._order_1K)
        if self._with_zeros is not None:
            x_MK = self._with_zeros(x_MK)
        kept.spread_CMS.copy_(x_MK)
        self.of_spread(kept.spread, kept.out_CMc)
        _, M, _, _, n = self.sizes
        return kept.row_1N if M == 1 else _by_row(kept.out_CMc)[:, :n]

    def alone(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """x_MK -> out_MN in x's dtype, in memory of its own: the fewest steps between the operators
        (5 to 10 % of a call beside `__call__` in a chain of functions)."""
        sizes, shape, one_group = self.sizes, self._sums_shape, self._one_group
        _, M, _, _, n = sizes
        tables, scale, bag = (self._table, self._index, self._starts), self._scale, self._bag
        order_1K = None if self._in_order else self._order_1K
        with_zeros, ones_C1R = self._with_zeros, self._ones_C1R
        mul, total, bmm = torch.mul, torch.sum, torch.bmm

        def call(x_MK: torch.Tensor) -> torch.Tensor:
            spread_CMS, spread, out_CMc, row_1N = kept_of_thread(sizes)
            x = x_MK
            if order_1K is not None:
                x = _in_order(x, order_1K)
            if with_zeros is not None:
                x = with_zeros(x)
            spread_CMS.copy_(x)
            parts = bag(*tables, False, 0, False, spread, None, True).view(shape)
            if ones_C1R is not None:  # as a product, 8 to 14 us faster than as a sum
                bmm(ones_C1R, parts.mul_(scale), out=out_CMc)
            elif one_group:
                mul(parts, scale, out=out_CMc)
            else:
                total(parts.mul_(scale), 2, out=out_CMc)
            out_MN = row_1N if M == 1 else _by_row(out_CMc)[:, :n]
            return x_MK.new_empty(M, n).copy_(out_MN)

        return call

    def of_spread(self, weights: torch.Tensor, out_CMc: torch.Tensor) -> None:
        """The outputs of spread activations [C M S]."""
        sums = self._bag(
            self._table, self._index, self._starts, False, 0, False, weights, None, True
        )
        parts = sums.view(self._sums_shape)
        if self._one_group:
            torch.mul(parts, self._scale, out=out_CMc)
        elif self._ones_C1R is not None:
            torch.sum(parts.mul_(self._scale), 1, True, out=out_CMc)
        else:
            torch.sum(parts.mul_(self._scale), 2, out=out_CMc)


def _in_order(x_MK: torch.Tensor, order_1K: torch.Tensor) -> torch.Tensor:
    if x_MK.shape[0] == 1:
        return torch.take(x_MK, order_1K)  # of bf16 cheaper than `index_select`
    return torch.index_select(x_MK, 1, order_1K[0])


def _by_row(out_CMc: torch.Tensor) -> torch.Tensor:
    return out_CMc.transpose(0, 1).reshape(out_CMc.shape[1], -1)


def _with_group_sums(bags: Bags, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """x_MK sorted by group -> x_MS: behind each group's inputs minus their sum.

    The result is the calling thread's until its next call."""
    sizes_R, R = bags.sizes_R, len(bags.sizes_R)
    size = int(sizes_R[0])
    if size and bool((sizes_R == size).all()):
        minus, shape = torch.full((size,), -1.0), (rows * R, size)

        def even(x_MK: torch.Tensor) -> torch.Tensor:
            x_MS, inputs, sums = _with_sums(rows, R, size)
            inputs.copy_(x_MK.view(shape))
            torch.mv(inputs, minus, out=sums)
            return x_MS

        return even
    order_S = _interleaved(sizes_R)
    starts = F.pad(sizes_R.cumsum(0), (1, 0))

    def uneven(x_MK: torch.Tensor) -> torch.Tensor:
        x_MK = x_MK.float()
        sums = [torch.segment_reduce(x, "sum", offsets=starts, axis=0, initial=0) for x in x_MK]
        return torch.index_select(torch.cat([x_MK, -torch.stack(sums)], dim=1), 1, order_S)

    return uneven


def _with_sums(rows: int, groups: int, size: int) -> tuple[torch.Tensor, ...]:
    """The calling thread's activations with a sum behind each group: (x_MS, the inputs, the sums),
    views of one memory. Made anew, they cost as much as filling them."""
    if (made := getattr(_of_thread, "with_sums", None)) is None:
        made = _of_thread.with_sums = {}
    if (found := made.get((rows, groups, size))) is None:
        with torch.inference_mode(False):
            x = torch.empty(rows * groups, size + 1)
            found = made[rows, groups, size] = (x.view(rows, -1), x[:, :size], x[:, size])
    return found


def read_bytes(bags: Bags) -> int:
    """Bytes that `multiply` reads: all but the index, which layers share."""
    parts = [part for name, part in zip(Bags._fields, bags, strict=True) if name != "index"]
    return sum(math.prod(part.shape) * part.element_size() for part in parts)
