"""Process groups and meshes of a layout, and failing together.

    base mesh   pp x replicate x shard x tp      FSDP takes (replicate, shard)
    shard       dp_shard x cp (context ranks hold the same parameters and other tokens: they shard
                them like data ranks); with zero = 0: 1, and replicate = dp x cp

An error that only some ranks see would leave the others waiting in a collective: `together`
runs a check on every rank and lets all of them raise the first rank's error.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ridgeline.core.errors import UserError
from ridgeline.parallel.layout import AXES, Layout

T = TypeVar("T")
_BASE = ("pp", "replicate", "shard", "tp")


class LayoutError(UserError):
    """What another rank found wrong; rank 0's process is the one that says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This rank's place in a layout."""

    layout: Layout
    device: torch.device
    base: DeviceMesh
    """pp x replicate x shard x tp."""
    context: dist.ProcessGroup | None
    """The ranks that share this rank's sequences, None for one."""
    rank: int
    pp_rank: int
    dp_rank: int
    """Which samples: ranks of equal dp_rank read the same."""
    cp_rank: int
    tp_rank: int

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which talks to people."""
        return self.rank == 0

    @property
    def data_mesh(self) -> DeviceMesh:
        """What FSDP shards over: (replicate, shard)."""
        return self.base["replicate", "shard"]

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same parameters or shards of them."""
        return self.layout.dp * self.layout.cp

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The group of an axis (pp, tp, cp), None where it has one rank."""
        if axis == "cp":
            return self.context
        return self.base.get_group(axis) if getattr(self.layout, axis) > 1 else None

    def close(self) -> None:
        """Give back the groups (another layout is to be built in the same processes)."""
        groups = [self.base.get_group(axis) for axis in _BASE]
        groups += [] if self.context is None else [self.context]
        for group in groups:
            if group is not dist.group.WORLD:  # one axis may be everybody
                dist.destroy_process_group(group)


def start(device: str, timeout_s: float = 600.0) -> torch.device:
    """Join the processes that torchrun started: NCCL for cuda, gloo for cpu. Returns this rank's
    device.

    Raises: UserError where this rank has no GPU.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    if device == "cuda":
        own = torch.device("cuda", distributed_c10d.get_node_local_rank(0))
        if torch.cuda.device_count() <= own.index:
            raise UserError(
                f"layout: local rank {own.index} must have a GPU of its own, got "
                f"{torch.cuda.device_count()} GPUs here; start fewer processes a node, or use "
                "--device cpu"
            )
        torch.cuda.set_device(own)
        dist.init_process_group("nccl", timeout=timeout, device_id=own)
        open_backward_thread(own)
        return own
    dist.init_process_group("gloo", timeout=timeout)
    return torch.device("cpu")


def start_local(
    rank: int, world_size: int, device: str, store: str, timeout_s: float
) -> torch.device:
    """Join processes of one machine that meet at a file (launch.py); one thread each on a CPU."""
    timeout = datetime.timedelta(seconds=timeout_s)
    own = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(own)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=None if device == "cpu" else own,
    )
    open_backward_thread(own)
    return own


def open_backward_thread(device: torch.device) -> None:
    """Give autograd's thread of a GPU its CUDA context by a first kernel.

    Backward passes run in a thread of their own for each GPU, which has no context until a kernel
    is launched there. Where its first one is a matrix product (a pipeline's first stages, whose
    loss is elsewhere) cuBLAS finds none and warns.
    """
    if device.type == "cuda":
        torch.ones((), device=device, requires_grad=True).exp().backward()


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """A rank's index on each axis."""
    found: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, found[axis] = divmod(rank, getattr(layout, axis))
    return found


def build_world(layout: Layout, device: torch.device) -> World:
    """Make the groups of a layout; every rank of the process group calls it, sizes checked before
    (layout.check_layout)."""
    shard = 1 if layout.zero == 0 else layout.dp_shard * layout.cp
    replicate = layout.dp * layout.cp // shard
    base = init_device_mesh(
        device.type, (layout.pp, replicate, shard, layout.tp), mesh_dim_names=_BASE
    )
    rank = dist.get_rank()
    at = coordinates(layout, rank)
    return World(
        layout=layout,
        device=device,
        base=base,
        context=_context_group(layout, rank),
        rank=rank,
        pp_rank=at["pp"],
        dp_rank=at["dp_replicate"] * layout.dp_shard + at["dp_shard"],
        cp_rank=at["cp"],
        tp_rank=at["tp"],
    )


def _context_group(layout: Layout, rank: int) -> dist.ProcessGroup | None:
    """One group for each set of ranks that differ in cp alone; all ranks make all of them."""
    if layout.cp == 1:
        return None
    own: dist.ProcessGroup | None = None
    for first in range(layout.world_size):
        if coordinates(layout, first)["cp"] == 0:
            ranks = [first + layout.tp * i for i in range(layout.cp)]
            group = dist.new_group(ranks)
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                own = group
    return own


def together(check: Callable[[], T]) -> T:
    """Run a check on every rank; where any rank's raised, every rank raises.

    The rank that failed raises its own error, the others the lowest failing rank's (ValueError and
    NotImplementedError as such, everything else as LayoutError).
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = check()
    except Exception as caught:  # told to the others before it is raised again
        error = caught
    if dist.is_initialized() and dist.get_world_size() > 1:
        found: list[tuple[str, str] | None] = [None] * dist.get_world_size()
        own = None if error is None else (type(error).__name__, str(error))
        dist.all_gather_object(found, own)
        first = next((entry for entry in found if entry is not None), None)
        if error is None and first is not None:
            kinds = {"ValueError": ValueError, "NotImplementedError": NotImplementedError}
            raise kinds.get(first[0], LayoutError)(first[1])
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def same_everywhere(name: str, value: str) -> None:
    """Refuse a value that differs between ranks (a config's hash): they would train apart.

    Raises: LayoutError on every rank, naming the first rank that differs from rank 0.
    """
    if not dist.is_initialized():
        return
    values: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(values, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise LayoutError(
                f"layout: {name} must be the same on every rank, got {values[0]} on rank 0 and "
                f"{other} on rank {rank}; start every rank with the same config and flags"
            )
