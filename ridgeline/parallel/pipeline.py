"""Running micro-batches through this rank's stages: a plain loop, or a schedule of PyTorch's.

    schedule       bubble / ideal        activations kept      gradients of weights
    gpipe          (p-1)/m               m micro-batches       with inputs
    1f1b           (p-1)/m               min(m, p - rank)      with inputs
    interleaved    (p-1)/(v m)           1 + (p-1)/(p v) more  with inputs
    zero_bubble    less: weights' part of the backward pass (deferred.py) fills the gaps
    zbv            none if F = I = W: two stages a rank, down and up again

Each hop moves b s C elements forward and as many back. Sources: Huang et al. 2019 (GPipe);
Narayanan et al. 2021 (arXiv 2104.04473, interleaving); Qi et al. 2023 (2401.10241, zero bubble).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from ridgeline.parallel import fsdp
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import World
from ridgeline.parallel.stage import MicroBatch, Stage

_SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class _PipelineStage(PipelineStage):
    """A stage whose greeting of its neighbours leaves out its own rank: before 2.13 PyTorch greets
    it too where a rank holds two stages in a row, which gloo cannot."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        greetings = super()._get_init_p2p_neighbors_ops()
        return [each for each in greetings if each.group_peer != self.group_rank]


class _Veiled(nn.Module):
    """A stage that the schedule does not recognise as sharded, so that FSDP's own hooks reduce
    after each micro-batch instead of the schedule once at the end."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stage(x)


class Loop:
    """Micro-batch after micro-batch through one stage that is the whole model."""

    def __init__(self, stage: Stage, layout: Layout) -> None:
        self._stage, self._layout = stage, layout

    def step(self, batches: Sequence[MicroBatch], backward: bool) -> torch.Tensor:
        """Sum of the micro-batches' losses (each divided by the step's denominator)."""
        total = torch.zeros((), device=batches[0].token_ids.device)
        for number, batch in enumerate(batches, 1):
            if backward:
                fsdp.before_micro_batch(self._stage, self._layout, last=number == len(batches))
            loss = self._stage(batch.token_ids)
            if backward:
                loss.backward()
            total += loss.detach()
        return total


class Pipeline:
    """This rank's stages of a pipeline under a schedule."""

    def __init__(
        self, stages: Sequence[Stage], world: World, hidden: torch.Tensor, num_microbatches: int
    ) -> None:
        layout = world.layout
        self._layout, self._device, self._world = layout, world.device, world
        self._roots, self._hidden = stages, hidden.detach()
        self._indices = layout.stages_of(world.pp_rank)
        self._holds_first = stages[0].decoder.part.embed
        self._holds_last = any(stage.decoder.part.head for stage in stages)
        each = layout.reduces_each_micro_batch
        tokens = hidden.new_empty((1, hidden.shape[1] * self._sequence_parts), dtype=torch.int64)
        parts = [
            _PipelineStage(
                _Veiled(stage) if each else stage,
                index,
                layout.num_stages,
                world.device,
                input_args=tokens if stage.decoder.part.embed else hidden,
                output_args=hidden.new_zeros((), dtype=torch.float32)
                if stage.decoder.part.head
                else hidden,
                group=world.group("pp"),
                dw_builder=None if stage.queue is None else stage.queue.take,
            )
            for stage, index in zip(stages, self._indices, strict=True)
        ]
        self._schedule = _SCHEDULES[layout.schedule](
            parts if layout.stages_here > 1 else parts[0],
            n_microbatches=num_microbatches,
            loss_fn=lambda output, target: output,
            scale_grads=False,
        )

    @property
    def _sequence_parts(self) -> int:
        return self._layout.tp if self._layout.sequence_parallel else 1

    def step(self, batches: Sequence[MicroBatch], backward: bool) -> torch.Tensor:
        """Sum of the losses here (zero where the last stage is elsewhere)."""
        losses = self._train(batches) if backward else self._forward(batches)
        total = torch.zeros((), device=self._device)
        for loss in losses:
            total += loss.detach()
        return total

    def _train(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        args: list[torch.Tensor] = []
        if self._holds_first:
            args = [torch.cat([batch.token_ids for batch in batches])]
        named: dict[str, Any] = {}
        if self._holds_last:
            named = {"target": torch.zeros(len(batches), device=self._device), "losses": losses}
        if self._layout.reduces_each_micro_batch:
            for root in self._roots:
                fsdp.before_micro_batch(root, self._layout, last=True)
        self._schedule.step(*args, return_outputs=False, **named)
        return losses

    def _forward(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Stage after stage, each for all micro-batches. With several stages a rank it sends when
        all are done: a rank that still sends does not receive yet."""
        group = self._world.group("pp")
        assert group is not None
        owners = {
            stage: dist.get_global_rank(group, rank)
            for rank in range(self._layout.pp)
            for stage in self._layout.stages_of(rank)
        }
        late = len(self._indices) > 1
        kept: list[torch.Tensor] = []
        for index, stage in zip(self._indices, self._roots, strict=True):
            found: list[torch.Tensor] = []
            sends = index + 1 < self._layout.num_stages and index + 1 not in self._indices
            for number, batch in enumerate(batches):
                x = batch.token_ids
                if index > 0 and index - 1 in self._indices:
                    x = kept[number]
                elif index > 0:
                    x = torch.empty_like(self._hidden)
                    dist.recv(x, owners[index - 1], group)
                found.append(stage(x))
                if sends and not late:
                    dist.send(found[-1], owners[index + 1], group)
            for output in found if sends and late else ():
                dist.send(output, owners[index + 1], group)
            kept = found
        return kept if self._holds_last else []
