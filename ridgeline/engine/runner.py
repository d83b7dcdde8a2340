"""Runs the steps that the scheduler plans: tensors in, logits out.

A step is a plain description (StepBatch) that can be sent to the other ranks of a tensor-parallel
engine; every rank runs the same step on its part of the weights. On a GPU, decode steps are
recorded as CUDA graphs the third time a batch size comes up, so the engine serves at once and is
fast later; sizes are rounded up to a few, rows that are padding write to a page of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.engine.device_forward import DeviceForward
from ridgeline.engine.forward import Attend, Forward
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

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
INVARIANT_SEQUENCES = 64
"""Queries of one attention call in batch-invariant mode on a GPU."""
EAGER_STEPS = 2
"""Steps of a size before it is recorded."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step: packed tokens, the sequences they belong to, the rows whose logits are wanted."""

    token_ids: list[int]
    spans: list[Span]
    num_decoding: int
    """Sequences at the front with one token each, which is sampled."""
    rows: list[int]

    @staticmethod
    def of(plan: Plan) -> StepBatch:
        """The step of a plan: single tokens first."""
        token_ids: list[int] = []
        spans: list[Span] = []
        rows: list[int] = []
        for work in plan.works:
            sequence, row = work.sequence, len(token_ids)
            token_ids += sequence.token_ids[work.start : work.start + work.count]
            token_ids += work.draft
            num_keys = work.start + work.num_tokens
            spans.append(Span(row, work.num_tokens, sequence.pages, num_keys))
            if work.samples:
                rows += range(row + work.count - 1, row + work.num_tokens)
        single = 0
        for work in plan.works:
            if work.num_tokens != 1 or not work.samples:
                break
            single += 1
        return StepBatch(token_ids, spans, single, rows)

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
        return [self.token_ids, spans, self.num_decoding, self.rows]

    @staticmethod
    def from_message(message: list[object]) -> StepBatch:
        """What to_message made."""
        token_ids, spans, num_decoding, rows = message
        assert isinstance(token_ids, list) and isinstance(spans, list) and isinstance(rows, list)
        assert isinstance(num_decoding, int)
        return StepBatch(token_ids, [Span(*span) for span in spans], num_decoding, rows)


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
        kind = DeviceForward if self.on_gpu else Forward
        self.forward = kind(weights, self.max_model_len, reduce)
        self.host_decoder = None
        if not self.on_gpu and HostDecoder.takes(weights, self.cache, self.invariant):
            self.host_decoder = HostDecoder(weights, self.forward.rotary, self.cache)
        if self.graphs is not None:
            self.graphs.forget()

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> torch.Tensor:
        """Logits of the batch's rows, [R, V]."""
        if self.graphs is not None and batch.decodes_only:
            recorded = self.graphs.run(batch)
            if recorded is not None:
                return recorded
        if self.host_decoder is not None and len(batch.token_ids) == 1 and batch.rows:
            return self.host_decoder.run(batch.token_ids[0], batch.spans[0])
        token_ids = torch.tensor(batch.token_ids, device=self.device)
        positions = torch.tensor(batch.positions(), device=self.device)
        x_PC = self.forward.hidden(token_ids, positions, self._attend(batch))
        if len(batch.rows) < len(batch.token_ids):
            x_PC = x_PC[torch.tensor(batch.rows, dtype=torch.int64, device=self.device)]
        if not batch.rows:
            return x_PC
        return self._whole_vocabulary(self.forward.logits(x_PC))

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

    def _whole_vocabulary(self, logits_RV: torch.Tensor) -> torch.Tensor:
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


@dataclass(slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class DecodeGraphs:
    """CUDA graphs of decode steps by batch size, recorded lazily, in one memory pool.

    A step's numbers are packed into one pinned buffer and copied at once.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.seen: dict[int, int] = {}
        self.recorded: dict[int, _Recorded] = {}
        self.pool: Any = None
        most, width = GRAPH_SIZES[-1], runner.table_width
        shape = (most, 4 + width)  # token, position, slot, keys, pages
        self.host = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
        self.device = torch.zeros(shape, dtype=torch.int32, device=runner.device)
        self.numpy = self.host.numpy()

    def forget(self) -> None:
        """The weights changed."""
        self.recorded.clear()
        self.seen.clear()

    def run(self, batch: StepBatch) -> torch.Tensor | None:
        """Logits of a decode step; None: to be run eagerly."""
        count = len(batch.spans)
        size = next((size for size in GRAPH_SIZES if size >= count), None)
        if size is None:
            return None
        if size not in self.recorded:
            self.seen[size] = self.seen.get(size, 0) + 1
            if self.seen[size] <= EAGER_STEPS:
                return None
        self._fill(batch, size)
        if size not in self.recorded:
            self.recorded[size] = self._record(size)
        recorded = self.recorded[size]
        recorded.graph.replay()
        return recorded.logits[:count]

    def _fill(self, batch: StepBatch, size: int) -> None:
        cache, host = self.runner.cache, self.numpy
        page = cache.page_tokens
        for row, (span, token_id) in enumerate(zip(batch.spans, batch.token_ids, strict=True)):
            position = span.num_keys - 1
            slot = span.pages[position // page] * page + position % page
            host[row, :4] = (token_id, position, slot, span.num_keys)
            host[row, 4 : 4 + len(span.pages)] = span.pages
        for row in range(len(batch.spans), size):
            host[row, :4] = (0, 0, cache.num_pages * page, 1)
            host[row, 4] = cache.num_pages
        self.device[:size].copy_(self.host[:size], non_blocking=True)

    def _step(self, size: int) -> torch.Tensor:
        runner, numbers = self.runner, self.device[:size]
        batch = DeviceBatch(
            slots_P=numbers[:, 2].contiguous(),
            num_decoding=size,
            decode_seqlens_B=numbers[:, 3].contiguous(),
            decode_table_BU=numbers[:, 4:],
        )
        attend = DeviceAttention(runner.cache, batch)
        x_PC = runner.forward.hidden(numbers[:, 0].contiguous(), numbers[:, 1].contiguous(), attend)
        return runner.forward.logits(x_PC)

    def _record(self, size: int) -> _Recorded:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(size)  # kernels compile and libraries allocate outside of the recording
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits = self._step(size)
        self.pool = self.pool or graph.pool()
        return _Recorded(graph, logits)
