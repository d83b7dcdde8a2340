"""Runs the steps that the scheduler plans: tensors in, logits out.

A step is a plain description (StepBatch) that can be sent to the other ranks of a tensor-parallel
engine; every rank runs the same step on its part of the weights. On a GPU, decode steps are
recorded as CUDA graphs the third time a batch size comes up (graphs.py), so the engine serves at
once and is fast later; sizes are rounded up to a few, rows of padding write to a page of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ridgeline.engine.device_forward import DeviceForward
from ridgeline.engine.forward import Attend, Forward
from ridgeline.engine.graphs import DecodeGraphs
from ridgeline.engine.host_decode import HostDecoder
from ridgeline.engine.paged import (
    FP8,
    DeviceAttention,
    DeviceBatch,
    GatheredAttention,
    HostAttention,
    PackedAttention,
    PagedKV,
    Span,
    slots_of,
)
from ridgeline.engine.scheduler import Plan
from ridgeline.engine.tp import Group
from ridgeline.engine.weights import Weights

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
        """The step of a plan: single tokens first. greedy: of those that sample."""
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

    @property
    def decodes_only(self) -> bool:
        return self.num_decoding == len(self.spans)

    def positions(self) -> list[int]:
        """Position of each packed token in its sequence."""
        return [
            position
            for span in self.spans
            for position in range(span.num_keys - span.rows, span.num_keys)
        ]

    def to_message(self) -> list[object]:
        """Lists and numbers alone."""
        spans = [[s.row, s.rows, s.pages, s.num_keys] for s in self.spans]
        return [self.token_ids, spans, self.num_decoding, self.rows, self.wide_rows]

    @staticmethod
    def from_message(message: list[object]) -> StepBatch:
        """What to_message made."""
        token_ids, spans, num_decoding, rows, wide = message
        assert isinstance(token_ids, list) and isinstance(spans, list) and isinstance(rows, list)
        assert isinstance(num_decoding, int) and isinstance(wide, list)
        return StepBatch(token_ids, [Span(*span) for span in spans], num_decoding, rows, wide)


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
        self.set_weights(weights)

    def _may_record(self, wanted: bool) -> bool:
        alone = self.group is None or self.group.records
        plain = self.cache.dtype != FP8 and not self.invariant
        return wanted and self.on_gpu and alone and plain

    def set_weights(self, weights: Weights) -> None:
        """Run with these from now on."""
        self.weights = weights
        reduce = None if self.group is None else self.group.all_reduce
        self.forward = Forward(weights, self.max_model_len, reduce)
        if self.on_gpu:
            self.forward = DeviceForward(weights, self.max_model_len, reduce)
        self.host_decoder = None
        if not self.on_gpu and HostDecoder.takes(weights, self.cache, self.invariant):
            self.host_decoder = HostDecoder(weights, self.forward.rotary, self.cache)
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
        positions = torch.tensor(batch.positions(), device=self.device)
        x_PC = self.forward.hidden(token_ids, positions, self._attend(batch))
        if len(batch.rows) < len(batch.token_ids):
            x_PC = x_PC[torch.tensor(batch.rows, dtype=torch.int64, device=self.device)]
        if not batch.rows:
            return x_PC
        return self.whole_vocabulary(self.forward.logits(x_PC, batch.wide_rows))

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
        """Tensors of an eager step on a GPU: one copy to the device for each kind of number."""
        spans, page = batch.spans, self.cache.page_tokens
        if self.invariant:  # every token is a query of its own
            spans = [
                Span(span.row + i, 1, span.pages, span.num_keys - span.rows + i + 1)
                for span in spans
                for i in range(span.rows)
            ]
        single = len(spans) if self.invariant else batch.num_decoding
        slots = torch.tensor(slots_of(spans, page), device=self.device)
        decoding, chunks = spans[:single], spans[single:]
        if self.invariant:
            padding = Span(0, 1, [self.cache.num_pages], 1)
            decoding = decoding + [padding] * (-single % INVARIANT_SEQUENCES)
        made = DeviceBatch(
            slots_P=slots,
            num_decoding=single,
            decode_seqlens_B=self._int32([s.num_keys for s in decoding]),
            decode_table_BU=self._table(decoding),
            num_splits=1 if self.invariant else 0,
            tile=INVARIANT_SEQUENCES if self.invariant else None,
        )
        if chunks:
            starts = [span.row - single for span in chunks] + [len(batch.token_ids) - single]
            made.chunk_starts = self._int32(starts)
            made.chunk_seqlens = self._int32([s.num_keys for s in chunks])
            made.chunk_table = self._table(chunks)
            made.max_rows = max(span.rows for span in chunks)
            made.max_keys = max(span.num_keys for span in chunks)
        return made

    def _table(self, spans: Sequence[Span]) -> torch.Tensor:
        width = max((len(span.pages) for span in spans), default=1)
        if self.invariant:
            width = self.table_width  # the kernel's shape must not depend on the batch
        pad = self.cache.num_pages
        rows = [span.pages[:width] + [pad] * (width - len(span.pages)) for span in spans]
        return self._int32(rows).view(len(spans), width)

    def _int32(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
