"""The other ranks of a tensor-parallel engine, as processes of this machine that rank 0 starts.

Each is told what to run over its standard input (msgpack, never pickle) and ends when that closes,
so none outlives rank 0, however rank 0 ends. They meet at a file in a folder that is this user's
alone and talk over the loopback interface: nothing listens to other machines. A rank that ends
while it is needed is noticed at once, also when nothing runs, and its reason is told.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from ridgeline.core.errors import UserError
from ridgeline.engine import tp
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.limits import Limits

END_S = 10.0
"""How long a rank may take to end by itself."""
MAX_ORDER_BYTES = 1 << 20


class LocalGroup(tp.Group):
    """A group of ranks that rank 0 started."""

    def __init__(
        self, rank: int, ranks: int, device: torch.device, meet: Callable[[str], None]
    ) -> None:
        self._meet = meet
        super().__init__(rank, ranks, device)

    def meet(self) -> None:
        self._meet("loaded")


class Workers:
    """Ranks 1 .. of an engine."""

    def __init__(self, folder: Path, config: EngineConfig, device: torch.device) -> None:
        self.ranks = config.tensor_parallel
        if dist.is_initialized():
            raise UserError(
                "engine: tensor_parallel must be 1 in a process that has a process group already, "
                f"got {self.ranks}; close the other engine, or start the ranks with torchrun"
            )
        self._ending, self._on_cpu = False, device.type == "cpu"
        self._threads = torch.get_num_threads()
        self._folder = Path(tempfile.mkdtemp(prefix="ridgeline-ranks-"))
        self._reasons: dict[int, str] = {}
        self._lost = threading.Event()
        self.on_loss: Callable[[str], None] | None = None
        """Called once, on a thread of its own, when a rank ends that should not."""
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, self.ranks):
                self._start(rank, folder, config, device)
            if device.type == "cpu":  # the ranks share the cores
                torch.set_num_threads(max(1, self._threads // self.ranks))
            self._wait_for("started")
            tp.join(0, self.ranks, self._folder / "meeting", device)
            self.group = LocalGroup(0, self.ranks, tp.on_rank(device, 0), self._wait_for)
        except BaseException:
            self.end()
            raise

    def _start(self, rank: int, folder: Path, config: EngineConfig, device: torch.device) -> None:
        order = {
            "rank": rank,
            "folder": str(folder.resolve()),
            "meeting": str(self._folder),
            "device": device.type,
            "threads": max(1, self._threads // self.ranks),
            "config": dataclasses.asdict(config),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "ridgeline.engine.tp_worker"],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for rank 0, which lets the others go
        )
        self.processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed below
            process.stdin.write(pack_order(order))
        watching = threading.Thread(target=self._watch, args=(rank, process), daemon=True)
        watching.start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._ending:
            return
        self._reasons[rank] = f"rank {rank} {self._why(rank, code)}"
        first = not self._lost.is_set()
        self._lost.set()
        if first and self.on_loss is not None:
            self.on_loss(self._reasons[rank])

    def _why(self, rank: int, code: int) -> str:
        said = self._folder / f"failed.{rank}"
        if said.is_file():
            return f"failed: {said.read_text(encoding='utf-8')}"
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"was killed by {names.get(-code, f'signal {-code}')}"
        return f"ended with status {code}"

    def why(self, within_s: float = 0.0) -> str | None:
        """Why a rank is gone, if one is (or is within so many seconds)."""
        if not self._lost.wait(within_s):
            return None
        return next(iter(self._reasons.values()))

    def _wait_for(self, word: str) -> None:
        """Until every rank has said a word. Raises: UserError with the reason of one that ended."""
        waited = [self._folder / f"{word}.{rank}" for rank in range(1, self.ranks)]
        while not all(path.exists() for path in waited):
            if (why := self.why(0.02)) is not None:
                raise UserError(f"engine: {why}")

    def end(self, told: bool = False) -> None:
        """End the processes: by themselves where they were told to stop, else by force."""
        self._ending = True
        lost = self._lost.is_set()
        if told and not lost:
            tp.leave(END_S)
        until_s = time.monotonic() + (END_S if told else 0.0)
        for process in self.processes:
            try:
                process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        torch.set_num_threads(self._threads)
        if self._on_cpu or not lost:
            tp.leave(END_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def pack_order(order: dict[str, Any]) -> bytes:
    """What a process is to run, as bytes with their length before them."""
    packed = msgpack.packb(order)
    assert isinstance(packed, bytes)
    return len(packed).to_bytes(4, "little") + packed


def read_order(descriptor: int) -> dict[str, Any]:
    """What pack_order made, from a pipe. Raises: ValueError for anything else."""
    count = int.from_bytes(_exactly(descriptor, 4), "little")
    if not 0 < count <= MAX_ORDER_BYTES:
        raise ValueError(f"engine: order must be at most {MAX_ORDER_BYTES} bytes, got {count}")
    order = msgpack.unpackb(_exactly(descriptor, count), raw=False)
    if not isinstance(order, dict):
        raise ValueError(f"engine: order must be a table, got {type(order).__name__}")
    return order


def _exactly(descriptor: int, count: int) -> bytes:
    found = b""
    while len(found) < count:
        piece = os.read(descriptor, count - len(found))
        if not piece:
            raise ValueError("engine: order must be whole, got the end of the pipe")
        found += piece
    return found


def config_of(fields: dict[str, Any]) -> EngineConfig:
    """An EngineConfig from its fields."""
    return EngineConfig(**{**fields, "limits": Limits(**fields["limits"])})
