"""`train` on several processes of this machine without torchrun: for the quickstart and to try
a layout.

They are forked from a server that has imported PyTorch and never run it, since forking a process
that has run autograd is not safe; the server starts once and costs seconds, a rank less than one.
Only for CPUs: CUDA does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import socket
import sys
import time
from multiprocessing.process import BaseProcess

from ridgeline.core import env
from ridgeline.core.errors import UserError, bad_value
from ridgeline.train.config import TrainConfig
from ridgeline.train.trainer import train


def train_here(config: TrainConfig, *, stop_at_step: int | None = None) -> None:
    """Run a training on config.layout.world_size processes and wait for it.

    What it did is in the run folder (metrics.jsonl, checkpoints, model).
    Raises: ValueError for a device that is not cpu; UserError where a rank fails, whose reason is
    on stderr; all ranks are ended then.
    """
    if config.device != "cpu":
        raise bad_value("train", "device", "be cpu", config.device, "use torchrun for GPUs")
    size = config.layout.world_size
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ridgeline.train.launch"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks: list[BaseProcess] = [
        context.Process(target=_rank, args=(rank, size, port, config, stop_at_step))
        for rank in range(size)
    ]
    try:
        for process in ranks:
            process.start()
        _wait(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _wait(ranks: list[BaseProcess]) -> None:
    while True:
        codes = [process.exitcode for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            raise UserError(
                f"train: rank {failed[0]} ended with exit code {codes[failed[0]]}; its reason is "
                "above"
            )
        if all(code == 0 for code in codes):
            return
        time.sleep(0.05)


def _rank(rank: int, size: int, port: int, config: TrainConfig, stop_at_step: int | None) -> None:
    env.join_ranks(rank, size, port)
    try:
        train(config, stop_at_step=stop_at_step)
    except (UserError, ValueError) as error:
        if rank == 0:
            print(f"ridgeline: {error}", file=sys.stderr)
        sys.exit(1)
