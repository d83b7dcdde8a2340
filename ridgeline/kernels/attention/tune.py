"""Finding the fastest tile of the Triton attention kernels on the device at hand.

Every candidate (config.py) is compiled, run once and compared with the shipped tile's result; those
that run and agree are timed, the fastest few again and by turns. The shipped tile is kept unless
another is faster by more than the noise. Candidates nearest to the shipped tile come first, are
compiled beside each other and timed as they come, until the time is over.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from typing import Any

import torch

from ridgeline.core.arch import Arch
from ridgeline.core.dtypes import torch_dtype
from ridgeline.core.progress import Advance
from ridgeline.kernels.attention import triton as kernels
from ridgeline.kernels.attention.config import (
    DecodeConfig,
    TileConfig,
    backward_config,
    candidates,
    decode_candidates,
    decode_config,
    forward_tile,
    tuning_key,
)
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions, AttentionProblem
from ridgeline.kernels.attention.triton_plan import (
    Inputs,
    Launch,
    compile_for,
    inputs_of,
    interpreted,
    problem_of,
)

Config = TileConfig | DecodeConfig
Run = Callable[[], None]
Timer = Callable[[Sequence[Run], int], list[float]]
"""(runs, repetitions) -> median microseconds of each; the runs take turns."""

FINALISTS, FIRST_REPS, FINAL_REPS = 5, 3, 25
LONGEST_WAIT = 600.0
"""Seconds for one more tile to compile, whatever the deadline: a process may have died."""
NOISE = 0.01
"""A tile must beat the shipped one by this share of its time."""
DIFFERENCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest norm of the difference from the shipped tile's result over that result's norm: rounding
of P and dS to the inputs' dtype, in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was found for one kernel."""

    kernel: str
    key: str
    shipped: Config
    shipped_us: float
    best: Config
    best_us: float
    tried: int
    failed: int
    """Candidates that did not compile, run or agree."""
    left: int
    """Candidates that there was no time for."""


def problem_inputs(problem: AttentionProblem, device: str) -> Inputs:
    """Random tensors that pose a problem; on a CPU left unwritten, for compiling only."""
    p = problem
    make = torch.empty if device == "cpu" and not interpreted() else torch.randn
    fill = partial(make, dtype=torch_dtype(p.dtype), device=device)

    def tokens(count: int, heads: int, dim: int) -> torch.Tensor:
        packed = (p.batch * count, heads, dim)
        return fill(packed if p.varlen else (p.batch, count, heads, dim))

    kind: dict[str, Any] = {}
    if p.varlen:
        for side, longest in (("q", p.seqlen_q), ("k", p.seqlen_k)):
            starts = torch.arange(p.batch + 1, dtype=torch.int32, device=device) * longest
            kind |= {f"cu_seqlens_{side}": starts, f"max_seqlen_{side}": longest}
    k, v = (tokens(p.seqlen_k, p.kv_heads, dim) for dim in (p.head_dim, p.head_dim_v))
    if p.page_size is not None or p.kv_cache:
        used = torch.full((p.batch,), p.seqlen_k, dtype=torch.int32, device=device)
        kind["seqused_k"] = used
    if p.page_size is not None:
        pages = -(-p.seqlen_k // p.page_size)
        k, v = (
            fill((p.batch * pages, p.page_size, p.kv_heads, dim))
            for dim in (p.head_dim, p.head_dim_v)
        )
        kind["page_ids_BU"] = torch.randperm(p.batch * pages, device=device).int().view(p.batch, -1)
    if p.sinks:
        kind["sinks_H"] = torch.randn(p.heads, device=device)
    if p.alibi:
        kind["alibi_slopes"] = torch.rand(p.heads, device=device)
    if p.bias:
        kind["bias"] = fill((1, 1, p.seqlen_q, p.seqlen_k))
    options = AttentionOptions(
        softmax_scale=p.head_dim**-0.5,
        causal=p.causal,
        window_left=p.window_left,
        window_right=p.window_right,
        softcap=p.softcap,
        dropout_p=0.1 if p.dropout else 0.0,
    )
    q = tokens(p.seqlen_q, p.heads, p.head_dim)
    return inputs_of(q, k, v, options, AttentionExtras(**kind))


class Bench:
    """The tensors of a problem, and one kernel's launches and results with any tile.

    Head dims that the shipped tile has padded in memory are so here too: the padding is not timed.
    """

    def __init__(self, problem: AttentionProblem, kernel: str, device: str) -> None:
        self.kernel, self.x = kernel, problem_inputs(problem, device)
        shipped = shipped_config(problem, kernels.arch_of(self.x.q.device), kernel)
        if isinstance(shipped, TileConfig) and kernels.needs_widening(self.x, shipped):
            self.x = kernels.widened(self.x)
        self.out, self.lse = kernels.forward_outputs(self.x, cleared=True)
        self.backward = None
        if kernel in ("dkdv", "dq"):
            self.backward = self._backward()

    def _backward(self) -> kernels.BackwardPlan:
        x = self.x
        seen = problem_of(x, "bwd")
        arch = kernels.arch_of(x.q.device)
        runs = x.q.is_cuda or interpreted()  # else only the shapes matter
        if runs:
            _run_all(kernels.plan_forward(x, self.out, self.lse, forward_tile(seen, arch, {})))
        dout = torch.randn_like(self.out) if runs else torch.empty_like(self.out)
        tiles = backward_config(seen, arch, {})
        plan = kernels.BackwardPlan(x, dout, None, self.out, self.lse, tiles)
        if runs:
            _run_all(plan.rows())
        return plan

    def launches(self, config: Config) -> list[Launch]:
        """What the kernel launches with a tile."""
        if isinstance(config, DecodeConfig):
            return kernels.plan_decode(self.x, self.out, self.lse, config)
        if self.backward is not None:
            return self.backward.launch(self.kernel, config)
        return kernels.plan_forward(self.x, self.out, self.lse, config)

    def results(self) -> list[torch.Tensor]:
        """What the kernel wrote."""
        if self.backward is None:
            return [self.out]
        plan = self.backward
        return [plan.dq] if self.kernel == "dq" else [plan.dk, plan.dv]


def shipped_config(problem: AttentionProblem, arch: Arch, kernel: str) -> Config:
    """The tile without tuning."""
    if kernel == "decode":
        return decode_config(problem, arch, tuned={})
    if kernel == "fwd":
        return forward_tile(problem, arch, {})
    return getattr(backward_config(problem, arch, {}), kernel)


def configs_of(problem: AttentionProblem, arch: Arch, kernel: str) -> list[Config]:
    """The shipped tile, then every other candidate, those nearest to it first."""
    shipped = shipped_config(problem, arch, kernel)
    found: Iterator[Config] = (
        decode_candidates(problem, arch)
        if kernel == "decode"
        else candidates(problem, arch, kernel)
    )
    return sorted(dict.fromkeys([shipped, *found]), key=partial(_changes, shipped))


def _changes(shipped: Config, config: Config) -> int:
    """In how many fields a config is another."""
    if isinstance(shipped, DecodeConfig) and isinstance(config, DecodeConfig):
        return _changes(shipped.tile, config.tile) + (shipped.num_splits != config.num_splits)
    return sum(a != b for a, b in zip(astuple(shipped), astuple(config), strict=True))


def tune_kernel(
    problem: AttentionProblem,
    arch: Arch,
    kernel: str,
    timer: Timer,
    *,
    workers: int = 0,
    seconds: float = float("inf"),
    advance: Advance,
) -> Outcome:
    """Time the candidates of one kernel (fwd, dkdv, dq, decode) on the device at hand.

    workers: processes that compile (0: none). seconds: candidates that are not compiled by then
    are left; the fastest of the others is taken. `advance` is called once a candidate.
    """
    deadline = time.monotonic() + seconds
    shipped, *others = configs_of(problem, arch, kernel)
    bench = Bench(problem, kernel, "cpu" if interpreted() else "cuda")
    run = _working(bench, shipped, None, 0.0)
    assert run is not None
    runs: dict[Config, Run] = {shipped: run}
    times = {shipped: timer([run], FIRST_REPS)[0]}
    expected = [result.clone() for result in bench.results()]
    advance(note=f"{kernel}: {times[shipped]:.1f} us")
    tried = 1
    jobs = partial(_compile, problem, kernel, int(arch.name[2:]))
    for config in compiled(jobs, others, 0 if interpreted() else workers, deadline):
        tried += 1
        run = _working(bench, config, expected, DIFFERENCE[problem.dtype])
        if run is not None:
            runs[config] = run
            times[config] = timer([run], FIRST_REPS)[0]
        advance(note=f"{kernel}: {min(times.values()):.1f} us")
    if left := len(others) + 1 - tried:
        advance(left, note=f"{kernel}: time is over")
    last = sorted(times, key=lambda config: times[config])[:FINALISTS]
    last = [shipped, *(config for config in last if config != shipped)]
    final = dict(zip(last, timer([runs[c] for c in last], FINAL_REPS), strict=True))
    best = min(final, key=lambda config: final[config])
    if final[best] > (1 - NOISE) * final[shipped]:
        best = shipped
    return Outcome(
        kernel=kernel,
        key=tuning_key(problem, kernel),
        shipped=shipped,
        shipped_us=final[shipped],
        best=best,
        best_us=final[best],
        tried=tried,
        failed=tried - len(runs),
        left=left,
    )


def entry(outcome: Outcome) -> dict[str, Any]:
    """What the user cache keeps of an outcome."""
    return {
        "config": asdict(outcome.best),
        "us": round(outcome.best_us, 3),
        "shipped_us": round(outcome.shipped_us, 3),
    }


def _working(
    bench: Bench, config: Config, expected: list[torch.Tensor] | None, limit: float
) -> Run | None:
    """The kernel with a tile, to be called again and again; None where it does not run or agree.
    The first, with nothing to agree with, has to run."""
    try:
        launches = bench.launches(config)
        for result in bench.results():
            result.fill_(float("nan"))  # what a tile does not write, it has not computed
        _run_all(launches)
        if bench.x.q.is_cuda:
            torch.cuda.synchronize()
    except Exception:  # a candidate may need more than the device has: the compiler says so
        if expected is None:
            raise
        return None
    for got, want in zip(bench.results(), expected or (), strict=False):
        difference = (got.float() - want.float()).norm()
        if not difference <= limit * want.float().norm():
            return None
    return captured(launches) if bench.x.q.is_cuda else partial(_run_all, launches)


def _run_all(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch.run()


def captured(launches: Sequence[Launch]) -> Run:
    """Launches as a CUDA graph: no host time between them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _run_all(launches)
    return partial(_replay, graph, launches)


def _replay(graph: torch.cuda.CUDAGraph, _alive: Sequence[Launch]) -> None:
    """Run a graph whose launches, and with them their buffers, are kept."""
    graph.replay()


def device_timer(arch: Arch) -> Timer:
    """Medians by CUDA events from a cold L2; by the clock under the interpreter."""
    if interpreted():
        return _clock
    flush = torch.empty(max(4 * arch.l2_bytes, 2**26), dtype=torch.int8, device="cuda")

    def timer(runs: Sequence[Run], repetitions: int) -> list[float]:
        events: list[list[Any]] = [[] for _ in runs]
        for _ in range(repetitions):
            for run, pairs in zip(runs, events, strict=True):
                flush.zero_()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                end.record()
                pairs.append((start, end))
        torch.cuda.synchronize()
        return [statistics.median(s.elapsed_time(e) * 1e3 for s, e in pairs) for pairs in events]

    return timer


def _clock(runs: Sequence[Run], repetitions: int) -> list[float]:
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repetitions):
        for run, mine in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            mine.append((time.perf_counter() - start) * 1e6)
    return [statistics.median(mine) for mine in times]


def compiled(
    job: Callable[[Config], Config], configs: Sequence[Config], workers: int, deadline: float
) -> Iterator[Config]:
    """Configs in the order in which processes of their own, without the GPU, have compiled them,
    until the deadline (of time.monotonic); without workers as given. Triton's cache on disk carries
    them over.
    """
    if not workers:
        for config in configs:
            if time.monotonic() > deadline:
                return
            yield config
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:  # left: ended, not awaited
        done = pool.imap_unordered(job, configs)
        for _ in configs:
            wait = max(0.0, min(deadline - time.monotonic(), LONGEST_WAIT))
            try:
                yield done.next(wait)
            except multiprocessing.TimeoutError:
                return


def _compile(problem: AttentionProblem, kernel: str, capability: int, config: Config) -> Config:
    torch.set_num_threads(1)
    with contextlib.suppress(Exception):  # it fails again, and is counted, where it is to run
        for launch in Bench(problem, kernel, "cpu").launches(config):
            compile_for(launch, capability)
    return config
