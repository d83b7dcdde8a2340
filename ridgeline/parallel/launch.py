"""Running a function on every rank: those that torchrun started, or processes of this machine that
are started here (no torchrun needed to try a layout on a laptop).

Started ones are forked on a CPU, which takes a second where starting anew takes many; CUDA does not
survive a fork, so with GPUs they are started anew.
"""

from __future__ import annotations

import multiprocessing as mp
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ridgeline.core import env
from ridgeline.core.errors import UserError, bad_value
from ridgeline.parallel import mesh

T = TypeVar("T")
_KINDS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "NotImplementedError": NotImplementedError,
    "UserError": UserError,
    "LayoutError": mesh.LayoutError,
}


def on_ranks(
    world_size: int, device: str, function: Callable[..., T], *args: Any, timeout_s: float = 600.0
) -> T:
    """function(device, *args) on every rank -> rank 0's result (under torchrun: this rank's own).

    Raises: what the first rank to fail raised; all others are ended. ValueError for more ranks than
    GPUs, UserError where there is none. Nothing is left running.
    """
    if env.world_size() > 1:
        own = mesh.start(device, timeout_s)
        result = function(own, *args)
        mesh.stop()
        return result
    if device == "cuda" and torch.cuda.device_count() == 0:
        raise UserError("layout: no CUDA device is usable here; use --device cpu")
    if device == "cuda" and world_size > torch.cuda.device_count():
        raise bad_value(
            "layout",
            "ranks",
            f"be at most the {torch.cuda.device_count()} GPUs here",
            world_size,
            "use torchrun on several nodes, or device cpu",
        )
    with tempfile.TemporaryDirectory() as folder:
        context: Any = mp.get_context("spawn" if device == "cuda" else "fork")
        store = Path(folder) / "store"
        ends: list[Connection] = []
        processes: list[BaseProcess] = []
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            place = (rank, world_size, device, str(store), timeout_s)
            process = context.Process(target=_rank, args=(place, there, function, args))
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        try:
            return _collect(ends)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(ends: list[Connection]) -> Any:
    """Rank 0's result, once every rank has one; the first failure is raised."""
    results: dict[int, Any] = {}
    waiting = {end: rank for rank, end in enumerate(ends)}
    while waiting:
        for ready in wait(list(waiting)):
            end = cast(Connection, ready)
            rank = waiting.pop(end)
            try:
                kind, value = end.recv()
            except EOFError:
                raise UserError(f"layout: rank {rank} died without a word") from None
            if kind != "ok":
                error = _KINDS.get(kind, UserError)
                raise error(value)
            results[rank] = value
    return results[0]


def _rank(
    place: tuple[int, int, str, str, float],
    end: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    rank, world_size, device, store, timeout_s = place
    try:
        own = mesh.start_local(rank, world_size, device, store, timeout_s)
        result = function(own, *args)
        end.send(("ok", result if rank == 0 else None))
        dist.barrier()  # nobody leaves while another still needs it
    except Exception as error:
        kind = type(error).__name__
        text = str(error) if kind in _KINDS else f"rank {rank}: {kind}: {error}"
        end.send((kind, text))
