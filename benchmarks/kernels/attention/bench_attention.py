"""Triton attention beside FlexAttention and PyTorch's FlashAttention-2 and cuDNN, on one GPU.

    python benchmarks/kernels/attention/bench_attention.py --results benchmarks/results/h200

FLOPs: 4 * pairs * head dim a head forward, 2.5 times that backward, on the pairs that the mask
leaves (causal: half of S^2, as the papers count). 16k tokens, hidden 2048. Every repetition starts
with a cold L2 and the implementations take turns. Decode is timed in a CUDA graph. `--tune` times
candidate tiles first and measures with the fastest, which the row names (key "tile"). The last line
is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, replace
from functools import partial

import torch
import triton

from ridgeline.core.arch import KNOWN, pretend
from ridgeline.kernels.attention import config as tiles
from ridgeline.kernels.attention import ref
from ridgeline.kernels.attention import triton as ours
from ridgeline.kernels.attention import triton_plan as plan
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions

CEILING_TFLOPS = KNOWN["sm90"].ceilings.matmul_tflops["bfloat16"]
CEILING_TBPS = KNOWN["sm90"].ceilings.read_gbps / 1e3
TOKENS, HIDDEN, WINDOW = 16384, 2048, 1024
CELLS = [
    (dim, seqlen, mask)
    for seqlen in (16384, 4096)
    for dim in (128, 64)
    for mask in ("causal", "window", "full")
]
DECODE = [
    # batch, keys, page, queries
    (1, 8192, 0, 1),
    (8, 8192, 0, 1),
    (32, 8192, 0, 1),
    (128, 2048, 0, 1),
    (1, 131072, 0, 1),
    (32, 8192, 16, 1),
    (128, 2048, 16, 1),
    (32, 8192, 256, 1),
    (128, 2048, 256, 1),
    (32, 8192, 256, 8),
    (32, 8192, 16, 8),
]


def tile(m, n, warps, stages, **flags):
    flags = {"tma": True, **flags}
    return tiles.TileConfig(block_m=m, block_n=n, num_warps=warps, num_stages=stages, **flags)


CANDIDATES = {
    ("fwd", 64): [tile(64, 128, 4, 2), tile(64, 64, 4, 3)],
    ("fwd", 128): [tile(64, 64, 4, 3), tile(64, 32, 4, 3), tile(64, 32, 4, 4)],
    ("dkdv", 64): [tile(64, 64, 4, 3), tile(64, 64, 4, 2)],
    ("dkdv", 128): [tile(64, 64, 4, 2)],
    ("dq", 64): [tile(128, 64, 8, 3), tile(64, 64, 4, 2)],
    ("dq", 128): [tile(64, 64, 4, 2), tile(128, 64, 8, 3)],
}


def candidates(kernel, dim, mask):
    found = CANDIDATES[kernel, dim]
    if mask == "full":
        return found
    if kernel == "dkdv":
        both = mask == "window"
        return found + ([replace(t, branch=True) for t in found] if both else [])
    return [replace(t, branch=True) for t in found]


def pairs(seqlen, mask):
    if mask == "window":
        return WINDOW * seqlen - WINDOW * (WINDOW - 1) / 2
    return seqlen**2 * (0.5 if mask == "causal" else 1.0)


def options_of(dim, mask, **more):
    left = WINDOW - 1 if mask == "window" else None
    return AttentionOptions(
        softmax_scale=dim**-0.5, causal=mask != "full", window_left=left, **more
    )


def dense(dim, seqlen, mask, device):
    batch, heads = TOKENS // seqlen, HIDDEN // dim
    make = torch.empty if device == "cpu" else torch.randn
    q, k, v = (
        make(batch, seqlen, heads, dim, device=device, dtype=torch.bfloat16) for _ in range(3)
    )
    return plan.inputs_of(q, k, v, options_of(dim, mask), AttentionExtras())


def launches(kernel, x, config):
    """Launches of one kernel with one tile, outputs allocated here."""
    out, lse = ours.forward_outputs(x)
    if kernel == "fwd":
        return ours.plan_forward(x, out, lse, config)
    dout = torch.empty_like(out) if not out.is_cuda else torch.randn_like(out)
    both = tiles.BackwardConfig(dkdv=config, dq=config)
    return ours.BackwardPlan(x, dout, None, out, lse.fill_(10.0), both).launch(kernel, config)


def decode_inputs(batch, keys, page, queries, device):
    heads, kv_heads, dim = 32, 8, 128
    make = torch.empty if device == "cpu" else torch.randn
    kind = {"device": device, "dtype": torch.bfloat16}
    used = torch.full((batch,), keys, dtype=torch.int32, device=device)
    q = make(batch, queries, heads, dim, **kind)
    if page:
        shape = (batch * keys // page, page, kv_heads, dim)
        ids = torch.randperm(shape[0], device=device).int().view(batch, -1)
        extras = AttentionExtras(seqused_k=used, page_ids_BU=ids)
    else:
        shape = (batch, keys, kv_heads, dim)
        extras = AttentionExtras(seqused_k=used)
    if device == "cpu":  # only for compiling: the addresses are not read
        k = torch.empty(1, **kind).expand(shape)
        k = torch.empty_strided(shape, (0, kv_heads * dim, dim, 1), **kind) if not page else k
        k = torch.empty((2, *shape[1:]), **kind) if page else k
        v = k
    else:
        k, v = make(*shape, **kind), make(*shape, **kind)
    return plan.inputs_of(q, k, v, options_of(dim, "causal"), extras)


def decode_candidates(x):
    base = tiles.decode_config(plan.problem_of(x, "fwd"), pretend("sm90"))
    shapes = [(64, 4, 7), (64, 4, 5)] if x.paged else [(64, 4, 3), (128, 4, 2)]
    for n, warps, stages in shapes:
        tma = not x.paged or x.k.shape[1] % n == 0
        one = tile(base.tile.block_m, n, warps, stages, tma=tma)
        for splits in (base.num_splits, 2 * base.num_splits):
            yield tiles.DecodeConfig(tile=one, num_splits=splits)


def compile_job(job):
    """Compile one candidate here, without a GPU; Triton's cache on disk carries it over."""
    torch.set_num_threads(1)
    try:
        if job[0] == "decode":
            x = decode_inputs(*job[1], "cpu")
            out, lse = ours.forward_outputs(x)
            found = ours.plan_decode(x, out, lse, job[2])
        else:
            found = launches(job[0], dense(job[1], 4096, job[2], "cpu"), job[3])
        for launch in found:
            plan.compile_for(launch)
    except Exception as error:
        return job, f"{type(error).__name__}: {str(error)[:200]}"
    return job, None


def jobs(tune):
    for cell in DECODE:
        x = decode_inputs(*cell, "cpu")
        shipped = tiles.decode_config(plan.problem_of(x, "fwd"), pretend("sm90"))
        for config in {shipped, *(decode_candidates(x) if tune else ())}:
            yield "decode", cell, config
    for dim in (128, 64):
        for mask in ("full", "causal", "window"):
            for kernel in ("fwd", "dkdv", "dq"):
                for config in candidates(kernel, dim, mask) if tune else ():
                    yield kernel, dim, mask, config


FLUSH = None


def once(run):
    """Microseconds of one call from a cold L2."""
    FLUSH.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    return start, end


def timed(runs, reps):
    """{name: sorted microseconds}; the implementations take turns."""
    for run in runs.values():
        run()
        run()
    events = {name: [] for name in runs}
    for _ in range(reps):
        for name, run in runs.items():
            events[name].append(once(run))
    torch.cuda.synchronize()
    return {n: sorted(s.elapsed_time(e) * 1e3 for s, e in pairs_) for n, pairs_ in events.items()}


def fastest(runs, reps=5):
    """(name of the fastest, all medians); a candidate that fails is left out."""
    working = {}
    for name, run in runs.items():
        try:
            run()
            torch.cuda.synchronize()
            working[name] = run
        except Exception as error:
            print("failed", name, str(error)[:100], flush=True)
    times = {name: us[len(us) // 2] for name, us in timed(working, reps).items()}
    best = min(times, key=times.get)
    return best, times


def run_all(found):
    for launch in found:
        launch.run()


def label(t):
    flags = "".join(f" {n}" for n in ("tma", "branch") if getattr(t, n))
    return f"{t.block_m}x{t.block_n} w{t.num_warps} s{t.num_stages}{flags}"


class Bench:
    def __init__(self, args):
        self.args, self.rows = args, []
        self.start, self.run_id = time.time(), uuid.uuid4().hex[:12]
        self.gpu = torch.cuda.get_device_name()
        self.versions = {"torch": torch.__version__, "triton": triton.__version__}
        self.commit = (
            args.commit
            or subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
            ).stdout.strip()
        )

    def left(self):
        return self.args.seconds - (time.time() - self.start)

    def row(self, impl, direction, shape, us, work, **more):
        median = us[len(us) // 2]
        decode = direction == "decode"
        rate = work / median / 1e6
        ceiling = CEILING_TBPS if decode else CEILING_TFLOPS
        row = {
            "op": "attention",
            "impl": impl,
            "run": self.run_id,
            "gpu": self.gpu,
            "dtype": "bfloat16",
            "direction": direction,
            "shape": shape,
            "median_us": round(median, 2),
            "p20_us": round(us[len(us) // 5], 2),
            "p80_us": round(us[len(us) * 4 // 5], 2),
            ("tbps" if decode else "tflops"): round(rate, 3 if decode else 1),
            "ceiling": ceiling,
            "percent_of_ceiling": round(100 * rate / ceiling, 1),
            "commit": self.commit,
            "versions": self.versions,
            "date": datetime.date.today().isoformat(),
            **more,
        }
        self.rows.append(row)
        with open(self.args.results / "attention.jsonl", "a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
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


def error_ratio(x, out):
    """max |ours - fp32| over max |PyTorch in bf16 - fp32| on the first 512 rows of a head."""
    n = min(512, x.seqlen_q)
    q, k, v = (t[:1, :n, :1] for t in (x.q, x.k, x.v))
    if not x.options.causal:
        return None
    exact, _ = ref.attention_ref(q, k, v, x.options, AttentionExtras())
    same, _ = ref.attention_ref(q, k, v, x.options, AttentionExtras(), torch.bfloat16)
    floor = (same.float() - exact).abs().max().item()
    return round((out[:1, :n, :1].float() - exact).abs().max().item() / floor, 3)


def choose(bench, x, dim, mask, seqlen):
    """The tiles to measure with: by timing candidates, or the shipped table."""
    arch = pretend("sm90")
    forward = tiles.forward_tile(plan.problem_of(x, "fwd"), arch)
    backward = tiles.backward_config(plan.problem_of(x, "bwd"), arch)
    if not bench.args.tune:
        return forward, backward
    best = {}
    for kernel in ("fwd", "dkdv", "dq"):
        found = candidates(kernel, dim, mask)
        if not found:
            continue
        runs = {t: partial(run_all, launches(kernel, x, t)) for t in found}
        best[kernel], times = fastest(runs)
        print(dim, seqlen, mask, kernel, {label(t): round(u) for t, u in times.items()}, flush=True)
    return best["fwd"], tiles.BackwardConfig(dkdv=best["dkdv"], dq=best["dq"])


def flex(x, mask):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    mods = {
        "causal": lambda b, h, i, j: i >= j,
        "window": lambda b, h, i, j: (i >= j) & (i - j < WINDOW),
    }
    S = x.seqlen_q
    blocks = None
    if mask != "full":
        blocks = create_block_mask(mods[mask], None, None, S, S, device=x.q.device)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks)


def peers(x, mask):
    """name -> f(q_BHSD, k, v) of every peer that can do the mask."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    def backend(kind):
        def run(q, k, v):
            with sdpa_kernel(kind):
                return sdpa(q, k, v, is_causal=mask == "causal")

        return run

    torch_name = f"torch {torch.__version__.split('+')[0]}"
    found = {f"flexattention ({torch_name})": flex(x, mask)}
    if mask != "window":
        found[f"flashattention-2 ({torch_name} sdpa)"] = backend(SDPBackend.FLASH_ATTENTION)
        cudnn = torch.backends.cudnn.version()
        found[f"cudnn {cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100} (sdpa)"] = backend(
            SDPBackend.CUDNN_ATTENTION
        )
    return found


def relative(a, b):
    """Norm of the difference over the norm, in fp32."""
    return round(((a.float() - b.float()).norm() / b.float().norm()).item(), 5)


def leaves_of(x, contiguous):
    """q, k, v as [B, H, S, D] that want a gradient: views, or in that order in memory."""
    found = [t.transpose(1, 2).detach() for t in (x.q, x.k, x.v)]
    return [(t.contiguous() if contiguous else t).requires_grad_() for t in found]


def dense_cell(bench, dim, seqlen, mask):
    """Rows of one cell, forward and backward, ours and the peers'."""
    x = dense(dim, seqlen, mask, "cuda")
    forward, backward = choose(bench, x, dim, mask, seqlen)
    ours.forward_tile = lambda problem, arch: forward
    ours.backward_config = lambda problem, arch: backward
    batch, heads = TOKENS // seqlen, HIDDEN // dim
    work = 4.0 * batch * heads * dim * pairs(seqlen, mask)
    shape = shape_of(batch, seqlen, seqlen, heads, heads, dim, mask)
    out, lse = ours.forward(x.q, x.k, x.v, x.options, x.extras)
    dout = torch.randn_like(out)
    views, copies = leaves_of(x, False), leaves_of(x, True)
    fwd = {"triton": lambda: ours.forward(x.q, x.k, x.v, x.options, x.extras)}
    args = (dout, None, x.q, x.k, x.v, out, lse, x.options, x.extras)
    bwd = {"triton": lambda: ours.backward(*args)}
    grads, differences = ours.backward(*args), None
    mine = [t.transpose(1, 2) for t in (out, grads.dq, grads.dk, grads.dv)]
    for name, peer in peers(x, mask).items() if bench.left() > 10 else ():
        try:
            leaves = copies if name.startswith("flex") else views
            result = peer(*leaves)
            dout_t = torch.empty_like(result).copy_(dout.transpose(1, 2))
            fwd[name] = partial(peer, *(t.detach() for t in leaves))
            bwd[name] = partial(torch.autograd.grad, result, leaves, dout_t, retain_graph=True)
            others = bwd[name]()
            with torch.no_grad():
                fwd[name]()
            if differences is None:
                differences = [relative(a, b) for a, b in zip(mine, (result, *others), strict=True)]
        except Exception as error:
            print("peer failed", name, type(error).__name__, str(error)[:120], flush=True)
            fwd.pop(name, None), bwd.pop(name, None)
    reps = bench.args.reps
    line = {}
    for direction, runs, factor in (("fwd", fwd, 1.0), ("bwd", bwd, 2.5)):
        with torch.no_grad():
            times = timed(runs, reps)
        for name, us in times.items():
            more = {}
            if name == "triton" and direction == "fwd":
                more = {"tile": asdict(forward), "error": error_ratio(x, out)}
            elif name == "triton":
                more = {"tile": asdict(backward), "difference_from_peer": differences}
                always = {**shape, "deterministic": True}  # the one backward there is
                bench.row(name, direction, always, us, work * factor, **more)
            rate = bench.row(name, direction, shape, us, work * factor, **more)
            line[f"{direction} {name.split(' ')[0]}"] = round(rate)
    print(dim, seqlen, mask, line, differences, f"{bench.left():.0f} s left", flush=True)


def varlen_cell(bench, dim=128):
    """16 mixed lengths, causal, against the dense rate for the same FLOPs."""
    lengths = [4096, 82, 3000, 1500, 640, 2048, 128, 1024, 333, 800, 1700, 600, 233, 100, 60, 40]
    heads = HIDDEN // dim
    total = sum(lengths)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = (torch.randn(total, heads, dim, device="cuda").bfloat16() for _ in range(3))
    extras = AttentionExtras(
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(lengths),
    )
    options = options_of(dim, "causal")
    work = 4.0 * heads * dim * sum(n * n / 2 for n in lengths)
    out, lse = ours.forward(q, k, v, options, extras)
    args = (torch.randn_like(out), None, q, k, v, out, lse, options, extras)
    fwd = timed({"triton": lambda: ours.forward(q, k, v, options, extras)}, bench.args.reps)
    bwd = timed({"triton": lambda: ours.backward(*args)}, bench.args.reps)
    shape = shape_of(len(lengths), max(lengths), max(lengths), heads, heads, dim, "causal")
    shape["lengths"] = lengths
    rates = [
        bench.row("triton", d, shape, us["triton"], work * f, varlen=True)
        for d, us, f in (("fwd", fwd, 1.0), ("bwd", bwd, 2.5))
    ]
    print("varlen", dim, [round(r) for r in rates], flush=True)


def decode_cell(bench, batch, keys, page, queries):
    x = decode_inputs(batch, keys, page, queries, "cuda")
    chosen = tiles.decode_config(plan.problem_of(x, "fwd"), pretend("sm90"))
    out, lse = ours.forward_outputs(x)

    def graph(config):
        found = ours.plan_decode(x, out, lse, config)
        run_all(found)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run_all(found)
        return captured.replay

    configs = {chosen: graph(chosen)}
    if bench.args.tune:
        for config in decode_candidates(x):
            try:
                configs[config] = graph(config)
            except Exception as error:
                print("failed", label(config.tile), str(error)[:80], flush=True)
        chosen, times = fastest(configs)
        top = sorted(times.items(), key=lambda item: item[1])[:4]
        named = {f"{label(c.tile)} x{c.num_splits}": round(u, 1) for c, u in top}
        print("decode", batch, keys, page, queries, named, flush=True)
    us = timed({"triton": configs[chosen]}, 20)["triton"]
    work = 2.0 * 2 * batch * keys * 8 * 128
    shape = shape_of(batch, queries, keys, 32, 8, 128, "causal", page_size=page or None)
    more = {"tile": asdict(chosen), "timing": "cuda graph"}
    rate = bench.row("triton", "decode", shape, us, work, **more)
    median = us[len(us) // 2]
    print("decode", batch, keys, page, queries, f"{median:.1f} us {rate:.2f} TB/s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, required=True)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--reps", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting cells after this")
    parser.add_argument("--wait", type=float, default=300, help="seconds for peers to compile")
    parser.add_argument("--commit", default="")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count() - 1)
    parser.add_argument("--warm-flex", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warm_flex:
        return warm_flex(args.warm_flex)
    args.results.mkdir(parents=True, exist_ok=True)
    start = time.time()
    warm = [sys.executable, __file__, "--results", str(args.results), "--warm-flex"]
    one = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    warmers = [subprocess.Popen([*warm, f"{d},{s},{m}"], env=one) for d, s, m in CELLS]
    if args.workers:
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
            for job, error in pool.imap_unordered(compile_job, list(jobs(args.tune))):
                if error:
                    print("not compiled", job, error, flush=True)
    print(f"tiles compiled, {time.time() - start:.0f} s", flush=True)
    global FLUSH
    FLUSH = torch.empty(2**28, dtype=torch.int8, device="cuda")
    bench = Bench(args)
    bench.start = start
    for cell in DECODE:
        decode_cell(bench, *cell)
    for warmer in warmers:
        try:
            warmer.wait(timeout=max(0.1, args.wait - (time.time() - start)))
        except subprocess.TimeoutExpired:
            warmer.kill()
    print(f"peers compiled, {time.time() - start:.0f} s", flush=True)
    for cell in CELLS:
        if bench.left() > 3:
            dense_cell(bench, *cell)
            torch.cuda.empty_cache()
    ours.forward_tile, ours.backward_config = tiles.forward_tile, tiles.backward_config
    if bench.left() > 4:
        varlen_cell(bench)
    print(json.dumps({"run": bench.run_id, "rows": len(bench.rows)}))


def warm_flex(cell):
    """Compile FlexAttention of one cell in a process of its own, for the compile cache on disk."""
    dim, seqlen, mask = cell.split(",")
    x = dense(int(dim), int(seqlen), mask, "cuda")
    leaves = leaves_of(x, True)
    peer = flex(x, mask)
    result = peer(*leaves)
    torch.autograd.grad(result, leaves, torch.empty_like(result), retain_graph=True)
    with torch.no_grad():
        peer(*[t.detach() for t in leaves])
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
