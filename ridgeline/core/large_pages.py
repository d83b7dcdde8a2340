"""Tensors in large pages of memory.

A core finds memory through a small table of pages and fetches ahead within a page only. Weights
that are read once from end to end cross a page every 4 KiB; Linux gives pages of 2 MiB to whoever
asks (transparent huge pages, by default for those that ask only), so large tensors lie side by side
in blocks that were asked for so. Reading 2048 x 2048 byte codes from memory by two threads of an
EPYC (AVX2), 2026-11-30: 249 to 297 us, in small pages 326 to 361.
"""

from __future__ import annotations

import mmap
import sys
import threading
from dataclasses import dataclass

import torch

LARGE_PAGE = 2**21
LEAST_BYTES = 2**16
"""Of a tensor that is worth it."""
BLOCK_BYTES = 2**24
"""Asked for at a time, by tensors that take less."""
_ALIGN = 64


@dataclass(slots=True)
class _Block:
    """Memory that lives as long as a tensor in it."""

    memory: mmap.mmap
    start: int
    """Of what is not taken, a multiple of _ALIGN."""


class _Current(threading.local):
    block: _Block | None = None


_current = _Current()


def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies in large pages; the tensor itself where it is small or not a CPU's, or where
    the system has none."""
    size = tensor.numel() * tensor.element_size()
    if size < LEAST_BYTES or tensor.device.type != "cpu" or sys.platform != "linux":
        return tensor
    block = _current.block
    if block is None or block.start + size > len(block.memory):
        block = _new_block(size)
        if block is None:
            return tensor
        _current.block = block
    start, block.start = block.start, -(-(block.start + size) // _ALIGN) * _ALIGN
    with torch.inference_mode(False):  # else nobody outside that mode could use it
        flat = torch.frombuffer(
            block.memory, dtype=tensor.dtype, count=tensor.numel(), offset=start
        )
    return flat.view(tensor.shape).copy_(tensor)


def _new_block(size: int) -> _Block | None:
    whole = -(-max(size, BLOCK_BYTES) // LARGE_PAGE) * LARGE_PAGE
    memory = mmap.mmap(-1, whole + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return None
    address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    return _Block(memory, -address % LARGE_PAGE)
