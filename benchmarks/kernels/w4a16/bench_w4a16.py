"""W4A16 beside cuBLAS bf16, Marlin, Machete and quack on one GPU, group 128, symmetric, bf16.

    python benchmarks/kernels/w4a16/bench_w4a16.py --results benchmarks/results/h200
        [--vllm-library _C_stable_libtorch.abi3.so]   (Marlin, Machete; scalar_type.py beside it)
        [--quack-kernels FOLDER]   (of quack_peer.py, where quack itself is not installed)
        [--rows 1,16,1024] [--invariant]

Every implementation runs in CUDA graphs over copies of the weight (400 MB, so that L2 serves
none), in turns, many times; the row holds the median and the 20th and 80th percentile of a call.
Marlin and Machete get random words (timing only); ours is checked against an fp32 product first.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import pathlib
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from quack_peer import Exported

from ridgeline.core.arch import KNOWN
from ridgeline.core.roofline import floor
from ridgeline.formats.base import QuantizedWeight
from ridgeline.kernels.w4a16 import cute_sm90 as ours
from ridgeline.kernels.w4a16.config import decode_launch, prefers_lean, traits_of, uses_decode
from ridgeline.kernels.w4a16.layout import PackedW4, from_tensors, pack, unpack
from ridgeline.kernels.w4a16.prepared import Prepared
from ridgeline.kernels.w4a16.problem import W4A16Problem

SHAPES = [(4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672), (28672, 8192), (8192, 10240)]
ROWS = [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096]
GROUP = 128
COPIES_BYTES = 400e6
CEILINGS = KNOWN["sm90"].ceilings


@dataclass
class Timed:
    """One implementation's captured graph of `calls` calls."""

    graph: torch.cuda.CUDAGraph
    calls: int


def capture(calls: list[Callable[[], Any]]) -> Timed:
    """Warm up (compiles, allocates), then capture one call of each."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return Timed(graph, len(calls))


def measure(timed: dict[str, Timed], budget_ms: float) -> dict[str, list[float]]:
    """Microseconds a call, for every implementation, in turns: [p20, median, p80]."""
    marks: dict[str, list] = {name: [] for name in timed}
    once = {}
    for name, item in timed.items():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        item.graph.replay()
        end.record()
        torch.cuda.synchronize()
        once[name] = start.elapsed_time(end)
    turns = max(5, min(60, int(budget_ms / max(sum(once.values()), 1e-3))))
    for _ in range(turns):
        for name, item in timed.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            item.graph.replay()
            end.record()
            marks[name].append((start, end))
    torch.cuda.synchronize()
    out = {}
    for name, pairs in marks.items():
        us = torch.tensor([s.elapsed_time(e) * 1e3 / timed[name].calls for s, e in pairs])
        out[name] = [float(us.quantile(q)) for q in (0.2, 0.5, 0.8)]
    return out


def random_weight(n: int, k: int) -> QuantizedWeight:
    return QuantizedWeight(
        code_NK=torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda"),
        scale_NR=(torch.rand(n, k // GROUP, device="cuda") * 0.01 + 0.005).bfloat16(),
        zero_NR=None,
        bits=4,
        group_size=GROUP,
    )


def copy_of(packed: PackedW4) -> PackedW4:
    tensors = {f.name: getattr(packed, f.name) for f in fields(packed)}
    return replace(
        packed, **{n: t.clone() for n, t in tensors.items() if isinstance(t, torch.Tensor)}
    )


class Ours:
    """Copies of a packed weight, and calls on them."""

    def __init__(self, k: int, n: int, copies: int):
        first = pack(random_weight(n, k))
        self.dense = unpack(first).dequantize(torch.bfloat16)
        packed = [first] + [copy_of(first) for _ in range(copies - 1)]
        self.layers = [self.prepared(p, n, k) for p in packed]

    @staticmethod
    def prepared(packed: PackedW4, n: int, k: int) -> Prepared:
        return Prepared(
            impl="cute_sm90",
            n=n,
            k=k,
            bits=4,
            group_size=GROUP,
            dtype=torch.bfloat16,
            symmetric=True,
            act_order=False,
            silu_mul=False,
            tensors=ours.prepare(packed, torch.bfloat16),
        )

    def calls(self, act: torch.Tensor, count: int, invariant: bool) -> list:
        def call(layer):
            return lambda: ours.forward(act, layer, None, batch_invariant=invariant)

        return [call(layer) for layer in self.layers[:count]]

    def decode_calls(self, act: torch.Tensor, count: int, lean: bool) -> list:
        """The decode kernel with one or the other way of copying (config.prefers_lean)."""

        def call(layer):
            packed = from_tensors(layer.tensors, n=layer.n, k=layer.k)
            traits = traits_of(packed, act.dtype)
            sizes = (act.shape[0], packed.n_padded, packed.k_padded, ours.num_sms(0))
            launch = decode_launch(traits, *sizes, False, lean)
            out = act.new_empty(act.shape[0], layer.n)
            return lambda: ours.decode(act, packed, None, out, layer.tensors[5], launch=launch)

        return [call(layer) for layer in self.layers[:count]]

    def error(self, act: torch.Tensor) -> float:
        """Relative Frobenius error against an fp32 product."""
        want = act.float() @ self.dense.float().T
        return float((ours.forward(act, self.layers[0], None).float() - want).norm() / want.norm())


class Vllm:
    """Marlin and Machete from vLLM's library, on random words."""

    def __init__(self, library: pathlib.Path):
        torch.ops.load_library(str(library))
        spec = importlib.util.spec_from_file_location("st", library.parent / "scalar_type.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.kind = module.scalar_types.uint4b8.id

    def layer(self, k: int, n: int, copies: int) -> None:
        low, high = -(2**31), 2**31 - 1
        shapes = [(k // 16, n * 2), (n, k // 8)]
        marlin, machete = (
            [torch.randint(low, high, s, device="cuda", dtype=torch.int32) for _ in range(copies)]
            for s in shapes
        )
        self.marlin = marlin
        self.machete = [
            torch.ops._C.machete_prepack_B(w.t(), torch.bfloat16, self.kind, torch.bfloat16)
            for w in machete
        ]
        self.scale = torch.rand(k // GROUP, n, device="cuda", dtype=torch.bfloat16) * 0.01
        self.locks = torch.zeros(132 * 4, device="cuda", dtype=torch.int32)
        self.shape = (n, k)

    def marlin_calls(self, act: torch.Tensor, count: int) -> list:
        n, k = self.shape
        tail = (act.shape[0], n, k, False, True, False)

        def call(w):
            head = (act, None, w, None, self.scale, None, None, None, self.locks, self.kind)
            return lambda: torch.ops._C.marlin_gemm(*head, *tail)

        return [call(w) for w in self.marlin[:count]]

    def machete_calls(self, act: torch.Tensor, count: int) -> list:
        def call(w):
            rest = (self.kind, torch.bfloat16, self.scale, None, GROUP, None, None, None)
            return lambda: torch.ops._C.machete_mm(act, w, *rest)

        return [call(w) for w in self.machete[:count]]


class Quack:
    """quack's gemm_w4a16, where it is installed."""

    name = "quack 0.6.5"

    def has(self, k: int, n: int, m: int) -> bool:
        return True

    def __init__(self) -> None:
        formats = importlib.import_module("quack.operand_transform.formats")
        self.gemm = importlib.import_module("quack.gemm_w4").gemm_w4a16
        self.format = formats.decode_format("int4")

    def layer(self, k: int, n: int, copies: int) -> None:
        codes = self.format.quantize_reference(torch.randn(n, k, device="cuda") * 0.02)[:2]
        self.dense = self.format.dequant_reference(*codes)
        blob, scale = self.format.prepare(*codes)
        self.weights = [(blob.clone(), scale.clone()) for _ in range(copies)]

    def calls(self, act: torch.Tensor, count: int) -> list:
        def call(blob, scale):
            return lambda: self.gemm(act, blob, scale, wformat="int4")

        return [call(*w) for w in self.weights[:count]]

    def error(self, act: torch.Tensor) -> float:
        want = act.float() @ self.dense.float().T
        return float((self.calls(act, 1)[0]().float() - want).norm() / want.norm())


def versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("nvidia_cutlass_dsl", "tvm_ffi", "quack", "vllm"):
        module = sys.modules.get(name)
        if module is not None and getattr(module, "__version__", None):
            found[name] = module.__version__
    return found


def commit(given: str | None) -> str:
    if given:
        return given
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def gpu_name() -> str:
    """Of the results' folders: h200, else PyTorch's name."""
    name = torch.cuda.get_device_name()
    return "h200" if "H200" in name else name


def row_of(name: str, run: str, m: int, k: int, n: int, us: list[float]) -> dict[str, Any]:
    problem = W4A16Problem(m=m, n=n, k=k, group_size=GROUP, scale_dtype="bfloat16")
    cost = problem.cost()
    bound = floor(cost, CEILINGS, "bfloat16")
    moved = cost.bytes + (n * k * 1.5 if "cublas" in name else 0)
    return {
        "op": "w4a16",
        "impl": name,
        "run": run,
        "gpu": gpu_name(),
        "dtype": "bfloat16",
        "shape": {
            "m": m,
            "n": n,
            "k": k,
            "group_size": GROUP,
            "symmetric": True,
            "act_order": False,
        },
        "median_us": round(us[1], 3),
        "p20_us": round(us[0], 3),
        "p80_us": round(us[2], 3),
        "percent_of_ceiling": round(100 * bound.us / us[1], 1),
        "ceiling": f"{bound.bound}: {CEILINGS.source}",
        "floor_us": round(bound.us, 3),
        "tbps": round(moved / us[1] / 1e6, 3),
        "tflops": round(cost.flops / us[1] / 1e6, 1),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, help="folder of w4a16.jsonl")
    parser.add_argument("--vllm-library", type=pathlib.Path)
    parser.add_argument("--quack-kernels", type=pathlib.Path)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--shapes", default=",".join(f"{k}x{n}" for k, n in SHAPES))
    parser.add_argument("--invariant", action="store_true", help="also time batch invariance")
    parser.add_argument("--both", action="store_true", help="also the way of copying not in use")
    parser.add_argument("--milliseconds", type=float, default=60.0, help="of measuring a cell")
    parser.add_argument("--commit")
    parser.add_argument("--run", help="id of the rows, where a run is cut into several calls")
    return parser.parse_args()


def peers_of(args: argparse.Namespace) -> tuple[Vllm | None, Quack | Exported | None]:
    vllm = Vllm(args.vllm_library) if args.vllm_library else None
    if importlib.util.find_spec("quack"):
        return vllm, Quack()
    return vllm, Exported(args.quack_kernels) if args.quack_kernels else None


def shape_rows(args: argparse.Namespace, k: int, n: int, run: str, peers: tuple) -> list[dict]:
    """All rows of one layer."""
    vllm, quack = peers
    copies = min(24, max(3, int(COPIES_BYTES // (n * k / 2))))
    mine = Ours(k, n, copies)
    wide = [mine.dense.T] + [mine.dense.clone().T for _ in range(min(copies, 5))]
    for peer in (vllm, quack):
        if peer is not None:
            peer.layer(k, n, copies)
    out = []
    for m in map(int, args.rows.split(",")):
        act = torch.randn(m, k, device="cuda").bfloat16()
        error = mine.error(act)
        assert error < 4e-3, (k, n, m, error)
        count = copies if m < 1024 else 3
        wanted = {}
        if args.invariant and m <= 64:
            wanted["ridgeline cute_sm90 batch-invariant"] = mine.calls(act, count, True)
        if args.both and uses_decode(m, n, k):
            lean = not prefers_lean(m, n, k)
            other = "lean" if lean else "row copies"
            wanted[f"ridgeline cute_sm90 {other}"] = mine.decode_calls(act, count, lean)
        wanted["ridgeline cute_sm90"] = mine.calls(act, count, False)
        wanted["cublas bf16"] = [lambda w=w, act=act: act @ w for w in wide]
        if vllm is not None:
            wanted["marlin (vllm 0.33.0)"] = vllm.marlin_calls(act, count)
            wanted["machete (vllm 0.33.0)"] = vllm.machete_calls(act, count)
        if quack is not None and quack.has(k, n, m):
            wanted[quack.name] = quack.calls(act, count)
            wrong = quack.error(act)
            assert wrong < 1e-2, (quack.name, k, n, m, wrong)
        timed = {name: capture(calls) for name, calls in wanted.items()}
        rows = [row_of(i, run, m, k, n, us) for i, us in measure(timed, args.milliseconds).items()]
        for row in rows:
            if row["impl"].startswith("ridgeline"):
                row["error"] = round(error, 6)
        text = "  ".join(f"{row['impl'].split(' (')[0]} {row['median_us']:.2f}" for row in rows)
        print(f"K {k} N {n} M {m}: {text}", flush=True)
        out += rows
    return out


def main() -> None:
    args = parse()
    run = args.run or uuid.uuid4().hex[:12]
    peers = peers_of(args)
    common = {
        "commit": commit(args.commit),
        "date": datetime.date.today().isoformat(),
    }
    count = 0
    for text in args.shapes.split(","):
        k, n = map(int, text.split("x"))
        rows = [
            {**row, **common, "versions": versions()} for row in shape_rows(args, k, n, run, peers)
        ]
        count += len(rows)
        if args.results:
            args.results.mkdir(parents=True, exist_ok=True)
            with open(args.results / "w4a16.jsonl", "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        torch.cuda.empty_cache()
    print(json.dumps({"op": "w4a16", "run": run, "rows": count, **common}))


if __name__ == "__main__":
    main()
