"""Layouts of N GPUs of one host in one run: parity in bf16, speed, checkpoints across layouts.

    torchrun --nproc-per-node 4 benchmarks/parallel/run_3d.py
    torchrun --nproc-per-node 4 benchmarks/parallel/run_3d.py --parts speed --only DP2 TP4+SP
    torchrun --nproc-per-node 4 benchmarks/parallel/run_3d.py --device cpu --tiny --out /tmp/rows
    torchrun --nproc-per-node 2 benchmarks/parallel/run_3d.py --share-gpu --parts verify parity

links       bandwidth of the collectives that layouts use, between all ranks
verify      a tiny model in fp32, every layout against one process, tensor by tensor; on GPUs with
            heads that Triton's attention takes and with heads that only the reference takes
parity      a small model in bf16, AdamW, every layout on the same global batches: losses of all
            steps against data parallel, next to controls (data parallel with the batch in other
            orders, which differ in nothing but the order of sums), gradient norms of all steps
            against fp32 at the same parameters, next to what data parallel's are off, and
            every parameter's first gradient against fp32, no farther from it than twice what data
            parallel in bf16 is
speed       one row a layout: seconds of a step (median of several), MFU under both countings over
            989 TFLOP/s, peak memory, and where the step's time goes (profiled apart)
large       the same of a 32B shape under two layouts
checkpoint  saved under the first layout, read under each other one, compared bit by bit

With --share-gpu all ranks sit on one GPU and talk by gloo through host memory: nothing is timed,
but layouts are compared on a GPU's kernels where there is but one.

Rows go to <out>/<gpu>x<N>/train.jsonl (one GPU: <out>/<gpu>), each as soon as it is measured.
Layouts that would not fit are named and left out; a phase that takes longer than --hang-s ends the
run with every thread's stack, so that a hang costs no more. benchmarks/parallel/h200.sh calls this
script once a layout: what fails takes nothing else with it.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import gc
import itertools
import json
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ridgeline.core import env, progress
from ridgeline.kernels.attention.arguments import Arguments
from ridgeline.kernels.attention.dispatch import module_for
from ridgeline.nn.config import DecoderConfig
from ridgeline.parallel import mesh, storage
from ridgeline.parallel.layout import Layout, check_layout
from ridgeline.parallel.mesh import World, build_world
from ridgeline.parallel.model import ModelOptions, ParallelModel
from ridgeline.parallel.verify import (
    RandomBatch,
    agree_on_failure,
    compare,
    random_batch,
    workload,
)
from ridgeline.train.checkpoint import run_state
from ridgeline.train.config import LogConfig, OptimConfig
from ridgeline.train.optim import PartOptimizer
from ridgeline.train.presets import PRESETS
from ridgeline.train.profile import StepProfiler
from ridgeline.train.ranks import Ranks

ROOT = Path(__file__).parents[2]
PEAK_TFLOPS = 989.0
"""The datasheet's dense bf16 rate of an H100 or H200, which published MFU figures divide by."""
SMALL = DecoderConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1408,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    max_seqlen=8192,
    tie_embeddings=True,
)
TINY = replace(
    SMALL,
    vocab_size=67,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
RECOMPUTED = ("none", "selective", "full")
_KEPT: list[Any] = []
"""Of ranks that share a GPU: what must live as long as the process."""
LLAMA_32B = replace(
    PRESETS["llama-8b"],
    hidden_size=5120,
    intermediate_size=27648,
    num_layers=64,
    num_heads=40,
    num_kv_heads=8,
)
"""The shape of a published 32B (Qwen2.5), with Llama 3's vocabulary."""


def parity_layouts(ranks: int) -> list[Layout]:
    """Every kind of layout of so many ranks, the reference (data parallel) first."""
    half = ranks // 2
    found = [Layout(dp_shard=ranks), Layout(tp=ranks, sequence_parallel=True), Layout(cp=ranks)]
    found += (
        [
            Layout(dp_shard=half, tp=2, sequence_parallel=True),
            Layout(dp_shard=half, pp=2, num_microbatches=4),
            Layout(tp=half, pp=2, num_microbatches=4, sequence_parallel=half > 1),
        ]
        if half > 1
        else [Layout(pp=2, num_microbatches=4)]
    )
    if ranks >= 4:
        found.append(Layout(dp_replicate=2, dp_shard=half))
    if ranks >= 8:
        found.append(
            Layout(dp_shard=ranks // 4, tp=2, pp=2, num_microbatches=4, sequence_parallel=True)
        )
    return found


def speed_layouts(ranks: int, cuda: bool) -> list[Layout]:
    """What is timed: the same kinds, with what each needs to run well. What is recomputed is chosen
    for each by the memory it leaves (`fitted`)."""
    more: dict[str, Any] = {"compile_blocks": cuda}
    many = 16 if cuda else 4
    half = ranks // 2
    if ranks == 1:
        return [Layout(num_microbatches=1, **more)]
    found = [
        Layout(dp_shard=ranks, num_microbatches=2, **more),
        Layout(tp=ranks, sequence_parallel=True, num_microbatches=2, **more),
    ]
    if half == 1:
        return [*found, Layout(pp=2, num_microbatches=many, **more)]
    found += [
        Layout(dp_shard=half, tp=2, sequence_parallel=True, num_microbatches=2, **more),
        Layout(dp_shard=half, pp=2, num_microbatches=many, **more),
        Layout(tp=half, pp=2, sequence_parallel=True, num_microbatches=many, **more),
    ]
    if ranks >= 8:
        found.append(
            Layout(
                dp_shard=ranks // 4,
                tp=2,
                pp=2,
                sequence_parallel=True,
                num_microbatches=many,
                **more,
            )
        )
    return found


def compared_layouts(args: argparse.Namespace, ranks: int) -> list[Layout]:
    """The layouts whose numbers are compared; with --async-tp the reference and those that can
    overlap tensor parallel."""
    layouts = parity_layouts(ranks)
    if not args.async_tp:
        return layouts
    able = [x for x in layouts if x.sequence_parallel and x.pp == 1]
    return [layouts[0], *(replace(x, compile_blocks=True, async_tp=True) for x in able)]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the script")
    parts = ("links", "verify", "parity", "speed", "large", "checkpoint")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on one GPU, by gloo")
    parser.add_argument("--only", nargs="+", default=(), help="layouts by their printed name")
    parser.add_argument("--model", choices=sorted(PRESETS), default="llama-8b")
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument(
        "--checkpointing",
        choices=RECOMPUTED,
        help="what is recomputed (default: the least that is predicted to fit)",
    )
    parser.add_argument("--samples", type=int, default=1, help="samples of a micro-batch")
    parser.add_argument("--microbatches", type=int, help="instead of the layouts' own number")
    parser.add_argument("--async-tp", action="store_true", help="overlap of tensor parallel")
    parser.add_argument(
        "--state",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of masters and AdamW's moments",
    )
    parser.add_argument("--steps", type=int, default=6, help="timed steps a layout")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of verify")
    parser.add_argument("--budget-gib", type=float, default=126.0, help="memory of a GPU")
    parser.add_argument("--hang-s", type=float, default=40.0, help="longest step of a layout")
    parser.add_argument("--build-s", type=float, default=100.0, help="longest build and first step")
    parser.add_argument("--commit", help="of the code, where git does not know it")
    parser.add_argument("--checkpoint-model", choices=sorted(PRESETS), default="llama-1b")
    parser.add_argument("--checkpoint-dir", type=Path, help="where the checkpoint is written")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(argv)
    if args.share_gpu and {*args.parts} - {"verify", "parity"}:
        parser.error("--share-gpu takes --parts verify and parity: the others are timed")
    return args


class Run:
    """What all parts share."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.ranks = dist.get_world_size()
        self.cuda = device.type == "cuda"
        self.talk = dist.new_group(backend="gloo")
        self.first = dist.get_rank() == 0
        self.failures: list[str] = []
        self.common = self._common()

    def _common(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name(self.device) if self.cuda else "cpu"
        short = next((part for part in name.lower().split() if part[:1] in "hab"), "cpu")
        alone = self.args.share_gpu
        return {
            "op": "train",
            "impl": "ridgeline",
            "run": uuid.uuid4().hex[:12],
            "gpu": short if self.cuda and (alone or self.ranks == 1) else f"{short}x{self.ranks}",
            **({"ranks_on_a_gpu": self.ranks, "transfers": "gloo"} if alone else {}),
            "dtype": "bfloat16",
            "commit": self.args.commit or _commit(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "date": datetime.date.today().isoformat(),
        }

    def phase(self, seconds: float | None = None) -> None:
        """What follows ends within so many seconds (default: --hang-s), or the process ends with
        its stacks: torchrun then ends the others."""
        if self.cuda:
            faulthandler.dump_traceback_later(seconds or self.args.hang_s, exit=True)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row."""
        if not self.first:
            return
        folder = self.args.out / self.common["gpu"]
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "train.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({**self.common, **row}) + "\n")
            file.flush()

    def say(self, text: str) -> None:
        """Rank 0 speaks."""
        if self.first:
            progress.say(text)

    def wanted(self, layout: Layout) -> bool:
        """Whether --only names it or names nothing."""
        return not self.args.only or layout.describe() in self.args.only

    def wait(self) -> None:
        """Until the device has done all of it."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def free(self, world: World) -> None:
        """Give back a layout's memory and groups."""
        world.close()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


class _Staged:
    """Transfers between ranks through host memory, where they share a GPU: gloo sends no other."""

    real = dist.batch_isend_irecv

    def __init__(self, operations: list[dist.P2POp]) -> None:
        self._coming: list[tuple[torch.Tensor, torch.Tensor]] = []
        staged = []
        for each in operations:
            host = each.tensor.detach().to("cpu", copy=True)
            if each.op is dist.irecv:
                self._coming.append((each.tensor.detach(), host))
            staged.append(dist.P2POp(each.op, host, each.peer, each.group, each.tag))
        self._works = _Staged.real(staged)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for tensor, host in self._coming:
            tensor.copy_(host)


def _gathered(x: torch.Tensor, size: int, name: str) -> torch.Tensor:
    """_c10d_functional.all_gather_into_tensor through host memory."""
    whole = torch.empty((size * x.shape[0], *x.shape[1:]), dtype=x.dtype)
    group = distributed_c10d._resolve_process_group(name)
    dist.all_gather_into_tensor(whole, x.detach().to("cpu", copy=True).contiguous(), group)
    return whole.to(x.device)


def stage_transfers(key: str = "CUDA") -> torch.library.Library:
    """Let the layouts' transfers between ranks go through host memory, and the one functional
    collective that gloo has for host memory alone; in force while what is returned is kept."""
    dist.batch_isend_irecv = lambda operations: [_Staged(operations)]
    staged = torch.library.Library("_c10d_functional", "IMPL")
    staged.impl("all_gather_into_tensor", _gathered, key)
    return staged


def start_sharing(timeout_s: float) -> torch.device:
    """Join the processes that torchrun started, all on the first GPU."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    _KEPT.append(stage_transfers())
    mesh.open_backward_thread(device)
    return device


def options(layout: Layout, seqlen: int, samples: int, master: str = "float32") -> ModelOptions:
    """What a layout's model is built for."""
    return ModelOptions(
        seqlen=seqlen,
        micro_batch_samples=samples,
        num_microbatches=layout.num_microbatches or 1,
        compute_dtype=torch.bfloat16,
        master_dtype=getattr(torch, master),
    )


# ---- links and exactness -----------------------------------------------------------------------


def links(run: Run) -> None:
    """One row: GB/s a rank moves in each collective, counted as in a ring (n - 1 of n parts)."""
    count = 2**12 if run.args.tiny else 2**26
    whole = torch.ones(count * run.ranks, dtype=torch.bfloat16, device=run.device)
    piece, share = whole[:count].clone(), 2 * count * (run.ranks - 1)
    peer, source = (dist.get_rank() + 1) % run.ranks, (dist.get_rank() - 1) % run.ranks

    def ring() -> None:
        pair = (dist.P2POp(dist.isend, piece, peer), dist.P2POp(dist.irecv, whole[:count], source))
        for work in dist.batch_isend_irecv(list(pair)):
            work.wait()

    moves: dict[str, tuple[Callable[[], Any], float]] = {
        "all_reduce": (lambda: dist.all_reduce(whole), 2 * share),
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, piece), share),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(piece, whole), share),
        "send_recv": (ring, 2 * count),
    }
    rates: dict[str, float] = {}
    for name, (move, moved_bytes) in moves.items():
        run.phase()
        move()
        run.wait()
        start = time.perf_counter()
        for _ in range(1 if run.args.tiny else 10):
            move()
        run.wait()
        rates[name] = moved_bytes * (1 if run.args.tiny else 10) / (time.perf_counter() - start)
        whole.fill_(1.0)
    told = {name: float(f"{rate / 1e9:.6g}") for name, rate in rates.items()}
    run.say(f"links: GB/s a rank {told}")
    run.write({"model": "links", "links_gbps": told, "bytes": 2 * count * run.ranks})


def attention_of(
    run: Run, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, tokens: int
) -> str:
    """The implementation that takes a model's attention in the backward pass."""
    q, k = (torch.empty(tokens, count, head_dim, dtype=dtype, device=run.device) for count in heads)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=run.device)
    cuts: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    cuts |= {"max_seqlen_q": tokens, "max_seqlen_k": tokens}
    a = Arguments(q=q, k=k, v=k, softmax_scale=1.0, causal=True, needs_grad=True, **cuts)
    return module_for(a, "bwd").__name__.rpartition(".")[2]


def verify(run: Run) -> None:
    """Every layout in fp32 against a plain decoder: loss, norm, each gradient, each weight."""
    split = [Layout(pp=2, num_microbatches=4, schedule=name) for name in ("zero_bubble", "zbv")]
    split = split if run.ranks == 2 and not run.args.async_tp else []
    for layout in compared_layouts(run.args, run.ranks) + split:
        if not run.wanted(layout):
            continue
        for head_dim in (64, 8) if run.cuda else (8,):
            for seed in range(run.args.seeds):
                verify_layout(run, layout, head_dim, seed)


def verify_layout(run: Run, layout: Layout, head_dim: int, seed: int) -> None:
    """One layout, shape and seed."""
    run.phase(run.args.build_s)
    seqlen, samples = 16 * run.ranks, layout.num_microbatches or 1
    heads = (2 * run.ranks, run.ranks)
    shape = replace(TINY, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)
    shape = replace(shape, hidden_size=shape.num_heads * shape.head_dim)
    attention = attention_of(run, torch.float32, heads, head_dim, seqlen)
    world = build_world(layout, run.device)
    build = replace(options(layout, seqlen, 2), compute_dtype=torch.float32)
    model = ParallelModel(shape, world, build)
    report = compare(
        model, batch_samples=2 * samples * layout.dp, steps=2, seed=seed, tolerance=1e-4
    )
    if report is not None:
        worst = f"{report.worst.error:.1e} ({report.worst.name}, step {report.worst.step})"
        of = f"{layout.describe():32} head dim {head_dim} ({attention}) seed {seed}"
        run.say(f"verify: {of} {worst} {'ok' if report.ok else 'DIFFERS'}")
        row = {"error": report.worst.error, "tensor": report.worst.name, "ok": report.ok}
        if report.first is not None:
            row |= {"first": report.first.name, "step": report.first.step}
        row |= {"head_dim": head_dim, "seed": seed, "attention": attention, "steps": 2}
        row |= {"compared": "loss, gradient norm, gradients and weights by name", "bound": 1e-4}
        run.write({"model": "verify", "layout": asdict(layout), "verify": row})
    if not agree_on_failure(report is None or report.ok):
        run.failures.append(f"verify {layout.describe()}")
    run.free(world)


# ---- parity ------------------------------------------------------------------------------------


Order = Callable[[list[int]], list[int]]
ORDERS: tuple[Order, ...] = (
    lambda whole: whole[::-1],
    lambda whole: whole[len(whole) // 2 :] + whole[: len(whole) // 2],
    lambda whole: whole[::2] + whole[1::2],
)
"""Of a batch's samples: the same sums, rounded otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a layout did on the same batches as the others."""

    losses: list[float]
    norms: list[float]
    """Of the gradient before clipping."""
    exact_norms: list[float]
    """The same in fp32, of the same parameters and samples under the same layout."""
    gradients: dict[str, torch.Tensor]
    """The first step's, whole, by name; on rank 0."""


def trace_of(
    run: Run,
    layout: Layout,
    shape: DecoderConfig,
    *,
    order: Order = list,
    dtype: torch.dtype = torch.bfloat16,
    steps: int | None = None,
) -> Trace:
    """A few AdamW steps on the same batches. order: the samples of a batch in another order.

    Where the steps are in bf16, a twin in fp32 is given the parameters of each step: rounding grows
    over the steps, so that norms of two runs part, but each is near to what fp32 says at its place.
    """
    seqlen, batch, all_steps = (
        (32, 2 * run.ranks, 2)
        if run.args.tiny
        else (1024, 4 * run.ranks, 8 if run.args.share_gpu else 20)
    )
    batch = max(batch, layout.dp * (layout.num_microbatches or 1))
    samples = batch // (layout.dp * (layout.num_microbatches or 1))
    check_layout(
        layout, workload(shape, seqlen, layout.num_microbatches or 1), world_size=run.ranks
    )
    run.phase(run.args.build_s)
    world = build_world(layout, run.device)
    build = replace(options(layout, seqlen, samples), compute_dtype=dtype)
    model = ParallelModel(shape, world, build)
    model.init_weights(0)
    optimizer = PartOptimizer(model.parameters_here().items(), OptimConfig())
    twin = None
    if dtype != torch.float32:
        twin = ParallelModel(shape, world, replace(build, compute_dtype=torch.float32))
        twin.init_weights(0)
    found = Trace(losses=[], norms=[], exact_norms=[], gradients={})
    for step in range(steps or all_steps):
        indices = list(range(step * batch, (step + 1) * batch))
        whole = random_batch(indices, seqlen, shape.vocab_size, 0)
        indices = order(indices)
        own = [
            random_batch(some, seqlen, shape.vocab_size, 0).to(run.device)
            for some in model.micro_batches(indices)
        ]
        found.losses.append(model.forward_backward(own, whole.num_valid).item())
        for name in model.all_names if step == 0 else ():
            gradient = model.full_gradient(name)
            if run.first:
                found.gradients[name] = gradient
        run.phase()
        if twin is not None:
            _copy_parameters(model, twin)
            twin.forward_backward(own, whole.num_valid)
            found.exact_norms.append(twin.clip(1.0).item())
            twin.zero_grad()
        found.norms.append(model.clip(1.0).item())
        optimizer.step(1e-3)
        model.zero_grad()
    run.free(world)
    return found


@torch.no_grad()
def _copy_parameters(source: ParallelModel, target: ParallelModel) -> None:
    """This rank's part."""
    values = source.parameters_here()
    for name, parameter in target.parameters_here().items():
        parameter.copy_(values[name])


def farthest(a: list[float], b: list[float]) -> float:
    """Largest relative difference of two series."""
    return max(abs(x - y) / max(abs(y), 1e-9) for x, y in zip(a, b, strict=True))


def spread(series: list[list[float]]) -> float:
    """Largest relative difference of any two series."""
    return max(farthest(*pair) for pair in itertools.permutations(series, 2))


def off(trace: Trace, exact: Trace) -> dict[str, float]:
    """How far each first gradient is from the exact one: |difference| over |exact|, L2."""
    return {
        name: float((trace.gradients[name] - whole).norm() / whole.norm().clamp_min(1e-30))
        for name, whole in exact.gradients.items()
    }


def judged(trace: Trace, reference: Trace, controls: list[Trace], exact: Trace) -> dict[str, Any]:
    """A layout's row. reference: data parallel in bf16; controls: it in other orders; exact: data
    parallel in fp32, one step. Losses may differ from the reference's by three times what any two
    of the reference and the controls do; at every step the norm may be three times as far from
    fp32's at the same parameters as those runs' norms are from theirs; a first gradient twice as
    far from fp32 as the reference's is; each with a small floor. How far norms of two runs part
    (`norm_apart`) is told and not judged: rounding grows over steps of 1e-3 on noise."""
    plain = [reference, *controls]
    told: dict[str, Any] = {"steps": len(trace.losses), "controls": len(controls)}
    told["error"] = farthest(trace.losses, reference.losses)
    told["control"] = spread([other.losses for other in plain])
    told["norm_error"] = farthest(trace.norms, trace.exact_norms)
    told["norm_control"] = max(farthest(other.norms, other.exact_norms) for other in plain)
    told["norm_apart"] = farthest(trace.norms, reference.norms)
    told["norm_apart_control"] = spread([other.norms for other in plain])
    told["norms"] = [[round(x, 5) for x in other.norms] for other in (trace, *plain)]
    told["first_norm_error"] = farthest(trace.norms[:1], exact.norms)
    told["first_norm_control"] = max(farthest(other.norms[:1], exact.norms) for other in plain)
    ours, theirs = off(trace, exact), off(reference, exact)
    ratios = {name: ours[name] / (2 * theirs[name] + 2e-3) for name in ours}
    worst = max(ratios, key=lambda name: ratios[name] if ratios[name] == ratios[name] else 1e30)
    told["gradients"] = len(ours)
    told |= {"gradient": worst, "gradient_error": ours[worst], "gradient_control": theirs[worst]}
    told["ok"] = (
        told["error"] <= 3 * told["control"] + 1e-3
        and told["norm_error"] <= 3 * told["norm_control"] + 2e-3
        and told["first_norm_error"] <= 3 * told["first_norm_control"] + 2e-3
        and ratios[worst] <= 1.0
    )
    told["compared"] = (
        "losses of all steps with data parallel; gradient norms of all steps with fp32 at the same "
        "parameters; the first gradient of every parameter with fp32, in L2"
    )
    return told


def parity(run: Run) -> None:
    """Every layout's losses, norms and gradients against data parallel's, and the controls."""
    shape = TINY if run.args.tiny else SMALL
    layouts = compared_layouts(run.args, run.ranks)
    exact = trace_of(run, layouts[0], shape, dtype=torch.float32, steps=1)
    reference = trace_of(run, layouts[0], shape)
    controls = [trace_of(run, layouts[0], shape, order=order) for order in ORDERS]
    heads = (shape.num_heads, shape.num_kv_heads)
    attention = attention_of(run, torch.bfloat16, heads, shape.head_dim, 1024)
    for layout in layouts[1:]:
        if not run.wanted(layout):
            continue
        trace = trace_of(run, layout, shape)
        if not run.first:
            if not agree_on_failure(True):
                run.failures.append(f"parity {layout.describe()}")
            continue
        told = judged(trace, reference, controls, exact) | {"attention": attention}
        run.say(
            f"parity: {layout.describe():32} loss {told['error']:.1e} (control "
            f"{told['control']:.1e}), norm {told['norm_error']:.1e} ({told['norm_control']:.1e}), "
            f"first norm {told['first_norm_error']:.1e} ({told['first_norm_control']:.1e}), "
            f"gradient {told['gradient_error']:.1e} ({told['gradient_control']:.1e}) "
            f"{told['gradient']} {'ok' if told['ok'] else 'TOO FAR'}"
        )
        run.write({"model": "parity", "layout": asdict(layout), "parity": told})
        if not agree_on_failure(told["ok"]):
            run.failures.append(f"parity {layout.describe()}")


# ---- speed -------------------------------------------------------------------------------------


def whole_batch(samples: int, seqlen: int, vocab_size: int, seed: int) -> RandomBatch:
    """Samples that are one document each, as pre-training at full length has them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (samples * seqlen + 1,), generator=generator)
    return RandomBatch(
        token_ids_P=ids[:-1],
        targets_P=ids[1:].clone(),
        position_ids_P=torch.arange(seqlen).repeat(samples),
        cu_seqlens=torch.arange(0, samples * seqlen + 1, seqlen, dtype=torch.int32),
        max_seqlen=seqlen,
        seqlens=(seqlen,) * samples,
        num_valid=samples * seqlen,
    )


def kept_bytes(shape: DecoderConfig, layout: Layout) -> float:
    """Bytes of activations a token and layer keep for the backward pass, over the model's width.

    none: block input, both norms' outputs, attention's and its output, the residual (6 widths),
    q, k, v and turned q, k, and gate, up and their product; compiled blocks make again what no
    product stands between. All in 2 bytes.
    """
    heads = shape.head_dim / shape.hidden_size
    q, kv = shape.num_heads * heads, shape.num_kv_heads * heads
    wide = shape.intermediate_size / shape.hidden_size
    if layout.activation_checkpointing == "full":
        return 2.0
    if layout.activation_checkpointing == "selective":
        return 2 * (3 + 2 * q + 2 * kv)
    if layout.compile_blocks:
        return 2 * (4 + 2 * q + 2 * kv + 2 * wide)
    return 2 * (6 + 3 * q + 3 * kv + 3 * wide)


def predicted_gib(
    layout: Layout, shape: DecoderConfig, seqlen: int, state: str, samples: int = 1
) -> float:
    """Memory of a rank's state and kept activations, roughly, GiB."""
    here = shape.num_params() / (layout.tp * layout.pp)
    shards = layout.dp_shard * layout.cp
    wide = 4 if state == "float32" else 2
    held = here / shards * (3 * wide + wide)  # master, two moments, gradient
    if layout.dp * layout.cp == 1:
        held += here * 2 * (wide == 4)  # the copies that run; a micro-batch's gradients pass by
    elif layout.zero == 3 and layout.pp == 1:
        held += 3 * here / shape.num_layers * 6  # a few blocks' parameters and gradients
        held += 6 * 2 * shape.vocab_size * shape.hidden_size / layout.tp  # embedding and head
    else:
        held += here * (2 + (0 if layout.reduces_each_micro_batch else 4))
    tokens = seqlen * samples / layout.cp / (layout.tp if layout.sequence_parallel else 1)
    layers = shape.num_layers / layout.pp
    alive = min(layout.pp, layout.num_microbatches or 1)
    held += tokens * shape.hidden_size * layers * alive * kept_bytes(shape, layout)
    # Of one block all is there at once, and a chunk's logits and their gradient.
    block = replace(layout, activation_checkpointing="none")
    held += 3 * tokens * shape.hidden_size * kept_bytes(shape, block)
    return (held + 6 * 2**30) / 2**30


def fitted(run: Run, layout: Layout, shape: DecoderConfig, seqlen: int) -> Layout | None:
    """A layout that recomputes no more than it must; None where nothing fits."""
    args = run.args
    kinds = (args.checkpointing,) if args.checkpointing else RECOMPUTED
    for kind in kinds:
        found = replace(layout, activation_checkpointing=kind)
        need = predicted_gib(found, shape, seqlen, args.state, args.samples)
        if not run.cuda or need <= args.budget_gib:
            return found
    run.say(f"speed: {layout.describe()} would need about {need:.0f} GiB: left out")
    return None


@torch.no_grad()
def fill(model: ParallelModel, seed: int) -> None:
    """Values of the right size, made on the device: a time does not hang on which they are, and
    fresh weights that no layout changes take a minute for 8 G parameters."""
    generator = torch.Generator(model.world.device).manual_seed(seed)
    for name, local in model.parameters_here().items():
        if name.endswith("norm.weight"):
            local.fill_(1.0)
        else:
            local.normal_(0.0, model.config.init_std, generator=generator)


def time_layout(
    run: Run, wanted: Layout, shape: DecoderConfig, seqlen: int, model_name: str
) -> None:
    """One row: time a layout's steps, then profile one."""
    args = run.args
    layout = fitted(run, wanted, shape, seqlen)
    if layout is None:
        return
    num_microbatches = layout.num_microbatches or 1
    check_layout(layout, workload(shape, seqlen, num_microbatches), world_size=run.ranks)
    run.phase(args.build_s)
    began = time.perf_counter()
    world = build_world(layout, run.device)
    model = ParallelModel(shape, world, options(layout, seqlen, args.samples, args.state))
    fill(model, run.talk.rank())
    optimizer = make_optimizer(model, args.state)
    batches = [
        whole_batch(args.samples, seqlen, shape.vocab_size, 97 * world.dp_rank + m).to(run.device)
        for m in range(num_microbatches)
    ]
    num_valid = seqlen * args.samples * num_microbatches * layout.dp

    def step() -> float:
        seconds = timed_step(run, model, optimizer, batches, num_valid)
        run.phase()
        return seconds

    first = step()  # compiles
    run.say(
        f"speed: {layout.describe()} {layout.activation_checkpointing}: built and first step in "
        f"{time.perf_counter() - began:.1f} s"
    )
    for _ in range(0 if first < 0.5 or args.tiny else 1):
        step()
    seconds = [step() for _ in range(args.steps)]
    profiler = StepProfiler(
        LogConfig(), Path("."), Ranks(rank=dist.get_rank(), size=run.ranks, talk=run.talk)
    )
    heads = (shape.num_heads // layout.tp, max(1, shape.num_kv_heads // layout.tp))
    attention = attention_of(run, torch.bfloat16, heads, shape.head_dim, seqlen)
    row = speed_row(run, layout, shape, seqlen, seconds) | {"attention": attention}
    told = (
        f"speed: {model_name} {layout.describe():34} "
        f"{row['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, "
        f"MFU {100 * row['mfu_noncausal']:.1f}% non-causal {100 * row['mfu_causal']:.1f}% causal, "
        f"{row['peak_memory_gib']:.1f} GiB (predicted "
        f"{predicted_gib(layout, shape, seqlen, args.state, args.samples):.0f})"
    )
    run.say(told)
    with profiler.profiled(-1, run.device):
        profiled = step()
    profiler.finish(profiled, 0.0)
    run.write(row | {"model": model_name, "step_ms": profiler.take()})
    run.free(world)


def timed_step(
    run: Run, model: ParallelModel, optimizer: Any, batches: list[RandomBatch], num_valid: int
) -> float:
    """Seconds of a whole step, all ranks starting together."""
    run.wait()
    dist.barrier()
    start = time.perf_counter()
    model.forward_backward(batches, num_valid)
    model.clip(1.0)
    optimizer.step(1e-5)
    model.zero_grad()
    run.wait()
    return time.perf_counter() - start


def make_optimizer(model: ParallelModel, state: str) -> Any:
    """AdamW with fp32 moments over fp32 masters, or all of it in bf16."""
    if state == "float32":
        return PartOptimizer(model.parameters_here().items(), OptimConfig())

    class Low:
        def __init__(self) -> None:
            self._adamw = torch.optim.AdamW(list(model.parameters_here().values()), fused=True)

        def step(self, lr: float) -> None:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()

    return Low()


def speed_row(
    run: Run, layout: Layout, shape: DecoderConfig, seqlen: int, seconds: list[float]
) -> dict[str, Any]:
    """The numbers of a timed layout; the slowest rank's memory."""
    tokens = seqlen * run.args.samples * (layout.num_microbatches or 1) * layout.dp
    median = statistics.median(seconds)
    rate = tokens / median / run.ranks
    flops = {
        causal: shape.flops_per_token(seqlen, causal=causal) * rate / (PEAK_TFLOPS * 1e12)
        for causal in (True, False)
    }
    peak = torch.cuda.max_memory_allocated(run.device) if run.cuda else 0
    largest = torch.tensor(peak / 2**30)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=run.talk)
    ordered = sorted(seconds)
    return {
        "layout": asdict(layout),
        "state": run.args.state,
        "seqlen": seqlen,
        "micro_batch": run.args.samples,
        "tokens_per_s_per_gpu": rate,
        "mfu_noncausal": flops[False],
        "mfu_causal": flops[True],
        "peak_memory_gib": largest.item(),
        "median_us": median * 1e6,
        "steps": len(seconds),
        "p20_us": ordered[len(ordered) // 5] * 1e6,
        "p80_us": ordered[-1 - len(ordered) // 5] * 1e6,
        "percent_of_ceiling": 100 * flops[False],
        "ceiling": f"{PEAK_TFLOPS:g} TFLOP/s (datasheet)",
    }


def asked_layouts(run: Run) -> list[Layout]:
    """The layouts to time, as the flags change them."""
    args, layouts = run.args, speed_layouts(run.ranks, run.cuda)
    if args.microbatches:
        layouts = [replace(x, num_microbatches=args.microbatches) for x in layouts]
    if args.async_tp:
        layouts = [replace(x, async_tp=True) for x in layouts if x.sequence_parallel]
    return layouts


def speed(run: Run) -> None:
    """All layouts of the model."""
    args = run.args
    name = "tiny" if args.tiny else args.model
    shape, seqlen = (TINY, 64) if args.tiny else (PRESETS[args.model], args.seqlen)
    for layout in filter(run.wanted, asked_layouts(run)):
        time_layout(run, layout, shape, seqlen, name)


def large(run: Run) -> None:
    """A 32B shape under the two layouts that promise most: sharded state, and what talks least."""
    layouts = asked_layouts(run)
    shape, seqlen = (TINY, 32) if run.args.tiny else (LLAMA_32B, 4096)
    for layout in layouts[:1] + layouts[-1:]:
        time_layout(run, layout, shape, seqlen, "tiny-32b" if run.args.tiny else "32b")


# ---- checkpoint --------------------------------------------------------------------------------


def digests(model: ParallelModel) -> list[int]:
    """A number of every whole parameter's bits and their places: one flipped or moved bit changes
    it."""
    found: list[int] = []
    for name in model.all_names:
        bits = model.full(name).to(model.world.device).flatten().view(torch.int32).long()
        places = torch.arange(len(bits), device=bits.device)
        found.append(int((bits * (places * 2 + 1)).sum()))
    return found


def pieces_of(model: ParallelModel) -> dict[str, storage.Piece]:
    """A model's parameters as a checkpoint knows them."""
    found: dict[str, storage.Piece] = {}
    for name, local in model.parameters_here().items():
        box = model.shard_of(name)
        found[name] = storage.Piece(
            tensor=local.detach(), offsets=box.offsets, shape=box.global_shape
        )
    return found


def stepped(run: Run, layout: Layout, shape: DecoderConfig) -> tuple[ParallelModel, PartOptimizer]:
    """A model of a layout with an optimizer that has moments."""
    run.phase(run.args.build_s)
    model = ParallelModel(shape, build_world(layout, run.device), options(layout, 64, 1))
    fill(model, sum(map(ord, layout.describe())) + dist.get_rank())
    optimizer = PartOptimizer(model.parameters_here().items(), OptimConfig())
    for local in model.parameters_here().values():
        local.grad = torch.full_like(local, 1e-3)
    optimizer.step(1e-3)
    return model, optimizer


def checkpoint(run: Run) -> None:
    """Save under the first layout, read under the others."""
    args = run.args
    name = "tiny" if args.tiny else args.checkpoint_model
    shape = TINY if args.tiny else PRESETS[name]
    first, *others = parity_layouts(run.ranks)
    place = args.checkpoint_dir
    shared = [tempfile.mkdtemp(dir=place) if run.first else ""]
    dist.broadcast_object_list(shared, 0)
    folder = Path(shared[0])
    model, optimizer = stepped(run, first, shape)
    start = time.perf_counter()
    storage.write_state(folder, run_state(pieces_of(model), optimizer, dist.get_rank()), run.talk)
    dist.barrier()
    save_s, saved = time.perf_counter() - start, digests(model)
    size = sum(file.stat().st_size for file in folder.iterdir())
    run.free(model.world)
    for layout in filter(run.wanted, others):
        load_s, equal = read_under(run, layout, shape, folder, saved)
        run.say(
            f"checkpoint: {first.describe()} -> {layout.describe():30} "
            f"{'bitwise equal' if equal else 'DIFFERENT'}, {size / 1e9:.2f} GB, save "
            f"{save_s:.2f} s, load {load_s:.2f} s"
        )
        if not equal:
            run.failures.append(f"checkpoint {layout.describe()}")
        told = {
            "to": asdict(layout),
            "bytes": size,
            "save_s": save_s,
            "load_s": load_s,
            "save_gbps": size / save_s / 1e9,
            "load_gbps": size / load_s / 1e9,
            "equal": equal,
        }
        run.write({"model": name, "layout": asdict(first), "checkpoint": told})
    dist.barrier()
    if run.first:
        shutil.rmtree(folder)


def read_under(
    run: Run, layout: Layout, shape: DecoderConfig, folder: Path, saved: list[int]
) -> tuple[float, bool]:
    """(seconds, whether all parameters are the saved ones) of reading it under a layout."""
    model, optimizer = stepped(run, layout, shape)
    state = run_state(pieces_of(model), optimizer, dist.get_rank())
    state = {key: value for key, value in state.items() if not key.startswith("rng/")}
    start = time.perf_counter()
    storage.read_state(folder, state, run.talk, sections=("model", "optimizer"))
    dist.barrier()
    load_s = time.perf_counter() - start
    equal = digests(model) == saved
    run.free(model.world)
    return load_s, equal


def run_all(args: argparse.Namespace, device: torch.device) -> list[str]:
    """All parts; returns what failed."""
    env.quiet_profiler()
    run = Run(args, device)
    for part in (links, verify, parity, speed, large, checkpoint):
        if part.__name__ in args.parts:
            part(run)
    return run.failures


def main() -> int:
    """Under torchrun."""
    args = arguments()
    longest = max(args.hang_s, args.build_s)
    device = start_sharing(longest) if args.share_gpu else mesh.start(args.device, longest)
    progress.set_mode("lines")
    failures = run_all(args, device)
    mesh.stop()
    faulthandler.cancel_dump_traceback_later()
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
