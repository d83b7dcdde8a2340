"""Hopper attention (cute_sm90), forward and backward, beside its peers on one GPU.

    ridgeline warmup attention --arch sm90      # or let the first call of a cell compile
    python benchmarks/kernels/attention/bench_attention_hopper.py --results benchmarks/results/h200

FLOPs: 2 (D + D_v) a query-key pair that the mask leaves, forward, and 2 (3 D + 2 D_v) backward.
bf16, 16k tokens, hidden 2048. Correctness first: a cell whose error exceeds the numerics rule is
not timed. The implementations take turns, several calls back to back each time; the ceiling of the
rows is a bf16 matmul of 8192^3 measured in the same process. Peers: cuDNN and FlashAttention-2
through PyTorch, FlashAttention-3 (forward) by the path of a library that registers
torch.ops._vllm_fa3_C (`--fa3`), and FlashAttention-4's CuTe path where flash_attn.cute can be
imported (`--fa4`). `--only` takes the cells whose label matches, `--without` leaves out peers. A
cell that needs a kernel which is not there and cannot be compiled here is named and left out.
Kernels that no GPU has confirmed need RIDGELINE_UNVERIFIED=1 (verify_hopper.py first). The rows are
written as measured; the last line is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import math
import pathlib
import re
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ridgeline.core import registry
from ridgeline.core.arch import detect
from ridgeline.core.errors import UserError
from ridgeline.kernels.attention import cute_sm90, impls, ref
from ridgeline.kernels.attention.problem import (
    AttentionExtras,
    AttentionOptions,
    AttentionProblem,
)

assert impls is not None  # imported for its registrations
TOKENS, HIDDEN, WINDOW = 16384, 2048, 1024
LENGTHS = (8192, 3000, 1500, 900, 700, 500, 400, 300, 200, 150, 120, 100, 90, 80, 70, 82)
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Peers:
    """Which peers beside PyTorch's are on this machine."""

    fa3: bool = False
    fa4: bool = False


@dataclass(frozen=True)
class Cell:
    """One row of the table: a dense problem, or a packed one where lengths are given."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window: int | None = None
    lengths: tuple[int, ...] | None = None
    direction: str = "fwd"
    deterministic: bool = False

    @property
    def left(self) -> int | None:
        return None if self.window is None else self.window - 1

    def flops(self) -> float:
        if self.lengths is None:
            return self._problem(self.batch, self.seqlen_q, self.seqlen_k).cost().flops
        return sum(self._problem(1, n, n).cost().flops for n in self.lengths)

    def _problem(self, batch: int, seqlen_q: int, seqlen_k: int) -> AttentionProblem:
        return AttentionProblem(
            batch=batch,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            causal=self.causal,
            window_left=self.left,
            varlen=self.lengths is not None,
            direction=self.direction,
            deterministic=self.deterministic,
        )

    def label(self) -> str:
        kind = "packed" if self.lengths else "causal" if self.causal else "full"
        tail = f" window {self.window}" if self.window else ""
        tail += " deterministic" if self.deterministic else ""
        dims = f"{self.head_dim}" + (
            f",{self.head_dim_v}" if self.head_dim != self.head_dim_v else ""
        )
        return (
            f"{self.direction} {kind} {self.batch}x{self.seqlen_q}x{self.seqlen_k} "
            f"{self.heads}/{self.kv_heads} d{dims}{tail}:"
        )

    def problem(self) -> AttentionProblem:
        return self._problem(self.batch, self.seqlen_q, self.seqlen_k)

    def shape(self) -> dict:
        names = "batch seqlen_q seqlen_k heads kv_heads head_dim head_dim_v causal window".split()
        shape = {name: getattr(self, name) for name in names}
        deterministic = self.deterministic if self.direction == "bwd" else None
        own = {"lengths": self.lengths, "page_size": None, "deterministic": deterministic}
        return {**shape, **own}


def cells() -> list[Cell]:
    """The grid of record: dense, windows, grouped heads, (192, 128), packed, few queries."""
    found = [
        Cell(TOKENS // n, n, n, HIDDEN // d, HIDDEN // d, d, d, causal)
        for d in (64, 128, 256)
        for n in (16384, 4096, 1024)
        for causal in (False, True)
    ]
    found += [
        Cell(1, TOKENS, TOKENS, HIDDEN // d, HIDDEN // d, d, d, True, window=WINDOW)
        for d in (64, 128)
    ]
    found.append(Cell(2, 8192, 8192, 32, 8, 128, 128, True))
    found.append(Cell(2, 8192, 8192, 16, 16, 192, 128, True))
    found.append(
        Cell(len(LENGTHS), max(LENGTHS), max(LENGTHS), 16, 16, 128, 128, True, lengths=LENGTHS)
    )
    few = Cell(4, 512, TOKENS, 16, 16, 128, 128, True)
    backward = [replace(cell, direction="bwd") for cell in found]
    ordered = [
        replace(cell, deterministic=True)
        for cell in backward
        if cell.causal and cell.seqlen_q == TOKENS and cell.window is None
    ]
    return [*found, few, *backward, *ordered]


def inputs(cell: Cell) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionExtras]:
    """q, k, v and the packing."""

    def make(tokens: int, heads: int, dim: int) -> torch.Tensor:
        shape = (cell.batch, tokens, heads, dim) if cell.lengths is None else (tokens, heads, dim)
        return torch.randn(*shape, device="cuda").bfloat16()

    if cell.lengths is None:
        rows, keys, extras = cell.seqlen_q, cell.seqlen_k, AttentionExtras()
    else:
        rows = keys = sum(cell.lengths)
        starts = torch.tensor([0, *cell.lengths], device="cuda").cumsum(0).int()
        extras = AttentionExtras(
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=max(cell.lengths),
            max_seqlen_k=max(cell.lengths),
        )
    q = make(rows, cell.heads, cell.head_dim)
    k = make(keys, cell.kv_heads, cell.head_dim)
    return q, k, make(keys, cell.kv_heads, cell.head_dim_v), extras


def error_ratio(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """max |ours - fp32| over max |same formula in bf16 - fp32| on the last 512 rows and 2,048 keys
    of one head: the output's, or the largest of the gradients'."""
    rows, keys = min(512, cell.seqlen_q), min(2048, cell.seqlen_k)
    part = [q[:1, -rows:, :1], k[:1, -keys:, :1], v[:1, -keys:, :1]]
    part = [x.contiguous() for x in part]
    options, extras = options_of(cell), AttentionExtras()
    out, lse = cute_sm90.forward(*part, options, extras)
    dout = torch.randn_like(out)
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in zip("qkv", part, strict=True)}
        made = ref.attention_ref(*leaves.values(), options, extras, dtype)
        grads = ref.gradients(made, leaves, dout, None) if cell.direction == "bwd" else {}
        results[dtype] = {"out": made[0].detach(), **grads}
    ours = {"out": out}
    if cell.direction == "bwd":
        found = cute_sm90.backward(dout, None, *part, out, lse, options, extras)
        ours = {"q": found.dq, "k": found.dk, "v": found.dv}
    ratios = []
    for name, got in ours.items():
        exact = results[torch.float32][name].float()
        floor = (results[torch.bfloat16][name].float() - exact).abs().max()
        ratios.append(float((got.float() - exact).abs().max() / floor))
    return max(ratios)


def options_of(cell: Cell) -> AttentionOptions:
    return AttentionOptions(
        softmax_scale=cell.head_dim**-0.5,
        causal=cell.causal,
        window_left=cell.left,
        deterministic=cell.deterministic,
    )


def calls(cell: Cell, peers: Peers) -> dict[str, Call]:
    """name -> call of ours and of every peer that takes the cell."""
    q, k, v, extras = inputs(cell)
    options = options_of(cell)
    out, lse = cute_sm90.forward(q, k, v, options, extras)
    if cell.direction == "bwd":
        dout = torch.randn_like(out)
        arguments = (dout, None, q, k, v, out, lse, options, extras)
        found: dict[str, Call] = {"cute_sm90": lambda: cute_sm90.backward(*arguments).dq}
    else:
        dout = None
        found = {"cute_sm90": lambda: cute_sm90.forward(q, k, v, options, extras)[0]}
    if peers.fa3 and cell.direction == "fwd":
        found["fa3 vllm 0.33.0"] = _fa3(cell, q, k, v, extras)
    if peers.fa4:
        version = importlib.metadata.version("flash-attn-4")
        found[f"fa4 {version}"] = _fa4(cell, dout, extras, q, k, v)
    plain = cell.lengths is None and cell.window is None and not cell.deterministic
    if plain and cell.seqlen_q == cell.seqlen_k:
        cudnn = torch.backends.cudnn.version()
        version = f"{cudnn // 10000}.{cudnn // 100 % 100}"
        found[f"cudnn {version}"] = _sdpa(SDPBackend.CUDNN_ATTENTION, cell, dout, q, k, v)
        if cell.head_dim == cell.head_dim_v:
            name = f"flashattention-2 (torch {torch.__version__.split('+')[0]} sdpa)"
            found[name] = _sdpa(SDPBackend.FLASH_ATTENTION, cell, dout, q, k, v)
    return found


def _sdpa(backend: SDPBackend, cell: Cell, dout: torch.Tensor | None, *qkv: torch.Tensor) -> Call:
    """A forward through PyTorch, or where dout is given the backward of one made beforehand."""
    leaves = [x.transpose(1, 2).detach().requires_grad_(dout is not None) for x in qkv]
    gqa = cell.heads != cell.kv_heads

    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*leaves, is_causal=cell.causal, enable_gqa=gqa)

    if dout is None:
        return forward
    made: list[torch.Tensor] = []

    def backward() -> torch.Tensor:
        if not made:
            made.append(forward())
        given = dout.transpose(1, 2)
        return torch.autograd.grad(made[0], leaves, given, retain_graph=True)[0]

    return backward


def _fa3(cell: Cell, q, k, v, extras: AttentionExtras) -> Call:
    """FlashAttention-3 as vLLM builds it: packed only, so dense calls are packed without a copy."""
    if cell.lengths is None:
        steps = torch.arange(cell.batch + 1, device="cuda", dtype=torch.int32)
        starts = steps * cell.seqlen_q, steps * cell.seqlen_k
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    else:
        starts = extras.cu_seqlens_q, extras.cu_seqlens_k
    window = (-1, -1) if cell.left is None else (cell.left, 0)
    lengths = (cell.seqlen_q, cell.seqlen_k)
    head = (q, k, v, None, None, None, None, *starts, None, None, None, *lengths, None)
    middle = (None,) * 8
    tail = (0.0, True, None, 1, None, 0, None, 1, 0, None)
    scale = cell.head_dim**-0.5
    fwd = torch.ops._vllm_fa3_C.fwd
    return lambda: fwd(*head, *middle, scale, cell.causal, *window, *tail)[0]


def _fa4(
    cell: Cell, dout: torch.Tensor | None, extras: AttentionExtras, *qkv: torch.Tensor
) -> Call:
    """FlashAttention-4's functions; a backward is that of a forward made beforehand."""
    module = importlib.import_module("flash_attn.cute")
    leaves = [x.detach().requires_grad_(dout is not None) for x in qkv]
    window = (None, None) if cell.left is None else (cell.left, 0)
    options = {"causal": cell.causal, "window_size": window, "deterministic": cell.deterministic}

    def forward() -> torch.Tensor:
        if cell.lengths is None:
            made = module.flash_attn_func(*leaves, **options)
        else:
            starts = {"cu_seqlens_q": extras.cu_seqlens_q, "cu_seqlens_k": extras.cu_seqlens_k}
            longest = {"max_seqlen_q": cell.seqlen_q, "max_seqlen_k": cell.seqlen_k}
            made = module.flash_attn_varlen_func(*leaves, **starts, **longest, **options)
        return made[0] if isinstance(made, tuple) else made

    if dout is None:
        return forward
    made: list[torch.Tensor] = []

    def backward() -> torch.Tensor:
        if not made:
            made.append(forward())
        return torch.autograd.grad(made[0], leaves, dout, retain_graph=True)[0]

    return backward


def measure(runs: dict[str, Call], rounds: int = 7, target_ms: float = 9.0) -> dict[str, list]:
    """Sorted microseconds a call; each round every run has its turn of several calls."""
    counts, times = {}, {name: [] for name in runs}
    for name, run in list(runs.items()):
        try:
            run()
        except Exception as error:  # a peer may refuse, with exceptions of its own compiler too
            if name == "cute_sm90":
                raise
            why = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"{name} refuses: {why[:90]}", flush=True)
            del times[name]
            continue
        counts[name] = max(2, math.ceil(target_ms * 1e3 / _elapsed_us(run, 2)))
    for _ in range(rounds):
        for name in times:
            runs[name]()
            times[name].append(_elapsed_us(runs[name], counts[name]))
    return {name: sorted(found) for name, found in times.items()}


def _elapsed_us(run: Call, count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / count


def matmul_tflops(n: int = 8192) -> float:
    """The ceiling of this card in this process."""
    a, b = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
    times = measure({"matmul": lambda: a @ b}, rounds=5, target_ms=30)["matmul"]
    return 2.0 * n**3 / times[len(times) // 2] / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, required=True)
    parser.add_argument("--fa3", type=pathlib.Path, help="library of vLLM's FlashAttention-3")
    parser.add_argument("--fa4", action="store_true", help="flash_attn.cute is importable")
    parser.add_argument("--only", default="", help="regular expression on a cell's label")
    parser.add_argument("--without", default="$", help="regular expression on names of peers")
    parser.add_argument("--commit", help="of the kernels; default: git's")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each implementation")
    parser.add_argument("--target-ms", type=float, default=9.0, help="length of a turn")
    parser.add_argument("--directions", nargs="+", default=["fwd", "bwd"])
    parser.add_argument("--seconds", type=float, default=1e9, help="stop before the next cell")
    args = parser.parse_args()
    if args.fa3:
        torch.ops.load_library(str(args.fa3))
    args.results.mkdir(parents=True, exist_ok=True)
    stop = time.monotonic() + args.seconds
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = args.commit or subprocess.run(git, capture_output=True, text=True).stdout.strip()
    common = {
        "op": "attention",
        "run": uuid.uuid4().hex[:12],
        "gpu": "h200" if "H200" in torch.cuda.get_device_name() else torch.cuda.get_device_name(),
        "dtype": "bfloat16",
        "ceiling": round(matmul_tflops(), 1),
        "commit": commit,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "date": datetime.date.today().isoformat(),
    }
    peers = Peers(fa3=args.fa3 is not None, fa4=args.fa4)
    count, arch = 0, detect("cuda")
    impl = next(i for i in registry.impls("attention") if i.name == "cute_sm90")
    for cell in cells():
        if cell.direction not in args.directions or not re.search(args.only, cell.label()):
            continue
        if time.monotonic() > stop:
            print("out of time before", cell.shape(), flush=True)
            break
        problems = [replace(cell.problem(), direction="fwd"), cell.problem()]
        if why := next(filter(None, (registry.refusal(impl, p, arch) for p in problems)), None):
            print(cell.label(), "refused:", why, flush=True)
            continue
        try:
            error = None if cell.lengths else error_ratio(cell, *inputs(cell)[:3])
            assert error is None or error <= 2.0, (cell, error)
            runs = {n: c for n, c in calls(cell, peers).items() if not re.match(args.without, n)}
            times = measure(runs, args.rounds, args.target_ms)
        except UserError as missing:  # a kernel that is not there and cannot be compiled here
            print(cell.label(), "missing:", missing, flush=True)
            continue
        with open(args.results / "attention.jsonl", "a", encoding="utf-8") as out:
            for name, us in times.items():
                row = row_of(cell, us, common["ceiling"])
                own = {"error": round(error, 3)} if error and name == "cute_sm90" else {}
                head = {**common, "impl": name, "direction": cell.direction}
                row = {**head, "shape": cell.shape(), **row, **own}
                out.write(json.dumps(row) + "\n")
                count += 1
                print(cell.label(), name, row["tflops"], own.get("error", ""), flush=True)
    print(json.dumps({"op": "attention", "run": common["run"], "rows": count}))


def row_of(cell: Cell, us: list[float], ceiling: float) -> dict:
    """Times and rates of a sorted list of microseconds."""
    tflops = cell.flops() / us[len(us) // 2] / 1e6
    return {
        "median_us": round(us[len(us) // 2], 2),
        "p20_us": round(us[len(us) // 5], 2),
        "p80_us": round(us[-1 - len(us) // 5], 2),
        "tflops": round(tflops, 1),
        "percent_of_ceiling": round(100 * tflops / ceiling, 1),
    }


if __name__ == "__main__":
    main()
