"""W4A16 on a CPU beside PyTorch's bf16 and fp32 linears, every kind of 4-bit weight.

    python benchmarks/kernels/w4a16/bench_w4a16_cpu.py --results benchmarks/results/cpu
        [--threads 2] [--layers 2048x2048,576x3072] [--rows 1,4,16,64] [--seconds 2]

Everybody runs in turns, in every order, in one process on the same activations; a call goes through
the public function, its checks included. Each layer is checked first: one-hot activations return
its weights bit for bit. Weights stay in cache between calls where they fit, for everybody alike.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.core.arch import detect
from ridgeline.formats.base import QuantizedWeight
from ridgeline.kernels.w4a16.op import prepare, problem_of, w4a16_linear

GROUPS = (32, 64, 128, 256, 0)
"""0: whole rows."""


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    common = {
        "op": "w4a16",
        "run": uuid.uuid4().hex[:12],
        "gpu": "cpu",
        "threads": args.threads,
        "cpu": detect("cpu").device,
        "commit": args.commit or commit(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
    }
    ceiling = read_gbps(args.threads)
    count = 0
    args.results.mkdir(parents=True, exist_ok=True)
    for layer in args.layers.split(","):
        k, n = map(int, layer.split("x"))
        for dtype in args.dtypes.split(","):
            for kind in kinds(k):
                for m in map(int, args.rows.split(",")):
                    rows = cell(args, getattr(torch, dtype), (m, n, k), kind, ceiling)
                    rows = [{**common, **row} for row in rows]
                    count += len(rows)
                    with open(args.results / "w4a16.jsonl", "a", encoding="utf-8") as file:
                        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(json.dumps({"run": common["run"], "rows": count, "read_gbps": round(ceiling, 1)}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="folder of w4a16.jsonl")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", default="2048x2048", help="inputs x outputs, comma between")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,256")
    parser.add_argument("--dtypes", default="bfloat16", help="of activations")
    parser.add_argument("--seconds", type=float, default=1.5, help="of measuring a cell")
    parser.add_argument("--commit", default="", help="default: git's")
    return parser.parse_args()


def kinds(k: int) -> list[dict[str, Any]]:
    """Weights to time: each group size in both symmetries, then scales and order of group 128."""
    found = []
    for group in (g or k for g in GROUPS):
        if k % group == 0:
            for symmetric in (True, False):
                found.append({"group": group, "symmetric": symmetric, "scale": "float16"})
    usual = 128 if k % 128 == 0 else 64
    found.append({"group": usual, "symmetric": True, "scale": "bfloat16"})
    found.append({"group": usual, "symmetric": False, "scale": "float16", "act_order": True})
    return found


def random_weight(n: int, k: int, kind: dict[str, Any]) -> QuantizedWeight:
    group = kind["group"]
    R = k // group
    scale = (0.01 + 0.01 * torch.rand(n, R)).to(getattr(torch, kind["scale"]))
    order = (torch.arange(k, dtype=torch.int32) // group)[torch.randperm(k)]
    return QuantizedWeight(
        code_NK=torch.randint(0, 16, (n, k), dtype=torch.uint8),
        scale_NR=scale,
        zero_NR=None if kind["symmetric"] else torch.randint(0, 16, (n, R), dtype=torch.uint8),
        bits=4,
        group_size=group,
        group_of_K=order if kind.get("act_order") else None,
    )


def cell(
    args: argparse.Namespace,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    kind: dict[str, Any],
    ceiling: float,
) -> list[dict[str, Any]]:
    """Rows of one problem: ours and PyTorch's linears."""
    m, n, k = sizes
    weight = random_weight(n, k, kind)
    prepared = prepare(weight, dtype)
    eye = torch.eye(k, dtype=dtype)[: max(2, m)]
    shown = torch.cat([w4a16_linear(part, prepared) for part in eye.split(m)])
    assert torch.equal(shown.T, weight.dequantize(dtype)[:, : len(eye)]), (sizes, kind)
    act = torch.randn(m, k).to(dtype)
    wide = weight.dequantize(torch.float32)
    narrow, act_bf16, act_fp32 = wide.bfloat16(), act.bfloat16(), act.float()
    want = act_fp32 @ wide.T
    error = float((w4a16_linear(act, prepared).float() - want).norm() / want.norm())
    calls = {
        "ridgeline cpu": lambda: w4a16_linear(act, prepared),
        f"linear-bf16 (torch {torch.__version__})": lambda: F.linear(act_bf16, narrow),
        f"linear-fp32 (torch {torch.__version__})": lambda: F.linear(act_fp32, wide),
    }
    times = measure(calls, args.seconds)
    cost = problem_of(weight, dtype, m=m).cost()
    shape = {"m": m, "n": n, "k": k, "group_size": kind["group"], "symmetric": kind["symmetric"]}
    shape |= {"act_order": kind.get("act_order", False), "scales": kind["scale"]}
    rows = []
    for name, (low, median, high) in times.items():
        seconds = median * 1e-6
        moved = cost.bytes if name.startswith("ridgeline") else cost.bytes + 1.5 * n * k
        if "fp32" in name:
            moved += 2.0 * n * k
        rows.append(
            {
                "impl": name,
                "dtype": str(dtype).removeprefix("torch."),
                "shape": shape,
                "median_us": round(median, 2),
                "p20_us": round(low, 2),
                "p80_us": round(high, 2),
                "floor_us": round(cost.bytes / ceiling / 1e3, 2),
                "percent_of_ceiling": round(100 * moved / seconds / ceiling / 1e9, 1),
                "ceiling": f"read from memory at {ceiling:.1f} GB/s, this run",
                "tbps": round(moved / seconds / 1e12, 4),
                "tflops": round(cost.flops / seconds / 1e12, 4),
            }
        )
    rows[0]["error"] = round(error, 8)
    best = min(row["median_us"] for row in rows[1:])
    print(
        f"{sizes} {kind}: {rows[0]['median_us']:.0f} us, bf16 {rows[1]['median_us']:.0f}, fp32 "
        f"{rows[2]['median_us']:.0f}; {rows[1]['median_us'] / rows[0]['median_us']:.2f} x bf16, "
        f"{best / rows[0]['median_us']:.2f} x the faster",
        flush=True,
    )
    return rows


def measure(
    calls: dict[str, Callable[[], Any]], seconds: float
) -> dict[str, tuple[float, float, float]]:
    """(20th percentile, median, 80th) microseconds of each call, in turns of every order: who comes
    behind the largest weight is slower for it, by a tenth and more."""
    marks: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    orders = itertools.cycle(itertools.permutations(calls))
    while time.perf_counter() < end or len(marks[next(iter(marks))]) < 7:
        for name in next(orders):
            call = calls[name]
            call()  # its weight comes back into the cache
            start = time.perf_counter()
            call()
            marks[name].append(1e6 * (time.perf_counter() - start))
    found = {}
    for name, times in marks.items():
        low, *_, high = statistics.quantiles(times, n=5)
        found[name] = (low, statistics.median(times), high)
    return found


def read_gbps(threads: int) -> float:
    """GB/s that `threads` threads read from memory: the best sum of 512 MiB."""
    wide = torch.ones(2**26, dtype=torch.float64)
    best = min(_seconds(lambda: wide.sum()) for _ in range(7))
    return wide.numel() * 8 / best / 1e9


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def commit() -> str:
    here = Path(__file__).parent
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True
    )
    return told.stdout.strip()


if __name__ == "__main__":
    main()
