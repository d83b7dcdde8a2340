"""CUDA graphs of decode steps by batch size, recorded lazily, in one memory pool.

A step's numbers (token, position, slot, keys, pages of each row) are packed into one pinned buffer
and copied at once. At small sizes a graph ends by choosing the likeliest tokens and by moving its
numbers one token on, so that for a greedy batch the next step is this graph again: it is started
before the host has seen this step's tokens, and what the host does in a step costs nothing. A step
started so is used only if the scheduler then asks for exactly it. If it does not (a sequence ended,
another one came), the step is lost; what it wrote lies in a slot that its sequence had not filled,
or that is written again by a later kernel before anyone reads it.

Several ranks start the same steps ahead: which, depends on the batches that rank 0 tells all of
them and on tokens that each chooses of the same logits. So its messages travel while a step runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from ridgeline.engine.device_forward import ASKINGS, PARTS, DeviceForward, RowForward
from ridgeline.engine.forward import Forward
from ridgeline.engine.numbers import FRONT, StepNumbers
from ridgeline.engine.paged import DeviceAttention, DeviceBatch
from ridgeline.kernels.step import ref
from ridgeline.kernels.step.op import attend_configs, row_configs

if TYPE_CHECKING:
    from ridgeline.engine.runner import Runner, StepBatch

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
EAGER_STEPS = 2
"""Steps of a size before it is recorded."""
AHEAD_SIZE = 8
"""Largest batch that is started ahead: in a larger one some sequence ends every few steps."""
WAYS_SIZE = 128
"""Largest batch of which other ways are tried: beyond it launches are nothing."""
TRIALS = 9
LEAST_GAIN = 0.02
"""By how much another way to compute a step must be faster to be taken."""
LOGITS_GAP = 0.2
"""Of two ways' logits, over their standard deviation: sums in another order in 16 bits make less,
a kernel that read too early more."""


@dataclass(slots=True)
class Recorded:
    """A step of one size, ready to run on the numbers in the buffer."""

    replay: Callable[[], None]
    logits: torch.Tensor
    tokens: torch.Tensor | None
    """The likeliest ones, int64 [size]; None at sizes that are not started ahead."""
    forward: Forward


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step that was started before it was asked for."""

    size: int
    place: int
    """Which of the two token buffers its tokens go to."""
    keys: list[int]
    pages: list[list[int]]

    def is_asked_for(self, batch: StepBatch, tokens: list[int]) -> bool:
        """Whether a batch is the step that was started: the same rows, a token later."""
        return (
            batch.greedy
            and batch.token_ids == tokens
            and [span.num_keys for span in batch.spans] == self.keys
            and [span.pages for span in batch.spans] == self.pages
        )


class DecodeGraphs:
    """Decode steps of one runner as graphs (on a CPU, where tests run them: as plain calls)."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.on_gpu = runner.device.type == "cuda"
        self.seen: dict[int, int] = {}
        self.recorded: dict[int, Recorded] = {}
        self.times_ms: dict[int, dict[str, float]] = {}
        """Of a step of a size, by the way it is computed, where there was a choice."""
        self.refused: dict[str, str] = {}
        """Ways that were not taken for another reason than their time, and the reason."""
        self.pool: Any = None
        most, width = GRAPH_SIZES[-1], runner.table_width
        self.numbers = StepNumbers(most, width, runner.cache, pinned=self.on_gpu)
        shape = (most, FRONT + width)
        self.device = torch.zeros(shape, dtype=torch.int32, device=runner.device)
        self.host_tokens = torch.zeros(2, AHEAD_SIZE, dtype=torch.int64, pin_memory=self.on_gpu)
        self.arrived: list[Any] = [torch.cuda.Event() if self.on_gpu else None for _ in range(2)]
        self.ahead: Ahead | None = None
        self.last_tokens: list[int] = []
        self.started_ahead = self.used_ahead = 0

    def forget(self) -> None:
        """Drop what was recorded: the weights change."""
        if self.recorded and self.on_gpu:
            torch.cuda.synchronize()  # a graph that runs is not to be taken apart
        self.recorded.clear()
        self.pool = None  # its memory went with the last graph in it
        self.ahead = None

    def run(self, batch: StepBatch) -> torch.Tensor | list[int] | None:
        """Logits of a decode step, or its tokens where a greedy batch needs no more; None: to be
        run eagerly."""
        count = len(batch.spans)
        size = next((size for size in GRAPH_SIZES if size >= count), None)
        if size is None or not self._ready(batch, size):
            self.ahead = None
            return None
        recorded, ahead = self.recorded[size], self.ahead
        self.ahead = None
        place = 0
        if ahead is not None and ahead.is_asked_for(batch, self.last_tokens):
            place = ahead.place
            self.used_ahead += 1
        else:
            self._fill(batch, size)
            recorded.replay()
            if not self._returns_tokens(batch, recorded):
                return recorded.logits[:count]
            self._fetch(recorded, place)
        self._start_next(batch, size, 1 - place)
        if self.on_gpu:
            self.arrived[place].synchronize()
        self.last_tokens = self.host_tokens[place, :count].tolist()
        return self.last_tokens

    def _ready(self, batch: StepBatch, size: int) -> bool:
        if size in self.recorded:
            return True
        self.seen[size] = self.seen.get(size, 0) + 1
        if self.seen[size] <= EAGER_STEPS:
            return False
        self._fill(batch, size)  # recording runs the step, on numbers that are valid
        self.recorded[size] = self._best(size)
        return True

    # ---- ahead -------------------------------------------------------------------------------

    @staticmethod
    def _returns_tokens(batch: StepBatch, recorded: Recorded) -> bool:
        return batch.greedy and recorded.tokens is not None

    def _fetch(self, recorded: Recorded, place: int) -> None:
        assert recorded.tokens is not None
        size = recorded.tokens.shape[0]
        self.host_tokens[place, :size].copy_(recorded.tokens, non_blocking=True)
        if self.on_gpu:
            self.arrived[place].record()

    def _start_next(self, batch: StepBatch, size: int, place: int) -> None:
        """Start the step after a greedy one, where every row stays in its page and goes on."""
        page = self.runner.cache.page_tokens
        if not batch.goes_on or any(span.num_keys % page == 0 for span in batch.spans):
            return
        recorded = self.recorded[size]
        recorded.replay()
        self._fetch(recorded, place)
        keys = [span.num_keys + 1 for span in batch.spans]
        self.ahead = Ahead(size, place, keys, [list(span.pages) for span in batch.spans])
        self.started_ahead += 1

    # ---- a step ------------------------------------------------------------------------------

    def _fill(self, batch: StepBatch, size: int) -> None:
        self.numbers.fill(batch.spans, batch.token_ids, size)
        self.device[:size].copy_(self.numbers.host[:size], non_blocking=True)

    def _step(self, size: int, forward: Forward) -> tuple[torch.Tensor, torch.Tensor | None]:
        numbers = self.device[:size]
        token, position, slot, keys = (numbers[:, column] for column in range(4))
        if forward.joined is None:  # the others' kernels take them packed
            token, position, slot, keys = (x.contiguous() for x in (token, position, slot, keys))
        batch = DeviceBatch(
            slots_P=slot,
            num_decoding=size,
            decode_seqlens_B=keys,
            decode_table_BU=numbers[:, FRONT:],
        )
        attend = DeviceAttention(self.runner.cache, batch)
        logits = self.runner.whole_vocabulary(forward.decode(token, position, attend))
        if size > AHEAD_SIZE:
            return logits, None
        return logits, (forward.joined or ref).choose(logits, numbers)

    # ---- recording ---------------------------------------------------------------------------

    def _best(self, size: int) -> Recorded:
        """The step recorded; unless of many sequences in every way there is, and the fastest kept
        of those that give the first one's logits."""
        first = self._record(size, self.runner.forward)
        if size > WAYS_SIZE or not self.on_gpu or self.runner.group is not None:
            return first
        found = {"matmuls": first}
        times = self.times_ms[size] = {"matmuls": self._time_ms(first)}
        self._try(size, self._other_ways(size), found)
        if size <= AHEAD_SIZE:
            for more in (self._asking_ways, self._head_ways):
                best = fastest(times, found)
                self._try(size, more(best, found[best]), found)
        return found[fastest(times, found)]

    def _try(
        self,
        size: int,
        ways: Iterator[tuple[str, Callable[[], Forward]]],
        found: dict[str, Recorded],
    ) -> None:
        """Record and time ways; those that are right are found."""
        want = self._logits(found["matmuls"])
        for name, forward in ways:
            if name in self.refused:
                continue
            try:
                recorded = self._record(size, forward())
            except Exception as error:  # what is recorded already serves
                self.refused[name] = f"{type(error).__name__}: {error}"
                continue
            self.times_ms[size][name] = self._time_ms(recorded)
            if is_alike(self._logits(recorded), want):
                found[name] = recorded
            else:
                self.refused[name] = "its logits are not those of the first way"

    @staticmethod
    def _asking_ways(name: str, best: Recorded) -> Iterator[tuple[str, Callable[[], Forward]]]:
        """A way, its small kernels asking for the weights to come."""
        forward = best.forward
        if isinstance(forward, DeviceForward) and forward.overlaps and forward.joined is not None:
            for how in ASKINGS:
                yield f"{name}, {how}", partial(forward.asking, how)

    @staticmethod
    def _head_ways(name: str, best: Recorded) -> Iterator[tuple[str, Callable[[], Forward]]]:
        """A way of one row by matmuls, its head by the kernel of one row."""
        forward, one = best.forward, best.logits.shape[0] == 1
        if one and isinstance(forward, DeviceForward) and not isinstance(forward, RowForward):
            for config in row_configs() if forward.overlaps else ():
                tile = f"{config.block_n}x{config.block_k}"
                yield f"{name}, head {tile}", partial(forward.with_head, config)

    def _other_ways(self, size: int) -> Iterator[tuple[str, Callable[[], Forward]]]:
        """Ways to compute a step of so many single tokens, beside the runner's own."""
        forward = self.runner.forward
        assert isinstance(forward, DeviceForward)
        overlap = torch.cuda.get_device_capability(self.runner.device) >= (9, 0)
        if size > AHEAD_SIZE and not overlap:
            return
        rows = RowForward.of(forward) if size == 1 else None

        @cache
        def tuned() -> RowForward:
            assert rows is not None
            return rows.with_configs(self._row_configs(rows, overlap), overlap=overlap)

        ways: dict[str, Callable[[], DeviceForward]] = {
            "matmuls": forward.overlapped if overlap else partial(copy, forward)
        }
        if rows is not None:
            ways["rows"] = tuned
        for kind, way in ways.items():
            name = f"{kind}, overlapped" if overlap else kind
            for config in attend_configs(size):
                yield (
                    f"{name}, joined {config}",
                    lambda way=way, config=config: way().joining(size, config),
                )
            if name != "matmuls":
                yield name, way

    def _row_configs(self, rows: RowForward, overlap: bool) -> dict[str, Any]:
        """The fastest config of each of a row's kernels on this model's weights."""
        chosen: dict[str, Any] = {}
        for name in PARTS:
            times = {
                config: self._call_ms(rows.calls(name, config))
                for config in (replace(c, overlap=overlap) for c in row_configs())
            }
            chosen[name] = min(times, key=times.__getitem__)
        return chosen

    def _call_ms(self, call: Callable[[], None]) -> float:
        """Median milliseconds of a call's kernels, replayed."""
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        return median_ms(graph.replay)

    def _logits(self, recorded: Recorded) -> torch.Tensor:
        """Of the numbers that are in the buffer."""
        kept = self.device.clone()
        recorded.replay()
        logits = recorded.logits.float().clone()
        self.device.copy_(kept)
        return logits

    def _time_ms(self, recorded: Recorded) -> float:
        """Median milliseconds of a replay. The numbers move on with each: they are put back."""
        kept = self.device.clone()
        found = median_ms(recorded.replay, lambda: self.device.copy_(kept))
        self.device.copy_(kept)
        return found

    def _record(self, size: int, forward: Forward) -> Recorded:
        if not self.on_gpu:
            return self._plain(size, forward)
        kept = self.device.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(size, forward)  # kernels compile and libraries allocate outside
        torch.cuda.current_stream().wait_stream(side)
        self.device.copy_(kept)
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's, a loader's) go on with calls of their own meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            logits, tokens = self._step(size, forward)
        self.pool = self.pool or graph.pool()
        return Recorded(graph.replay, logits, tokens, forward)

    def _plain(self, size: int, forward: Forward) -> Recorded:
        """A recording without a graph: every replay is a call that writes the same tensors."""
        kept = self.device.clone()
        logits, tokens = self._step(size, forward)
        self.device.copy_(kept)

        def replay() -> None:
            new_logits, new_tokens = self._step(size, forward)
            logits.copy_(new_logits)
            if tokens is not None and new_tokens is not None:
                tokens.copy_(new_tokens)

        return Recorded(replay, logits, tokens, forward)


def fastest(times_ms: Mapping[str, float], right: Collection[str]) -> str:
    """The way to take: the first one, unless another that is right is clearly faster."""
    first = next(iter(times_ms))
    best = min(right, key=times_ms.__getitem__, default=first)
    return best if times_ms[best] < (1 - LEAST_GAIN) * times_ms[first] else first


def is_alike(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether logits are others' within what 16 bits make of another order of sums."""
    gap = (got - want).square().mean().sqrt()
    return bool(gap <= LOGITS_GAP * want.std())


def median_ms(replay: Callable[[], None], before: Callable[[], object] | None = None) -> float:
    """Median milliseconds of a few replays; before: what is done first each time, not timed."""
    times: list[float] = []
    for _ in range(TRIALS):
        if before is not None:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
