"""Triton attention beside FlexAttention and PyTorch's FlashAttention-2 and cuDNN, on one GPU.

    python benchmarks/kernels/attention/bench_attention.py --results benchmarks/results/h200

What is shipped is measured: tiles from the table, nothing tuned here. FLOPs: 4 * pairs * head dim a
head forward, 2.5 times that backward, on the pairs that the mask leaves (causal: half of S^2, as
the papers count). 16k tokens, hidden 2048. Every cell has a process of its own (FlexAttention
compiles one function again and again until PyTorch's limit: past it, it runs uncompiled); all
compile at the same time, then one after the other measures while the rest wait. Inside a cell the
implementations take turns, each turn in another order (in one fixed order, run 0e357a09550e, the
same backward measured 4 to 9 % slower right after cuDNN's than after itself); each repetition
starts with a cold L2 and behind a pause on the GPU that hides the launch. Decode is timed in a CUDA
graph. Packed rows have "varlen" and "lengths" in their shape, and beside them a dense row of the
same FLOPs. Rows are appended as they are measured and never changed; the last line is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from threading import Thread
from typing import Any

import torch
import triton

from ridgeline.core.arch import KNOWN, detect
from ridgeline.kernels.attention import config as tiles
from ridgeline.kernels.attention import ref
from ridgeline.kernels.attention import triton as ours
from ridgeline.kernels.attention import triton_plan as plan
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions

CEILING_TFLOPS = KNOWN["sm90"].ceilings.matmul_tflops["bfloat16"]
CEILING_TBPS = KNOWN["sm90"].ceilings.read_gbps / 1e3
TOKENS, HIDDEN, WINDOW = 16384, 2048, 1024
PAUSE_CYCLES = 1_500_000
MASKS = ("causal", "window", "full")
DENSE = [(dim, seqlen, mask) for seqlen in (16384, 4096) for dim in (128, 64) for mask in MASKS]
LENGTHS = [5000, 82, 3000, 1500, 640, 1144, 128, 1024, 333, 800, 1700, 600, 233, 100, 60, 40]
SAME_FLOPS = (6, 2688)
"""Batch and length of dense sequences with 1.006 times the FLOPs of LENGTHS."""
PACKED = [(128, "causal"), (64, "causal"), (128, "full")]
LONG, MANY = (32, 8192), (128, 2048)
DECODE = {
    # name -> (batch, keys), page, queries
    "few": [((1, 8192), 0, 1), ((8, 8192), 0, 1), ((1, 131072), 0, 1)],
    **{
        f"{page or 'contiguous'}-{queries}": [(LONG, page, queries), (MANY, page, queries)]
        for queries in (1, 8)
        for page in (0, 16, 256)
    },
}
Run = Callable[[], Any]
Cell = Callable[[], dict[str, Run]]


def pairs(seqlen, mask):
    """Query-key pairs of a head and sequence that the mask leaves."""
    if mask == "window":
        return WINDOW * seqlen - WINDOW * (WINDOW - 1) / 2
    return seqlen**2 * (0.5 if mask == "causal" else 1.0)


def options_of(dim, mask, **more):
    left = WINDOW - 1 if mask == "window" else None
    return AttentionOptions(
        softmax_scale=dim**-0.5, causal=mask != "full", window_left=left, **more
    )


def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


class Timer:
    """Microseconds of calls that take turns, each from a cold L2."""

    def __init__(self, reps):
        self.reps = reps
        self.flush = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def __call__(self, runs):
        """{name: sorted microseconds}; one untimed turn first."""
        events = {name: [] for name in runs}
        shuffled = random.Random(0)
        for turn in range(self.reps + 1):
            for name in shuffled.sample(list(runs), len(runs)):
                run = runs[name]
                self.flush.zero_()
                torch.cuda._sleep(PAUSE_CYCLES)
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                run()
                end.record()
                if turn:
                    events[name].append((start, end))
            torch.cuda.synchronize()
        return {n: sorted(s.elapsed_time(e) * 1e3 for s, e in found) for n, found in events.items()}


def emit(impl, direction, shape, us, work, **more):
    """Hand a row to the parent, which adds what all rows of a run share."""
    median, decode = us[len(us) // 2], direction == "decode"
    rate, ceiling = work / median / 1e6, CEILING_TBPS if decode else CEILING_TFLOPS
    row = {
        "op": "attention",
        "impl": impl,
        "dtype": "bfloat16",
        "direction": direction,
        "shape": shape,
        "median_us": round(median, 2),
        "p20_us": round(us[len(us) // 5], 2),
        "p80_us": round(us[len(us) * 4 // 5], 2),
        ("tbps" if decode else "tflops"): round(rate, 3 if decode else 1),
        "ceiling": ceiling,
        "percent_of_ceiling": round(100 * rate / ceiling, 1),
        **more,
    }
    print("ROW " + json.dumps(row), flush=True)
    return rate


def shape_of(batch, seqlen_q, seqlen_k, heads, kv_heads, dim, mask, **more):
    return {
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "causal": mask != "full",
        "window": WINDOW if mask == "window" else None,
        "page_size": None,
        "deterministic": False,
        **more,
    }


def error_ratio(q, k, v, options, out):
    """max |ours - fp32| over max |PyTorch in bf16 - fp32|, first 512 rows of a head, causal."""
    if not options.causal:
        return None
    q, k, v = (t[:1, :512, :1] for t in (q, k, v))
    exact, _ = ref.attention_ref(q, k, v, options, AttentionExtras())
    same, _ = ref.attention_ref(q, k, v, options, AttentionExtras(), torch.bfloat16)
    floor = (same.float() - exact).abs().max().item()
    return round((out[:1, :512, :1].float() - exact).abs().max().item() / floor, 3)


def flex(seqlen, mask):
    from torch import _dynamo
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _dynamo.config.recompile_limit = 64
    _dynamo.config.fail_on_recompile_limit_hit = True
    compiled = torch.compile(flex_attention, dynamic=False)
    mods = {
        "causal": lambda b, h, i, j: i >= j,
        "window": lambda b, h, i, j: (i >= j) & (i - j < WINDOW),
    }
    blocks = None
    if mask != "full":
        blocks = create_block_mask(mods[mask], None, None, seqlen, seqlen, device="cuda")
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


def peers(seqlen, mask):
    """name -> f(q_BHSD, k, v) of every peer that can do the mask."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    def backend(kind):
        def run(q, k, v):
            with sdpa_kernel(kind):
                return sdpa(q, k, v, is_causal=mask == "causal")

        return run

    torch_name = f"torch {torch.__version__.split('+')[0]}"
    found = {f"flexattention ({torch_name})": flex(seqlen, mask)}
    if mask != "window":
        found[f"flashattention-2 ({torch_name} sdpa)"] = backend(SDPBackend.FLASH_ATTENTION)
        cudnn = torch.backends.cudnn.version() or 0
        found[f"cudnn {cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100} (sdpa)"] = backend(
            SDPBackend.CUDNN_ATTENTION
        )
    return found


def relative(a, b):
    """Norm of the difference over the norm, in fp32."""
    return round(((a.float() - b.float()).norm() / b.float().norm()).item(), 5)


def add_peers(qkv, dout, seqlen, mask, fwd, bwd):
    """Add the peers' runs; -> differences of (out, dq, dk, dv) from the first, a function of ours.

    FlexAttention gets tensors that are contiguous in its order, the others views of ours.
    """
    reference = None
    for name, peer in peers(seqlen, mask).items():
        leaves = [t.transpose(1, 2).detach() for t in qkv]
        if name.startswith("flex"):
            leaves = [t.contiguous() for t in leaves]
        try:
            leaves = [t.requires_grad_() for t in leaves]
            result = peer(*leaves)
            dout_t = torch.empty_like(result).copy_(dout.transpose(1, 2))
            backward = partial(torch.autograd.grad, result, leaves, dout_t, retain_graph=True)
            forward = partial(peer, *(t.detach() for t in leaves))
            grads = backward()
            with torch.no_grad():
                forward()
            reference = reference or (result, *grads)
            fwd[name], bwd[name] = forward, backward
        except Exception as error:
            print("peer failed", name, type(error).__name__, str(error)[:150], flush=True)
    if reference is None:
        return lambda mine: None
    return lambda mine: [
        relative(a.transpose(1, 2), b) for a, b in zip(mine, reference, strict=True)
    ]


def dense_cell(dim, seqlen, mask):
    """Compile and run everything once; -> a function that measures."""
    batch, heads = TOKENS // seqlen, HIDDEN // dim
    q, k, v = (randn(batch, seqlen, heads, dim) for _ in range(3))
    options, extras = options_of(dim, mask), AttentionExtras()
    out, lse = ours.forward(q, k, v, options, extras)
    dout = torch.randn_like(out)
    args = (dout, None, q, k, v, out, lse, options, extras)
    repeatable = (*args[:-2], replace(options, deterministic=True), extras)
    grads = ours.backward(*args)
    fwd: dict[str, Run] = {"triton": partial(ours.forward, q, k, v, options, extras)}
    bwd: dict[str, Run] = {
        "triton": partial(ours.backward, *args),
        "triton deterministic": partial(ours.backward, *repeatable),
    }
    differences = add_peers((q, k, v), dout, seqlen, mask, fwd, bwd)
    difference = differences((out, grads.dq, grads.dk, grads.dv))
    del grads
    error = error_ratio(q, k, v, options, out)
    x = plan.inputs_of(q, k, v, options, extras)
    forward = tiles.forward_tile(plan.problem_of(x, "fwd"), detect(q.device))
    backward = tiles.backward_config(plan.problem_of(x, "bwd"), detect(q.device))
    work = 4.0 * batch * heads * dim * pairs(seqlen, mask)
    shape = shape_of(batch, seqlen, seqlen, heads, heads, dim, mask)

    def measure(timer):
        line = {}
        for direction, runs, factor in (("fwd", fwd, 1.0), ("bwd", bwd, 2.5)):
            with torch.no_grad():
                times = timer(runs)
            for name, us in times.items():
                more: dict[str, Any] = {}
                if name == "triton" and direction == "fwd":
                    more = {"tile": asdict(forward), "error": error}
                elif name.startswith("triton"):
                    more = {"tile": asdict(backward), "difference_from_peer": difference}
                impl = name.removesuffix(" deterministic")
                asked = {**shape, "deterministic": impl != name}
                rate = emit(impl, direction, asked, us, work * factor, **more)
                line[f"{direction} {name.split(' (')[0]}"] = round(rate)
        print(dim, seqlen, mask, line, difference, error, flush=True)

    return measure


def packed_inputs(dim):
    heads, total = HIDDEN // dim, sum(LENGTHS)
    starts = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    extras = AttentionExtras(
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_k=max(LENGTHS),
    )
    return [randn(total, heads, dim) for _ in range(3)], extras


def packed_cell(dim, mask):
    """16 mixed lengths beside dense sequences of the same FLOPs."""
    heads, options = HIDDEN // dim, options_of(dim, mask)
    batch, seqlen = SAME_FLOPS
    longest = max(LENGTHS)
    packed = shape_of(len(LENGTHS), longest, longest, heads, heads, dim, mask)
    shapes = {
        "packed": {**packed, "varlen": True, "lengths": LENGTHS},
        "dense": shape_of(batch, seqlen, seqlen, heads, heads, dim, mask),
    }
    work = {"packed": sum(pairs(n, mask) for n in LENGTHS), "dense": batch * pairs(seqlen, mask)}
    fwd: dict[str, Run] = {}
    bwd: dict[str, Run] = {}
    for name in shapes:
        if name == "packed":
            (q, k, v), extras = packed_inputs(dim)
        else:
            q, k, v = (randn(batch, seqlen, heads, dim) for _ in range(3))
            extras = AttentionExtras()
        out, lse = ours.forward(q, k, v, options, extras)
        fwd[name] = partial(ours.forward, q, k, v, options, extras)
        dout = torch.randn_like(out)
        bwd[name] = partial(ours.backward, dout, None, q, k, v, out, lse, options, extras)
        bwd[name]()

    def measure(timer):
        rates = {}
        for direction, runs, factor in (("fwd", fwd, 1.0), ("bwd", bwd, 2.5)):
            for name, us in timer(runs).items():
                flops = 4.0 * heads * dim * work[name] * factor
                rates[direction, name] = emit("triton", direction, shapes[name], us, flops)
        share = {d: round(rates[d, "packed"] / rates[d, "dense"], 3) for d in ("fwd", "bwd")}
        print("packed", dim, mask, [round(r) for r in rates.values()], share, flush=True)

    return measure


def decode_inputs(batch, keys, page, queries):
    heads, kv_heads, dim = 32, 8, 128
    used = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    shape, extras = (batch, keys, kv_heads, dim), AttentionExtras(seqused_k=used)
    if page:
        shape = (batch * keys // page, page, kv_heads, dim)
        ids = torch.randperm(shape[0], device="cuda").int().view(batch, -1)
        extras = AttentionExtras(seqused_k=used, page_ids_BU=ids)
    q, k, v = randn(batch, queries, heads, dim), randn(*shape), randn(*shape)
    return plan.inputs_of(q, k, v, options_of(dim, "causal"), extras)


def decode_cell(name):
    """The decode cells of one kind, as CUDA graphs."""
    found = []
    for (batch, keys), page, queries in DECODE[name]:
        found.append((batch, keys, page, queries, *decode_graph(batch, keys, page, queries)))

    def measure(timer):
        for batch, keys, page, queries, run, chosen, _ in found:
            us = timer({"triton": run})["triton"]
            work = 2.0 * 2 * batch * keys * 8 * 128
            shape = shape_of(batch, queries, keys, 32, 8, 128, "causal", page_size=page or None)
            more = {"tile": asdict(chosen), "timing": "cuda graph"}
            rate = emit("triton", "decode", shape, us, work, **more)
            median = us[len(us) // 2]
            cell = f"decode {batch} x {keys} page {page} queries {queries}"
            print(f"{cell}: {median:.1f} us {rate:.2f} TB/s x{chosen.num_splits}", flush=True)

    return measure


def decode_graph(*cell):
    """(the decode launches as a CUDA graph, their config, what must stay alive)."""
    x = decode_inputs(*cell)
    chosen = tiles.decode_config(plan.problem_of(x, "fwd"), detect(x.q.device))
    found = ours.plan_decode(x, *ours.forward_outputs(x, cleared=True), chosen)
    for launch in found:
        launch.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in found:
            launch.run()
    return graph.replay, chosen, (x, found)


def cells():
    """Name -> what prepares it, in the order of measurement."""
    found: dict[str, Any] = {}
    for dim, seqlen, mask in DENSE:
        found[f"dense-{dim}-{seqlen}-{mask}"] = partial(dense_cell, dim, seqlen, mask)
    for name in DECODE:
        found[f"decode-{name}"] = partial(decode_cell, name)
    for dim, mask in PACKED:
        found[f"packed-{dim}-{mask}"] = partial(packed_cell, dim, mask)
    return found


def child(name, reps):
    """Prepare a cell, say so, wait for the word, measure."""
    measure = cells()[name]()
    timer = Timer(2 * reps if name.startswith("decode") else reps)
    torch.cuda.synchronize()
    print("READY", flush=True)
    if sys.stdin.readline().strip() == "GO":
        measure(timer)


class Cells:
    """The processes of a run's cells: all prepare, one at a time measures."""

    def __init__(self, names, args):
        self.started, self.processes, self.ready = time.time(), {}, []
        for name in names:
            command = [sys.executable, __file__, "--cell", name, "--reps", str(args.reps)]
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            )

    def wait(self, seconds):
        """Names that are ready in time, in order; the rest is stopped."""
        threads = {name: Thread(target=self._until_ready, args=(name,)) for name in self.processes}
        for thread in threads.values():
            thread.start()
        for thread in threads.values():
            thread.join(max(0.0, seconds - (time.time() - self.started)))
        ready = set(self.ready)
        for name, process in self.processes.items():
            if name not in ready:
                print("not ready", name, flush=True)
                process.kill()
        for thread in threads.values():
            thread.join()
        return [name for name in self.processes if name in ready]

    def _until_ready(self, name):
        for line in self.processes[name].stdout:
            if line.strip() == "READY":
                self.ready.append(name)
                return
            print(name, line.rstrip(), flush=True)

    def measure(self, name):
        """Lines that a cell prints while it measures."""
        process = self.processes[name]
        out, _ = process.communicate("GO\n")
        return (out or "").splitlines()

    def stop(self):
        """End what still waits."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()


def commit_here():
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    parser.add_argument("--only", nargs="+", default=[""], help="cells whose name contains one")
    parser.add_argument("--reps", type=int, default=11)
    parser.add_argument("--wait", type=float, default=300, help="seconds for cells to compile")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after this")
    parser.add_argument("--commit", default="")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        return child(args.cell, args.reps)
    args.results.mkdir(parents=True, exist_ok=True)
    shared = {
        "run": uuid.uuid4().hex[:12],
        "gpu": torch.cuda.get_device_name().removeprefix("NVIDIA ").split(" ")[0].lower(),
        "commit": args.commit or commit_here(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "date": datetime.date.today().isoformat(),
    }
    count = 0
    running = Cells([n for n in cells() if any(part in n for part in args.only)], args)
    ready = running.wait(args.wait)
    print(f"{len(ready)} cells ready, {time.time() - running.started:.0f} s", flush=True)
    for name in ready:
        if time.time() - running.started > args.seconds:
            print("no time for", name, flush=True)
            continue
        for line in running.measure(name):
            if line.startswith("ROW "):
                count += 1
                with open(args.results / "attention.jsonl", "a", encoding="utf-8") as out:
                    out.write(json.dumps({**shared, **json.loads(line[4:])}) + "\n")
            else:
                print(line, flush=True)
    running.stop()
    print(f"{time.time() - running.started:.0f} s")
    print(json.dumps({"run": shared["run"], "rows": count}))


if __name__ == "__main__":
    main()
