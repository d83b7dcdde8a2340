"""Decode steps that are started before the tokens of the step before are read: of many sequences,
or of sampled ones.

    step n:    numbers -> graph -> tokens (stay on the device) -> host
    step n+1:  numbers, tokens of step n by row -> graph -> ..

The host plans step n+1 while step n runs: where every sequence goes, which pages it needs and by
which random numbers it is drawn do not depend on which tokens were chosen. Tokens are handed on on
the device. A sequence that turns out to have ended with step n has a row in step n+1 whose token is
dropped; what it wrote lies behind what its sequence had computed, and pages are given to others
only by later steps of the same stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ridgeline.engine.draw import COLUMNS, Draws, draw
from ridgeline.engine.numbers import StepNumbers

if TYPE_CHECKING:
    from ridgeline.engine.graphs import DecodeGraphs
    from ridgeline.engine.runner import StepBatch

PLACES = 2
"""Steps whose numbers and tokens are kept apart: one is read while the next one runs."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was started."""

    count: int
    host_tokens: torch.Tensor
    arrived: Any
    """CUDA event, or None where nothing runs beside the host."""

    def tokens(self) -> list[int]:
        """Its tokens, a row each; waits for them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host_tokens[: self.count].tolist()


class Flights:
    """Starts recorded decode steps of one runner, at most PLACES of them unread."""

    def __init__(self, graphs: DecodeGraphs, sizes: Sequence[int]) -> None:
        self.graphs, self.sizes = graphs, tuple(sizes)
        runner, on_gpu = graphs.runner, graphs.on_gpu
        most, width = sizes[-1], runner.table_width
        self.numbers = [
            StepNumbers(most, width, runner.cache, pinned=on_gpu) for _ in range(PLACES)
        ]
        self.host_sources = [
            torch.zeros(most, dtype=torch.int64, pin_memory=on_gpu) for _ in range(PLACES)
        ]
        self.host_tokens = [
            torch.zeros(most, dtype=torch.int64, pin_memory=on_gpu) for _ in range(PLACES)
        ]
        self.host_draws = [
            torch.zeros(most, COLUMNS, dtype=torch.float32, pin_memory=on_gpu)
            for _ in range(PLACES)
        ]
        self.host_order = [
            torch.zeros(most, dtype=torch.int64, pin_memory=on_gpu) for _ in range(PLACES)
        ]
        self.arrived = [torch.cuda.Event() if on_gpu else None for _ in range(PLACES)]
        self.sources = torch.zeros(most, dtype=torch.int64, device=runner.device)
        self.tokens = torch.zeros(most, dtype=torch.int64, device=runner.device)
        """Of the step that was started last, by row."""
        self.started = 0

    @torch.inference_mode()
    def start(
        self, batch: StepBatch, sources: Sequence[int] | None, draws: Draws | None = None
    ) -> Flight | None:
        """Start a step of single tokens; None where its size is not recorded.

        sources: of each row, the row of the step that was started last whose token it continues;
        None: the batch's own tokens. draws: None where all take the likeliest token.
        """
        count, graphs = len(batch.spans), self.graphs
        size = next((size for size in self.sizes if size >= count), None)
        recorded = None if size is None else graphs.recorded.get(size)
        if size is None or recorded is None:
            return None
        graphs.ahead = None  # the buffer that its numbers are in is written here
        place = self.started % PLACES
        self.numbers[place].fill(batch.spans, batch.token_ids, size)
        graphs.device[:size].copy_(self.numbers[place].host[:size], non_blocking=True)
        if sources is not None:
            self.host_sources[place].numpy()[:count] = sources
            self.sources[:count].copy_(self.host_sources[place][:count], non_blocking=True)
            graphs.device[:count, 0].copy_(self.tokens[self.sources[:count]])
        recorded.replay()
        if draws is None:
            torch.argmax(recorded.logits[:count], -1, out=self.tokens[:count])
        else:
            self.tokens[:count] = self._drawn(recorded.logits[:count], draws, place)
        self.host_tokens[place][:count].copy_(self.tokens[:count], non_blocking=True)
        event = self.arrived[place]
        if event is not None:
            event.record()
        self.started += 1
        return Flight(count, self.host_tokens[place], event)

    def _drawn(self, logits_RV: torch.Tensor, draws: Draws, place: int) -> torch.Tensor:
        count, device = logits_RV.shape[0], logits_RV.device
        numbers, order = self.host_draws[place][:count], self.host_order[place][:count]
        numbers.numpy()[:] = draws.numbers_R5
        order.numpy()[:] = draws.order_R
        moved = (x.to(device, non_blocking=True) for x in (numbers, order))
        return draw(logits_RV.float(), draws, *moved)
