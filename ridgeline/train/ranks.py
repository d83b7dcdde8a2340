"""The processes of a run: one, or many under torchrun that decide, fail and stop together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from ridgeline.core import env
from ridgeline.core.errors import UserError, common
from ridgeline.parallel import mesh
from ridgeline.train.config import TrainConfig, config_hash

Result = TypeVar("Result")

SAVE_GROUP = "checkpoint"
"""Name of the group that checkpoints are written over."""

_SPARE_S = 6 * 3600.0
"""How much later than the run's own report PyTorch gives a collective up: the ranks may wait that
long for the first one to tokenize the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's place among those of the run."""

    rank: int = 0
    size: int = 1
    talk: dist.ProcessGroup | None = None
    """Where ranks agree on the host (gloo); None: one process."""
    save: dist.ProcessGroup | None = None
    """What checkpoints are written over, beside the training (gloo)."""

    @property
    def is_first(self) -> bool:
        """Whether this process talks to people and writes what is written once."""
        return self.rank == 0

    def together(self, do: Callable[[], Result]) -> Result:
        """Run on every rank; where one of them raises, every rank raises the first one's error."""
        if self.size == 1:
            return do()
        with told_once():
            return mesh.together(do)

    def first(self, do: Callable[[], object]) -> None:
        """Run on rank 0 while the others wait; all raise what it raises."""
        self.together(lambda: do() if self.is_first else None)

    def in_turn(self, do: Callable[[], Result]) -> Result:
        """Run on rank 0, then on one rank of every other node, then on the rest: what the first one
        leaves in a cache the others find there."""
        if self.size == 1:
            return do()
        turns = (
            self.is_first,
            not self.is_first and env.local_rank() == 0,
            not self.is_first and env.local_rank() != 0,
        )
        found: list[Result] = []
        for mine in turns:
            self.together(lambda mine=mine: found.append(do()) if mine else None)
        return found[0]

    def any_of(self, value: int) -> int:
        """The largest of all ranks' numbers."""
        if self.talk is None:
            return value
        held = torch.tensor(value)
        dist.all_reduce(held, dist.ReduceOp.MAX, group=self.talk)
        return int(held)


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """Mark what is raised as raised on every rank."""
    try:
        yield
    except Exception as error:
        common(error)
        raise


def _host_group(name: str) -> dist.ProcessGroup:
    """A group of all ranks on the host."""
    group = dist.new_group(backend="gloo", group_desc=name)
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextlib.contextmanager
def open_ranks(config: TrainConfig, device: torch.device) -> Iterator[Ranks]:
    """Join the processes that torchrun started, or be the only one.

    Raises: UserError on every rank where their configs differ or the group cannot be made.
    """
    if env.world_size() == 1:
        yield Ranks()
        return
    if config.device == "cpu" or device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // env.local_world_size()))
    env.record_collectives()
    try:
        mesh.start(device.type, config.timeout_s + _SPARE_S)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"train: could not join the {env.world_size()} processes of the run: {error}; start "
            "them with torchrun"
        ) from error
    with told_once():
        mesh.same_everywhere("the config", config_hash(config))
    yield Ranks(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        talk=_host_group("agreement"),
        save=_host_group(SAVE_GROUP),
    )
    # Not after an error: another rank may be gone, and leaving is a collective call.
    mesh.stop()
