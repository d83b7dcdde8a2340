"""Independent pieces of work on all cores of a CPU.

What a single thread of PyTorch splits over cores are large operations; searches are made of many
small ones. So pieces run beside each other instead, each on one core. A piece's result does not
depend on what runs beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


def run_together(
    pieces: Sequence[Callable[[], Result]], device: torch.device | str
) -> list[Result]:
    """The results of all pieces, in their order; without gradients. On a GPU one after another."""
    threads = min(torch.get_num_threads(), len(pieces))
    if torch.device(device).type != "cpu" or threads < 2:
        with torch.no_grad():
            return [piece() for piece in pieces]
    before = torch.get_num_threads()

    def alone(piece: Callable[[], Result]) -> Result:
        torch.set_num_threads(1)  # of this thread, and of threads that are new
        with torch.no_grad():
            return piece()

    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(alone, pieces))
    finally:
        torch.set_num_threads(before)
