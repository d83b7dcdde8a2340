"""Microseconds of the host that a call of attention takes, and where they go.

    python benchmarks/kernels/attention/bench_host.py                  # kernels that do nothing
    python benchmarks/kernels/attention/bench_host.py --device cuda    # an H100 or H200, for real
    taskset -c 4,5 python ... --device cuda --results benchmarks/results/h200

On `cpu` the machine pretends to be an H200 and a kernel is a function of TVM-FFI that returns at
once: all is there but the driver, the GPU and calls whose lengths a CPU would look at, and the time
is the thread's own. On `cuda` the problem is so small that the GPU waits for the host. Every part
is timed in turns, 20 calls back to back after a wait for the GPU, and whole calls also 500 in a
row, as layer after layer makes them; medians and minima over the turns. Pin it to cores that nobody
else uses: a busy neighbour doubles everything. The first call of a process, with the kernels in the
cache, is timed in processes of its own (`--first 0`: not). The last line is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import pathlib
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ridgeline.core import arch as arches
from ridgeline.kernels.attention import (
    calls,
    dispatch,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from ridgeline.kernels.attention.cute import library
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions

SHAPE = (1, 256, 8, 128)
CUTE = "ridgeline.kernels.attention.cute_sm90"
IN_A_ROW = ("forward", "backward", "flash_attn_func", "scaled_dot_product_attention")
Parts = dict[str, Callable[[], object]]


def pretend_an_h200() -> None:
    """On a CPU: the Hopper kernels are chosen, and do nothing."""
    cute = importlib.import_module(CUTE)
    ffi = importlib.import_module("tvm_ffi")
    importlib.import_module("tvm_ffi.testing")  # its library has the function
    kernel = ffi.get_global_func("testing.nop")
    dispatch.arch_of = lambda device: arches.pretend("sm90")
    cute._arch = lambda device: arches.KNOWN["sm90"]
    cute._stream = lambda device: 0
    library.kernel = lambda *key: kernel
    torch._C._cuda_getDevice = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False


def parts_of(device: str) -> Parts:
    """What is timed, by name."""
    cute: Any = importlib.import_module(CUTE)
    q, k, v = (torch.randn(SHAPE, device=device).bfloat16() for _ in range(3))
    options = AttentionOptions(softmax_scale=SHAPE[-1] ** -0.5, causal=True)
    extras = AttentionExtras()
    out, lse = cute.forward(q, k, v, options, extras)
    dout = torch.ones_like(out)
    plan = cute._planned("fwd", (q, k, v), options, extras)
    back = cute._planned("bwd", (q, k, v, out, dout), options, extras)
    numbers = (None, True, (-1, -1), 0.0, False, None)
    return {
        "forward": lambda: cute.forward(q, k, v, options, extras),
        "backward": lambda: cute.backward(dout, None, q, k, v, out, lse, options, extras),
        **public_parts(q, k, v, dout),
        "key of a plain call": lambda: calls._plain_key(q, k, v, numbers, False),
        "plan of a forward": lambda: cute._planned("fwd", (q, k, v), options, extras),
        "outputs of a forward": lambda: (plan.out(), plan.lse()),
        "tensors of a backward": lambda: [
            make() for make in (back.dq, back.dk, back.dv, back.statistics, back.dq_sum)
        ],
        "addresses of q, k, v": lambda: plan.readable(q, k, v),
        "device, stream, work queue": lambda: (
            torch._C._cuda_getDevice(),
            cute._counter(q, plan.device),
        ),
        "kernel of a forward": launch_of(lambda: cute.forward(q, k, v, options, extras)),
        "kernels of a backward": launch_of(
            lambda: cute.backward(dout, None, q, k, v, out, lse, options, extras)
        ),
        **comparison(q, k, v, dout),
    }


def public_parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Parts:
    """The public functions."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    one = torch.tensor([0, SHAPE[1]], dtype=torch.int32, device=q.device)
    used = torch.full(SHAPE[:1], SHAPE[1], dtype=torch.int32, device=q.device)
    packed = [x[0] for x in (q, k, v)]
    pages = [x[0].unflatten(0, (-1, 64)) for x in (k, v)]
    table = torch.arange(SHAPE[1] // 64, dtype=torch.int32, device=q.device)[None]
    kept = flash_attn_func(*leaves, causal=True)
    assert isinstance(kept, torch.Tensor)

    def trained() -> object:
        made = flash_attn_func(*leaves, causal=True)
        return torch.autograd.grad(made, leaves, dout)

    parts: Parts = {
        "flash_attn_func": lambda: flash_attn_func(q, k, v, causal=True),
        "flash_attn_func, differentiable": lambda: flash_attn_func(*leaves, causal=True),
        "its backward by autograd": lambda: torch.autograd.grad(
            kept, leaves, dout, retain_graph=True
        ),
        "flash_attn_func and its gradients": trained,
    }
    if q.is_cuda:  # on a CPU the values of lengths are looked at
        parts["flash_attn_varlen_func"] = lambda: flash_attn_varlen_func(
            *packed, one, one, SHAPE[1], SHAPE[1], causal=True
        )
        parts["flash_attn_with_kvcache, pages"] = lambda: flash_attn_with_kvcache(
            q[:, :1], *pages, cache_seqlens=used, block_table=table, causal=True
        )
    return parts


def comparison(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Parts:
    """What PyTorch takes: an empty tensor, its own fused attention."""
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    plain = [x.detach() for x in leaves]
    grad = dout.transpose(1, 2)

    def trained() -> object:
        made = scaled_dot_product_attention(*leaves, is_causal=True)
        return torch.autograd.grad(made, leaves, grad)

    parts: Parts = {"torch.empty_like": lambda: torch.empty_like(q)}
    if q.is_cuda:  # on a CPU it computes
        parts |= {
            "scaled_dot_product_attention": lambda: scaled_dot_product_attention(
                *plain, is_causal=True
            ),
            "scaled_dot_product_attention and its gradients": trained,
        }
    return parts


def launch_of(run: Callable[[], object]) -> Callable[[], object]:
    """What a call hands to its kernel, again and again: TVM-FFI, the driver, no more of ours."""
    cute: Any = importlib.import_module(CUTE)
    seen: list[tuple[Any, tuple]] = []
    loaded = library.kernel
    library.kernel = lambda *key: lambda *given: seen.append((loaded(*key), given))
    cute._plans.clear()
    try:
        run()
    finally:
        library.kernel = loaded
        cute._plans.clear()
    kernel, given = seen[0]
    return lambda: kernel(*given)


def measure(parts: Parts, rounds: int, count: int = 20) -> dict[str, list[float]]:
    """Microseconds a call of each part, a number a turn."""
    cuda = torch.cuda.is_available()
    wait, clock = (torch.cuda.synchronize, time.perf_counter) if cuda else (int, time.thread_time)
    for run in parts.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, run in parts.items():
            wait()
            start = clock()
            for _ in range(count):
                run()
            found[name].append((clock() - start) / count * 1e6)
    wait()
    return found


def first_call(device: str) -> dict[str, float]:
    """Milliseconds of the first call in this process, and of its parts, with a CUDA context there
    and the kernels in the cache."""
    q, k, v = (torch.randn(SHAPE, device=device).bfloat16() for _ in range(3))
    leaf = torch.ones(2, device=device, requires_grad=True)
    torch.autograd.grad(leaf * 2, leaf, torch.ones_like(leaf))  # PyTorch imports for a second
    (q[0, 0] @ k[0, 0].T).sum().item()
    times, start = {}, time.perf_counter()
    importlib.import_module(CUTE)
    times["import"] = time.perf_counter() - start
    if device == "cpu":
        pretend_an_h200()
    start = time.perf_counter()
    flash_attn_func(q, k, v, causal=True)
    times["forward"] = time.perf_counter() - start
    leaves = [x.requires_grad_() for x in (q, k, v)]
    start = time.perf_counter()
    out = flash_attn_func(*leaves, causal=True)
    times["differentiable"] = time.perf_counter() - start
    start = time.perf_counter()
    torch.autograd.grad(out, leaves, torch.ones_like(out))  # type: ignore[arg-type]
    times["backward"] = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.synchronize()
    return {name: value * 1e3 for name, value in times.items()}


def first_calls(device: str, count: int) -> dict[str, list[float]]:
    """The same of several processes."""
    command = [sys.executable, __file__, "--device", device, "--child"]
    found: dict[str, list[float]] = {}
    for _ in range(count):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for name, value in json.loads(done.stdout.splitlines()[-1]).items():
            found.setdefault(name, []).append(value)
    return found


def rows_of(
    found: dict[str, list[float]], first: dict[str, list[float]], device: str, commit: str
) -> list[dict[str, Any]]:
    """A row a part: microseconds."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else "none, kernels that do nothing"
    common = {
        "op": "attention_host",
        "impl": "cute_sm90",
        "run": uuid.uuid4().hex[:12],
        "gpu": gpu,
        "dtype": "bfloat16",
        "shape": {"batch": SHAPE[0], "seqlen": SHAPE[1], "heads": SHAPE[2], "head_dim": SHAPE[3]},
        "commit": commit,
        "versions": {
            "torch": torch.__version__,
            "apache-tvm-ffi": importlib.metadata.version("apache-tvm-ffi"),
            "python": sys.version.split()[0],
        },
        "date": datetime.date.today().isoformat(),
    }
    first_us = {f"first call: {n}": [x * 1e3 for x in values] for n, values in first.items()}
    return [
        {
            **common,
            "part": name,
            "median_us": round(statistics.median(values), 2),
            "min_us": round(min(values), 2),
            "turns": len(values),
        }
        for name, values in (found | first_us).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--first", type=int, default=3, help="processes for the first call")
    parser.add_argument("--results", type=pathlib.Path, help="folder for attention_host.jsonl")
    parser.add_argument("--commit", help="of the code, where this is no git checkout")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.child:
        print(json.dumps(first_call(args.device)))
        return
    first = first_calls(args.device, args.first)
    if args.device == "cpu":
        pretend_an_h200()
    parts = parts_of(args.device)
    found = measure(parts, args.rounds)
    whole = {f"{name}, 500 in a row": parts[name] for name in IN_A_ROW if name in parts}
    found |= measure(whole, max(1, args.rounds // 3), count=500)
    rows = rows_of(found, first, args.device, args.commit or _commit())
    for row in rows:
        print(f"{row['part']:<48} median {row['median_us']:9.2f} us, least {row['min_us']:9.2f}")
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        with open(args.results / "attention_host.jsonl", "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    print(json.dumps({row["part"]: row["median_us"] for row in rows}))


def _commit() -> str:
    here = pathlib.Path(__file__).parent
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
