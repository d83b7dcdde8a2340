"""Runs the steps that the scheduler plans: tensors in, logits out.

A step is a plain description (StepBatch) that can be sent to the other ranks of a tensor-parallel
engine; every rank runs the same step on its part of the weights. On a GPU, decode steps are
recorded as CUDA graphs the third time a batch size comes up (graphs.py), so the engine serves at
once and is fast later; sizes are rounded up to a few, rows of padding write to a page of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ridgeline.engine.device_forward import DeviceForward
from ridgeline.engine.draw import Draws
from ridgeline.engine.flight import Flight, Flights
from ridgeline.engine.forward import Attend, Forward
from ridgeline.engine.graphs import AHEAD_SIZE, GRAPH_SIZES, DecodeGraphs
from ridgeline.engine.host_decode import HostDecoder
from ridgeline.engine.numbers import FRONT, StepNumbers
from ridgeline.engine.paged import (
    FP8,
    DeviceAttention,
    DeviceBatch,
    GatheredAttention,
    HostAttention,
    PackedAttention,
    PagedKV,
    Span,
    positions_of,
    slots_of,
)
from ridgeline.engine.scheduler import Plan
from ridgeline.engine.tp import Group
from ridgeline.engine.weights import Weights

SAME_KERNEL = 16
"""Numbers that are multiples of this are one kind of number to Triton."""
INVARIANT_SEQUENCES = 64
"""Queries of one attention call in batch-invariant mode on a GPU."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step: packed tokens, the sequences they belong to, the rows whose logits are wanted."""

    token_ids: list[int]
    spans: list[Span]
    num_decoding: int
    """Sequences at the front with one token each, which is sampled."""
    rows: list[int]
    wide_rows: list[int] = field(default_factory=list)
    """Of `rows`: those whose log-probabilities are told. Their logits are fp32 everywhere."""
    greedy: bool = False
    """Only decoding sequences, whose likeliest tokens are all that is asked for."""
    goes_on: bool = False
    """None of them ends with this step for its length."""

    @staticmethod
    def of(plan: Plan, *, greedy: bool = False) -> StepBatch:
        """The step of a plan: single tokens first. greedy: of those that sample. Of a token that
        is not known yet (scheduler.ahead) 0 is in its place."""
        if greedy and plan.is_single:
            return StepBatch.singles(plan)
        token_ids: list[int] = []
        spans: list[Span] = []
        rows: list[int] = []
        wide: list[int] = []
        for work in plan.works:
            sequence, row = work.sequence, len(token_ids)
            token_ids += sequence.token_ids[work.start : work.start + work.count]
            token_ids += work.draft
            num_keys = work.start + work.num_tokens
            spans.append(Span(row, work.num_tokens, sequence.pages, num_keys))
            if work.samples:
                if sequence.params.logprobs is not None:
                    wide += range(len(rows), len(rows) + 1 + len(work.draft))
                rows += range(row + work.count - 1, row + work.num_tokens)
        single = 0
        for work in plan.works:
            if work.num_tokens != 1 or not work.samples:
                break
            single += 1
        greedy = greedy and single == len(spans)
        goes_on = greedy and all(not work.sequence.is_last for work in plan.works)
        return StepBatch(token_ids, spans, single, rows, wide, greedy, goes_on)

    @staticmethod
    def singles(plan: Plan, *, greedy: bool = True) -> StepBatch:
        """A step of one token a sequence (plan.is_single), none of which tells of more than its
        token."""
        token_ids: list[int] = []
        spans: list[Span] = []
        goes_on = True
        for row, work in enumerate(plan.works):
            sequence, start = work.sequence, work.start
            known = sequence.token_ids
            token_ids.append(known[start] if start < len(known) else 0)
            spans.append(Span(row, 1, sequence.pages, start + 1))
            goes_on = goes_on and not sequence.is_last
        count = len(spans)
        goes_on = goes_on and greedy
        return StepBatch(token_ids, spans, count, list(range(count)), [], greedy, goes_on)

    @property
    def decodes_only(self) -> bool:
        return self.num_decoding == len(self.spans)

    def to_message(self) -> list[object]:
        """Lists and numbers alone."""
        spans = [[s.row, s.rows, s.pages, s.num_keys] for s in self.spans]
        flags = [self.greedy, self.goes_on]
        return [self.token_ids, spans, self.num_decoding, self.rows, self.wide_rows, flags]

    @staticmethod
    def from_message(message: list[object]) -> StepBatch:
        """What to_message made."""
        token_ids, spans, num_decoding, rows, wide, flags = message
        assert isinstance(token_ids, list) and isinstance(spans, list) and isinstance(rows, list)
        assert isinstance(num_decoding, int) and isinstance(wide, list)
        assert isinstance(flags, list)
        made = [Span(*span) for span in spans]
        return StepBatch(token_ids, made, num_decoding, rows, wide, *flags)


class Runner:
    """A model with its cache on one device."""

    def __init__(
        self,
        weights: Weights,
        cache: PagedKV,
        *,
        max_model_len: int,
        group: Group | None = None,
        invariant: bool = False,
        cuda_graphs: bool = True,
    ) -> None:
        self.cache, self.group, self.invariant = cache, group, invariant
        self.max_model_len = max_model_len
        self.device = cache.k.device
        self.on_gpu = self.device.type == "cuda"
        self.table_width = -(-max_model_len // cache.page_tokens)
        self.graphs = DecodeGraphs(self) if self._may_record(cuda_graphs) else None
        self.flights: Flights | None = None
        self.numbers: StepNumbers | None = None
        """Of the decoding rows of eager steps."""
        self.set_weights(weights)

    def _may_record(self, wanted: bool) -> bool:
        alone = self.group is None or self.group.records
        plain = self.cache.dtype != FP8 and not self.invariant
        return wanted and self.on_gpu and alone and plain

    def set_weights(self, weights: Weights) -> None:
        """Run with these from now on; with the old ones still, where that fails."""
        reduce = None if self.group is None else self.group.all_reduce
        # Not the fused kernels in batch-invariant mode: they sum in another order than PyTorch's.
        kind = DeviceForward if self.on_gpu and not self.invariant else Forward
        forward = kind(weights, self.max_model_len, reduce)
        host_decoder = None
        if not self.on_gpu and HostDecoder.takes(weights, self.cache, self.invariant):
            host_decoder = HostDecoder(weights, forward.rotary, self.cache)
        self.weights, self.forward, self.host_decoder = weights, forward, host_decoder
        self.forget()

    def forget(self) -> None:
        """Drop what was recorded: it holds collectives of a group that ends."""
        if self.graphs is not None:
            self.graphs.forget()

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> torch.Tensor | list[int]:
        """Logits of the batch's rows, [R, V]; or the likeliest tokens where no more is needed."""
        if self.graphs is not None and batch.decodes_only:
            recorded = self.graphs.run(batch)
            if recorded is not None:
                return recorded
        alone = len(batch.token_ids) == len(batch.rows) == 1 and not batch.wide_rows
        if self.host_decoder is not None and alone:
            return self.host_decoder.run(batch.token_ids[0], batch.spans[0])
        token_ids = torch.tensor(batch.token_ids, device=self.device)
        positions = torch.from_numpy(positions_of(batch.spans)).to(self.device)
        x_PC = self.forward.hidden(token_ids, positions, self._attend(batch))
        if len(batch.rows) < len(batch.token_ids):
            x_PC = x_PC[torch.tensor(batch.rows, dtype=torch.int64, device=self.device)]
        if not batch.rows:
            return x_PC
        return self.whole_vocabulary(self.forward.logits(x_PC, batch.wide_rows))

    def start(
        self, batch: StepBatch, sources: Sequence[int] | None, draws: Draws | None = None
    ) -> Flight | None:
        """Start a decode step without waiting for it (flight.py); None where it is to be run, as
        few greedy sequences are."""
        graphs = self.graphs
        if graphs is None or self.group is not None or not batch.decodes_only:
            return None
        if draws is None and len(batch.spans) <= AHEAD_SIZE:
            return None
        if self.flights is None or self.flights.graphs is not graphs:
            self.flights = Flights(graphs, GRAPH_SIZES)
        return self.flights.start(batch, sources, draws)

    @torch.inference_mode()
    def embed(self, prompts: Sequence[Sequence[int]], pooling: str) -> torch.Tensor:
        """Unit vectors of whole prompts, fp32 [prompts, C]: mean or last of the final states."""
        lengths = [len(prompt) for prompt in prompts]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        ids = torch.tensor([t for prompt in prompts for t in prompt], device=self.device)
        positions = torch.cat([torch.arange(n, device=self.device) for n in lengths])
        cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=self.device)
        attend = PackedAttention(cu_seqlens, max(lengths))
        states = self.forward.normed(self.forward.hidden(ids, positions, attend)).float()
        parts = states.split(lengths)
        pooled = [part[-1] if pooling == "last" else part.mean(0) for part in parts]
        return torch.nn.functional.normalize(torch.stack(pooled), dim=-1)

    def whole_vocabulary(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Every rank's logits side by side."""
        if self.group is None:
            return logits_RV
        return self.group.all_gather(logits_RV)[:, : self.weights.config.vocab_size]

    def _attend(self, batch: StepBatch) -> Attend:
        if not self.on_gpu:
            return HostAttention(self.cache, batch.spans, invariant=self.invariant)
        if self.cache.dtype == FP8:
            return GatheredAttention(self.cache, batch.spans)
        return DeviceAttention(self.cache, self._device_batch(batch))

    def _device_batch(self, batch: StepBatch) -> DeviceBatch:
        """Tensors of an eager step on a GPU.

        A kernel is compiled for what it is called with: whether a number is 1, or a multiple of 16.
        So decoding rows are padded as a graph's, with the same strides, and chunks to a multiple of
        16: whatever a step holds, the kernels are those of the steps before.
        """
        if self.invariant:
            return self._invariant_batch(batch)
        single, total = batch.num_decoding, len(batch.token_ids)
        seqlens_B, table_BU = self._decoding(batch.spans[:single])
        made = DeviceBatch(
            slots_P=self._moved(slots_of(batch.spans, self.cache.page_tokens)),
            num_decoding=single,
            decode_seqlens_B=seqlens_B,
            decode_table_BU=table_BU,
        )
        chunks = batch.spans[single:]
        if chunks:
            made.max_rows = _up(max(span.rows for span in chunks), SAME_KERNEL)
            made.max_keys = max(span.num_keys for span in chunks)
            nothing = Span(total, 0, [self.cache.num_pages], 1)
            chunks = chunks + [nothing] * (-len(chunks) % SAME_KERNEL)
            starts = [span.row - single for span in chunks] + [total - single]
            made.chunk_starts = self._int32(starts)
            made.chunk_seqlens = self._int32([s.num_keys for s in chunks])
            made.chunk_table = self._table(chunks)
        return made

    def _decoding(self, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths and pages of decoding rows, padded and laid out as a graph's."""
        count = len(spans)
        size = next((s for s in GRAPH_SIZES if s >= count), _up(count, GRAPH_SIZES[-1]))
        if self.numbers is None or self.numbers.numpy.shape[0] < size:
            rows = _up(size, GRAPH_SIZES[-1])
            self.numbers = StepNumbers(rows, self.table_width, self.cache, pinned=False)
        size = size if count else 0
        self.numbers.fill(spans, [0] * count, size)
        rows = self.numbers.host[:size].to(self.device, copy=True)
        return rows[:, 3].contiguous(), rows[:, FRONT:]

    def _invariant_batch(self, batch: StepBatch) -> DeviceBatch:
        """Every token is a query of its own, so many a call."""
        spans = [
            Span(span.row + i, 1, span.pages, span.num_keys - span.rows + i + 1)
            for span in batch.spans
            for i in range(span.rows)
        ]
        padding = Span(0, 1, [self.cache.num_pages], 1)
        padded = spans + [padding] * (-len(spans) % INVARIANT_SEQUENCES)
        return DeviceBatch(
            slots_P=self._moved(slots_of(spans, self.cache.page_tokens)),
            num_decoding=len(spans),
            decode_seqlens_B=self._int32([s.num_keys for s in padded]),
            decode_table_BU=self._table(padded),
            num_splits=1,
            tile=INVARIANT_SEQUENCES,
        )

    def _table(self, spans: Sequence[Span]) -> torch.Tensor:
        """Pages of sequences, as wide as the longest may get: the kernel's shape must not depend on
        the batch."""
        table = np.full((len(spans), self.table_width), self.cache.num_pages, dtype=np.int32)
        for row, span in enumerate(spans):
            pages = span.pages[: self.table_width]
            table[row, : len(pages)] = pages
        return self._moved(table)

    def _moved(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self.device)

    def _int32(self, values: Sequence[int]) -> torch.Tensor:
        return self._moved(np.array(values, dtype=np.int32))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
