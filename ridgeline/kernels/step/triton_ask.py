"""Weights asked for early: their bytes come to the L2 cache while nothing else wants the memory.

A step of few sequences is a chain of small waits: a norm or an attention of one token takes some
microseconds in which the memory idles, and the matmul behind it, even when it starts early
(programmatic dependent launch), asks only for what its rings hold. So the kernels between matmuls
ask for more of what comes next, all programs a share, before they wait for the previous kernel.

Nothing is read into registers or written: a result cannot depend on it, and what is evicted again
or never used costs bytes alone. How much pays is measured where it runs (engine/graphs.py). Hopper
and later. Source: PTX ISA, "cp.async.bulk.prefetch".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MOST = 4
"""Tensors that one kernel can ask for."""
_BULK = tl.constexpr(
    "{\n .reg .pred p;\n setp.ne.s32 p, $2, 0;\n"
    " @p cp.async.bulk.prefetch.L2.global [$1], $2;\n mov.b32 $0, 0;\n}"
)
_LINE = tl.constexpr(
    "{\n .reg .pred p;\n setp.ne.s32 p, $2, 0;\n @p prefetch.global.L2 [$1];\n mov.b32 $0, 0;\n}"
)
LINE_BYTES = tl.constexpr(128)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a kernel asks for: bytes (uint8, contiguous, starting at a multiple of 16), the most
    wanted first, at most MOST tensors."""

    parts: tuple[torch.Tensor, ...] = ()
    piece: int = 512
    """Bytes a request, a multiple of 16; LINE_BYTES: by plain prefetches of one line each."""

    def arguments(self, other: torch.Tensor) -> tuple[object, ...]:
        """Pointers and sizes of a kernel; `other` in the place of those that there are not."""
        empty = MOST - len(self.parts)
        sizes = [part.numel() for part in self.parts]
        return (*self.parts, *[other] * empty, *sizes, *[0] * empty)


NOTHING = Asked()


@triton.jit
def ask_lines(address, wanted):
    """One line each: int64 addresses, and whether they are wanted."""
    tl.inline_asm_elementwise(
        _LINE, "=r,l,r", [address, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _ask_part(ptr, size, worker, workers, THREADS: tl.constexpr, PIECE: tl.constexpr):
    lanes = tl.arange(0, THREADS)
    address = ptr.to(tl.int64)
    for start in range(0, size, workers * THREADS * PIECE):
        at = start + (lanes * workers + worker) * PIECE
        if PIECE == LINE_BYTES:
            ask_lines(address + at, at < size)
        else:
            count = tl.minimum(tl.maximum(size - at, 0), PIECE)
            tl.inline_asm_elementwise(
                _BULK, "=r,l,r", [address + at, count], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def ask(
    parts, worker, workers, COUNT: tl.constexpr, THREADS: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """A worker's share of what there is to ask for: parts = (pointers, sizes) as Asked.arguments;
    COUNT of them are there; THREADS: of a program."""
    p0, p1, p2, p3, n0, n1, n2, n3 = parts
    if COUNT > 0:
        _ask_part(p0, n0, worker, workers, THREADS, PIECE)
    if COUNT > 1:
        _ask_part(p1, n1, worker, workers, THREADS, PIECE)
    if COUNT > 2:
        _ask_part(p2, n2, worker, workers, THREADS, PIECE)
    if COUNT > 3:
        _ask_part(p3, n3, worker, workers, THREADS, PIECE)
