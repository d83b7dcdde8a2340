"""One forward of a block over all calibration batches, stopped before each group of linears.

Each batch's forward runs in a thread of its own; only one runs at a time. A hook before a group's
first linear hands the group's input over and waits. When every batch stands there the group is
quantized, and the same forwards go on through the quantized layers: each layer is calibrated on
what its quantized predecessors put out ("true-sequential") at the cost of a single forward a block,
and only what is live at the stop is held.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch

from ridgeline.core.errors import UserError
from ridgeline.core.protocols import BlockwiseModel
from ridgeline.quant.batches import Batch, run_batch


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
        self.output: Batch | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._wait()
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
        self.at, self.input = name, x
        self.stopped.set()
        self._wait()

    def _wait(self) -> None:
        self.go.wait()
        self.go.clear()
        if self.abandoned:
            raise _AbandonedError

    def resume(self) -> None:
        """Called by the owner: run to the next stop (or the end) and return."""
        self.input = None
        self.stopped.clear()
        self.go.set()
        self.stopped.wait()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        self.abandoned = True
        self.go.set()


class StagedBlock:
    """Use as a context manager; iterate `stages()`, quantizing each group before the next step."""

    def __init__(self, model: BlockwiseModel, index: int, batches: list[Batch]) -> None:
        self.model, self.index = model, index
        self.block = model.blocks[index]
        self.groups = model.linear_groups()
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

    def _hook(self, name: str):
        def before(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            thread = threading.current_thread()
            if isinstance(thread, _Forward) and thread.staged is self:
                thread.stop(name, args[0])

        return before

    def stages(self) -> Iterator[tuple[list[str], Iterator[torch.Tensor]]]:
        """(group, inputs of every batch) in data-flow order; quantize the group while it is out.

        The inputs must be read before the next stage is asked for.
        Raises: UserError when a forward does not pass the groups in their order.
        """
        for group in self.groups:
            yield group, self._advance(group[0])

    def _advance(self, name: str) -> Iterator[torch.Tensor]:
        for forward in self._forwards:
            forward.resume()
            if forward.at != name or forward.input is None:
                raise UserError(
                    f"quantize: block {self.index} must run {name} next, got "
                    f"{forward.at or 'its end'}; its linear_groups() are not in data-flow order"
                )
            yield forward.input

    def finish(self) -> list[Batch]:
        """Run to the end and return the block's outputs (through its quantized layers)."""
        outputs = []
        for forward in self._forwards:
            forward.resume()
            if forward.at is not None or forward.output is None:
                raise UserError(
                    f"quantize: block {self.index} must end, got {forward.at} once more; a layer "
                    "that runs twice cannot be calibrated"
                )
            outputs.append(forward.output)
            forward.output = None  # threads and block refer to each other: freed late
        return outputs
