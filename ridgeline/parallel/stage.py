"""One pipeline stage of a decoder as a module: token ids or hidden states in, hidden states or loss
out.

Whole micro-batches never travel with the activations: every rank of a data rank has read the same
samples, so a stage finds positions, document starts and targets of its n-th forward pass itself
(every schedule runs a stage's micro-batches in order).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ridgeline.nn.decoder import Decoder
from ridgeline.nn.layers import Attend
from ridgeline.parallel.deferred import Deferred
from ridgeline.parallel.loss import VocabPart, linear_cross_entropy
from ridgeline.parallel.tensor import Axis, VocabHead, enter


class Packed(Protocol):
    """Some samples as one packed sequence of P tokens (train/data.py makes them)."""

    @property
    def token_ids_P(self) -> torch.Tensor: ...
    @property
    def targets_P(self) -> torch.Tensor: ...
    @property
    def position_ids_P(self) -> torch.Tensor: ...
    @property
    def cu_seqlens(self) -> torch.Tensor: ...
    @property
    def max_seqlen(self) -> int: ...
    @property
    def seqlens(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What this rank's stages need of a micro-batch, on the device."""

    token_ids: torch.Tensor
    """int64 [1, P] (of this context rank)."""
    targets: torch.Tensor
    """int64 [P]."""
    positions: torch.Tensor
    """int64 [1, P]."""
    cu_seqlens: torch.Tensor
    max_seqlen: int
    attend: Attend | None = None
    """Attention over the tokens of all context ranks."""


class Stage(nn.Module):
    """Some layers, with the embedding or the loss where they are the first or the last."""

    def __init__(
        self,
        decoder: Decoder,
        axis: Axis | None,
        loss_chunk: int | None,
        queue: Deferred | None = None,
    ) -> None:
        super().__init__()
        self.decoder, self.axis, self.loss_chunk, self.queue = decoder, axis, loss_chunk, queue
        self._batches: Sequence[MicroBatch] = ()
        self._turn = 0
        self._denominator = 1

    def begin(self, batches: Sequence[MicroBatch], denominator: int) -> None:
        """Take the micro-batches of a step; losses are divided by the denominator."""
        self._batches, self._turn, self._denominator = batches, 0, denominator

    def end(self) -> None:
        """Let go of the step's micro-batches."""
        assert self._turn == len(self._batches), "a schedule ran a stage too often or too rarely"
        assert not self.queue, "a schedule left weight gradients unmade"
        self._batches = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = self._batches[self._turn]
        self._turn += 1
        x_BSC = self.decoder.hidden(
            x,
            positions=batch.positions,
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            attend=batch.attend,
        )
        head = self.decoder.lm_head
        if head is None:
            return x_BSC
        assert self.decoder.model.norm is not None
        x_BSC = self.decoder.model.norm(x_BSC)
        part = None
        if self.axis is not None:
            x_BSC = enter(x_BSC, self.axis)
            assert isinstance(head, VocabHead)
            part = VocabPart(group=self.axis.group, start=head.start)
        loss, _ = linear_cross_entropy(
            x_BSC.flatten(0, 1), head.weight, batch.targets, chunk=self.loss_chunk, part=part
        )
        return loss / self._denominator
