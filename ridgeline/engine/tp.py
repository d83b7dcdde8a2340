"""Tensor parallelism: every rank runs the same steps on its part of the weights.

    out and down projections: partial sums, added over the ranks (all-reduce)
    head: a slice of the vocabulary each, put together (all-gather)

Rank 0 schedules, samples and serves; the others follow messages (follow.py). A message is msgpack
(numbers, strings, lists) of a known kind, broadcast over the process group, and what the others
report back is msgpack too: nothing is ever unpickled, so a message can at worst be refused.
Processes are torchrun's, or started by rank 0 (workers.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from ridgeline.core import env
from ridgeline.core.errors import bad_value

MAX_MESSAGE_BYTES = 64 * 2**20
FRAME_BYTES, LENGTH_BYTES = 4096, 8
"""Of a message's first piece, and of its length in it."""
MAX_REPORT_BYTES = 512
KINDS = ("step", "embed", "load", "loaded", "swap", "drop", "stop")


class Group:
    """The ranks of one engine: data over NCCL on GPUs (gloo on CPUs), messages over gloo."""

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        self.rank, self.ranks, self.device = rank, ranks, device
        timeout = timedelta(days=365)  # an idle engine sends nothing
        self._data: Any = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo")
        self._control: Any = dist.new_group(backend="gloo", timeout=timeout)
        self.records = device.type == "cuda"
        """Whether its collectives can be part of a CUDA graph."""

    def make_current(self) -> None:
        """Let this thread's work go to this rank's GPU."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def meet(self) -> None:
        """Called when this rank is ready for the first collective (workers.py has a say in it)."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks."""
        x = x.contiguous()
        dist.all_reduce(x, group=self._data)
        return x

    def all_gather(self, x_RV: torch.Tensor) -> torch.Tensor:
        """The ranks' columns side by side."""
        parts = [torch.empty_like(x_RV) for _ in range(self.ranks)]
        dist.all_gather(parts, x_RV.contiguous(), group=self._data)
        return torch.cat(parts, dim=-1)

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of each number over the ranks."""
        found = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._control)
        return found.tolist()

    def report(self, state: str, text: str = "") -> list[tuple[str, str]]:
        """Every rank says a word and a text; all of them, by rank."""
        packed = msgpack.packb([state, text[: MAX_REPORT_BYTES // 4]])
        assert isinstance(packed, bytes) and len(packed) + 2 <= MAX_REPORT_BYTES
        framed = len(packed).to_bytes(2, "little") + packed.ljust(MAX_REPORT_BYTES - 2, b"\0")
        mine = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(every, mine, group=self._control)
        return [_report_of(each.numpy().tobytes()) for each in every]

    def send(self, kind: str, body: Any = None) -> None:
        """Rank 0: tell the others what comes next."""
        for frame in frames(encode(kind, body)):
            dist.broadcast(torch.frombuffer(frame, dtype=torch.uint8), 0, group=self._control)

    def receive(self) -> tuple[str, Any]:
        """The other ranks: wait for a message."""
        first = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        dist.broadcast(first, 0, group=self._control)
        packed, missing = opened(first.numpy().tobytes())
        if missing:
            rest = torch.empty(missing, dtype=torch.uint8)
            dist.broadcast(rest, 0, group=self._control)
            packed += rest.numpy().tobytes()
        return decode(packed)


def encode(kind: str, body: Any) -> bytes:
    """A message as bytes."""
    assert kind in KINDS
    packed = msgpack.packb([kind, body], use_bin_type=True)
    assert isinstance(packed, bytes)
    if len(packed) > MAX_MESSAGE_BYTES:
        rule = f"be at most {MAX_MESSAGE_BYTES} bytes"
        raise bad_value("engine", "message", rule, len(packed), "send less")
    return packed


def decode(packed: bytes) -> tuple[str, Any]:
    """A message from bytes. Raises: ValueError for anything that is not one of ours."""
    try:
        message = msgpack.unpackb(packed, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises many kinds
        raise bad_value("engine", "message", "be msgpack", error, "check the sender") from error
    if not isinstance(message, list) or len(message) != 2 or message[0] not in KINDS:
        raise bad_value("engine", "message", f"be [kind of {KINDS}, body]", message, "check it")
    return message[0], message[1]


def frames(packed: bytes) -> list[bytearray]:
    """A message as what is broadcast: its length and its start in one piece of fixed size, which is
    all of most messages, then the rest."""
    start = packed[: FRAME_BYTES - LENGTH_BYTES]
    first = len(packed).to_bytes(LENGTH_BYTES, "little") + start
    rest = packed[len(start) :]
    return [bytearray(first.ljust(FRAME_BYTES, b"\0")), *([bytearray(rest)] if rest else [])]


def opened(first: bytes) -> tuple[bytes, int]:
    """(what the first piece has of a message, bytes to come). Raises: ValueError for a length that
    cannot be."""
    count = int.from_bytes(first[:LENGTH_BYTES], "little")
    if not 0 < count <= MAX_MESSAGE_BYTES:
        rule = f"be at most {MAX_MESSAGE_BYTES} bytes"
        raise bad_value("engine", "message", rule, count, "send less")
    start = first[LENGTH_BYTES : LENGTH_BYTES + count]
    return start, count - len(start)


def _report_of(framed: bytes) -> tuple[str, str]:
    message = msgpack.unpackb(framed[2 : 2 + int.from_bytes(framed[:2], "little")], raw=False)
    if not isinstance(message, list) or [type(each) for each in message] != [str, str]:
        raise bad_value("engine", "report", "be [word, text]", message, "check the sender")
    return message[0], message[1]


def start(device: torch.device) -> Group | None:
    """The group of a process that torchrun started; None for a process alone."""
    ranks = env.world_size()
    if ranks == 1:
        return None
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Group(env.rank(), ranks, on_rank(device, env.local_rank()))


def join(rank: int, ranks: int, meeting: Path, device: torch.device) -> None:
    """Join the processes of this machine that meet at a file. Nothing listens to other machines."""
    env.stay_on_loopback()
    on_rank(device, rank)
    method = f"file://{meeting}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=ranks)


def leave(within_s: float) -> None:
    """Leave what `join` joined, when the other ranks do too: NCCL waits for them, and for every
    graph that has its collectives in it; no longer than so many seconds, one may be gone."""
    if not dist.is_initialized():
        return
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(within_s)


def on_rank(device: torch.device, local_rank: int) -> torch.device:
    """A rank's own device, the current one from now on."""
    if device.type != "cuda":
        return device
    own = torch.device("cuda", local_rank)
    torch.cuda.set_device(own)
    return own


def follow(group: Group, handlers: dict[str, Callable[[Any], object]]) -> None:
    """Run messages of rank 0 until it says stop."""
    while True:
        kind, body = group.receive()
        if kind == "stop":
            return
        handlers[kind](body)
