"""One forward of a block over all calibration batches, stopped before each group of linears.

Each batch's forward runs in a thread of its own. A hook before a group's first linear hands the
group's input over and waits. When every batch stands there the group is quantized, and the same
forwards go on through the quantized layers: each layer is calibrated on what its quantized
predecessors put out ("true-sequential") at the cost of a single forward a block, and only what is
live at the stop is held.

On a CPU as many forwards run beside each other as cores and batches allow (`lanes_of`), each on its
own cores with its own share of the Hessian: what one thread's operations lose where they are split
over cores (waiting for each other, small operations) is then worked on by the other forward. What a
forward computes does not depend on it, and Hessians are summed in the order of the batches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.core.errors import UserError
from ridgeline.core.protocols import BlockwiseModel
from ridgeline.quant.batches import Batch, run_batch
from ridgeline.quant.gptq import Hessian, Product

_MOST_LANES = 4
"""Each holds what one forward needs while it runs."""


def lanes_of(batches: int, device: str) -> int:
    """How many forwards run beside each other: a power of two that divides their number."""
    if device != "cpu":
        return 1
    threads, lanes = torch.get_num_threads(), 1
    while 2 * lanes <= min(threads, batches, _MOST_LANES) and batches % (2 * lanes) == 0:
        lanes *= 2
    return lanes


class _AbandonedError(BaseException):
    """Raised inside a suspended forward to end it."""


class _Forward(threading.Thread):
    """One batch's forward, suspended at hooks."""

    def __init__(self, staged: StagedBlock, batch: Batch) -> None:
        super().__init__(daemon=True)
        self.staged = staged
        self.batch: Batch | None = batch
        self.go, self.stopped = threading.Event(), threading.Event()
        self.abandoned = False
        self.at: str | None = None
        self.input: torch.Tensor | None = None
        self.product: Product | None = None
        self.wants_product = False
        self.output: Batch | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._wait()
            if self.staged.lanes > 1:
                torch.set_num_threads(self.staged.threads // self.staged.lanes)  # of this thread
            batch, self.batch = self.batch, None
            assert batch is not None
            if batch.x.is_cuda:  # a new thread's current device is the first one
                torch.cuda.set_device(batch.x.device)
            with torch.no_grad():
                output = run_batch(self.staged.model, self.staged.index, batch)
            self.output = batch.carrying(output)
        except _AbandonedError:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.at = None
            self.stopped.set()

    def stop(self, name: str, x: torch.Tensor) -> None:
        """Called in this thread by a hook: hand over the input, wait for the next `resume`."""
        if self.wants_product:
            self.product = Hessian.product(x)
        self.at, self.input = name, x
        self.stopped.set()
        self._wait()

    def _wait(self) -> None:
        self.go.wait()
        self.go.clear()
        if self.abandoned:
            raise _AbandonedError

    def resume(self, wants_product: bool = False) -> None:
        """Called by the owner: run on; `wait` returns at the next stop or the end.

        wants_product: the Hessian's share of the input there is made in this thread.
        """
        self.input = self.product = None
        self.wants_product = wants_product
        self.stopped.clear()
        self.go.set()

    def wait(self) -> None:
        """Called by the owner after `resume`."""
        self.stopped.wait()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        self.abandoned = True
        self.go.set()


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """The inputs of one group of linears, batch by batch; to be used once."""

    staged: StagedBlock
    name: str
    """The group's first linear."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Each batch's input, valid until the next stage."""
        for forward in self._stopped(wants_product=False):
            assert forward.input is not None
            yield forward.input

    def add_to(self, hessian: Hessian) -> None:
        """Sum their products, lanes beside each other."""
        if self.staged.lanes == 1:
            for x_BSK in self:
                hessian.add(x_BSK)
            return
        for forward in self._stopped(wants_product=True):
            assert forward.product is not None
            hessian.take(forward.product)
            forward.product = None

    def _stopped(self, *, wants_product: bool) -> Iterator[_Forward]:
        for forward in self.staged.run_forwards(wants_product=wants_product):
            if forward.at != self.name or forward.input is None:
                raise UserError(
                    f"quantize: block {self.staged.index} must run {self.name} next, got "
                    f"{forward.at or 'its end'}; its linear_groups() are not in data-flow order"
                )
            yield forward


class StagedBlock:
    """Use as a context manager; iterate `stages()`, quantizing each group before the next step."""

    def __init__(self, model: BlockwiseModel, index: int, batches: list[Batch]) -> None:
        self.model, self.index = model, index
        self.block = model.blocks[index]
        self.groups = model.linear_groups()
        self.threads, self.lanes = torch.get_num_threads(), 1
        if batches:
            self.lanes = lanes_of(len(batches), batches[0].x.device.type)
        self._forwards = [_Forward(self, batch) for batch in batches]
        self._hooks: list[Any] = []

    def __enter__(self) -> StagedBlock:
        for group in self.groups:
            module = self.block.get_submodule(group[0])
            self._hooks.append(module.register_forward_pre_hook(self._hook(group[0])))
        for forward in self._forwards:
            forward.start()
        return self

    def __exit__(self, *_: object) -> None:
        for forward in self._forwards:
            forward.abandon()
        for forward in self._forwards:
            forward.join()
        for hook in self._hooks:
            hook.remove()
        if self.lanes > 1:
            torch.set_num_threads(self.threads)  # of threads that are new

    def _hook(self, name: str):
        def before(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            thread = threading.current_thread()
            if isinstance(thread, _Forward) and thread.staged is self:
                thread.stop(name, args[0])

        return before

    def stages(self) -> Iterator[tuple[list[str], GroupInputs]]:
        """(group, its inputs) in data-flow order; quantize the group while it is out.

        The inputs must be read before the next stage is asked for.
        Raises: UserError when a forward does not pass the groups in their order.
        """
        for group in self.groups:
            yield group, GroupInputs(self, group[0])

    def run_forwards(self, *, wants_product: bool = False) -> Iterator[_Forward]:
        """Every forward at its next stop (or its end), in order. `lanes` of them run at a time; one
        lane runs only while it is waited for."""
        lanes, waiting = self.lanes, self._forwards
        for forward in waiting[: lanes if lanes > 1 else 0]:
            forward.resume(wants_product)
        for index, forward in enumerate(waiting):
            if lanes == 1:
                forward.resume(wants_product)
            forward.wait()
            if lanes > 1 and index + lanes < len(waiting):
                waiting[index + lanes].resume(wants_product)
            yield forward

    def finish(self) -> list[Batch]:
        """Run to the end and return the block's outputs (through its quantized layers)."""
        outputs = []
        for forward in self.run_forwards():
            if forward.at is not None or forward.output is None:
                raise UserError(
                    f"quantize: block {self.index} must end, got {forward.at} once more; a layer "
                    "that runs twice cannot be calibrated"
                )
            outputs.append(forward.output)
            forward.output = None  # threads and block refer to each other: freed late
        return outputs
