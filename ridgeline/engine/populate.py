"""Memory that the system gives only when it is first written: have it earlier."""

from __future__ import annotations

import ctypes
import mmap
import sys

MADV_POPULATE_WRITE = 23
"""Of Linux 5.14 and later: pages are made as by a write, what is in them stays."""
STRIDE = 2**24
"""Bytes a call: the process's other page faults need not wait long."""


def populate(address: int, size: int) -> bool:
    """Have the whole pages of [address, address + size); what is there stays, also what others
    write meanwhile. False where the system cannot do that."""
    if sys.platform != "linux":
        return False
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in range(first, end, STRIDE):
        if madvise(start, min(STRIDE, end - start), MADV_POPULATE_WRITE):
            return False
    return True
