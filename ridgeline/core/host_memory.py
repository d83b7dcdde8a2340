"""Freed memory that stays with the process.

glibc gives every large block back to the kernel when it is freed and asks for it again at the next
tensor, and each of its pages is then faulted in and zeroed anew. A loop that makes the same
temporaries over and over (calibration, evaluation on a CPU) spends a fifth of its time there.
"""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
"""Parameters of mallopt (malloc.h)."""


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed, in one heap, from now on; False where there is no glibc.

    For programs, not for libraries: the process keeps its peak until it ends.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    wanted = {_ARENA_MAX: 1, _MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 * 2**20}
    return all([mallopt(ctypes.c_int(key), ctypes.c_int(value)) for key, value in wanted.items()])


def give_back_freed_memory() -> None:
    """Return to the system, once, what malloc holds and nobody uses: after something large that
    will not come again (a text that was tokenized). Nothing happens where there is no glibc."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
