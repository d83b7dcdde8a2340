"""Several processes that calibrate together: each runs its share of the batches, Hessians are
summed, and every process then solves the same layers alike.

Batches go to ranks in turn. A batch's X^T X does not depend on the number of ranks, and they are
summed in fp64, so that the order of the sum changes nothing that fp32 shows: the result is that of
one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ridgeline.core import env

Item = TypeVar("Item")


class Ranks:
    """This process's place among `world` processes; one process needs no torch.distributed."""

    def __init__(self, rank: int = 0, world: int = 1, device: torch.device | str = "cpu") -> None:
        """device: what the processes talk through, of this one."""
        self.rank, self.world, self.device = rank, world, torch.device(device)

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Meet the other processes that torchrun started (gloo on a CPU, NCCL on GPUs); device:
        this one's, with its index."""
        if env.world_size() == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This rank's items: every world-th."""
        return list(items[self.rank :: self.world])

    def sum_(self, tensor: torch.Tensor) -> None:
        """Add up over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)

    def agree(
        self, vector: torch.Tensor | None, length: int, device: torch.device
    ) -> torch.Tensor | None:
        """Rank 0's vector (or None) on every rank."""
        if self.world == 1:
            return vector
        held = torch.zeros(length + 1, dtype=torch.float32, device=device)
        if vector is not None:
            held[0], held[1:] = 1.0, vector
        dist.broadcast(held, 0)
        return held[1:] if bool(held[0]) else None

    def wait(self) -> None:
        """Until every rank is here."""
        if self.world > 1:
            dist.barrier()

    def leave(self) -> None:
        """End the process group."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()
