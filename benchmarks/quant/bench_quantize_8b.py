"""Time and peak memory of quantizing a Llama-3-8B-shaped model on one GPU, or on several.

    python benchmarks/quant/bench_quantize_8b.py                                   # 32 blocks
    python benchmarks/quant/bench_quantize_8b.py --layers 4                        # a part
    python benchmarks/quant/bench_quantize_8b.py --seconds 150                     # as many as fit
    torchrun --nproc-per-node 2 benchmarks/quant/bench_quantize_8b.py              # two GPUs

Weights are random of the right shapes, made on the device block by block in the place of being read
from disk; calibration is 128 x 2,048 random tokens, bf16. Every block is calibrated, solved, packed
and copied to the host, as `ridgeline quantize` does, but not written. After a warm-up on one block
(kernels are compiled then) blocks are done until all are or `--seconds` (the warm-up included) are
over; each says its seconds and the peak memory so far. `seconds` is what they took,
`seconds_all_blocks` that times 32 / done, and `whole` says whether all were done. One row is
appended to benchmarks/results/<gpu>/quantize.jsonl, none after a failure; the last line of stdout
is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from ridgeline.core import env, progress
from ridgeline.engine.stream import StreamedDecoder
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.hf import skeleton
from ridgeline.nn.rope import RopeConfig
from ridgeline.quant.calibrate import Around, quantize_model
from ridgeline.quant.ranks import Ranks
from ridgeline.quant.recipe import Recipe
from ridgeline.quant.report import QuantizedModel

ROOT = Path(__file__).parents[2]
LAYERS = 32
SHAPE: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_seqlen": 8192,
}
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "max_seqlen": 8192,
}
"""For a check of this script without a GPU (--small)."""


class OverTimeError(Exception):
    """The time is over."""


class RandomDecoder(StreamedDecoder):
    """A streamed decoder whose blocks are drawn instead of read."""

    def __init__(self, shape: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = shape, dtype, device
        self.decoder = skeleton(shape, dtype)
        self.decoder.eval().requires_grad_(False)
        for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
            self._assign(name)

    def _assign(self, full_name: str) -> None:
        owner, _, name = full_name.rpartition(".")
        module = self.decoder.get_submodule(owner)
        shape = getattr(module, name).shape
        if len(shape) == 1:
            drawn = torch.ones(shape, dtype=self.dtype, device=self.device)
        else:
            drawn = torch.randn(shape, dtype=self.dtype, device=self.device) * shape[1] ** -0.5
        setattr(module, name, torch.nn.Parameter(drawn, requires_grad=False))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=LAYERS, help="blocks to do, of 32")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no block after these")
    parser.add_argument("--method", default="gptq", choices=["gptq", "awq", "awq+gptq"])
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--commit", help="what to call this tree where it has no git")
    parser.add_argument("--small", action="store_true", help="a tiny shape, to check the script")
    parser.add_argument("--dry-run", action="store_true", help="measure, append nothing")
    return parser.parse_args()


def model_of(args: argparse.Namespace, blocks: int, device: torch.device) -> RandomDecoder:
    torch.manual_seed(0)
    sizes = SMALL if args.small else SHAPE
    shape = DecoderConfig(**sizes, num_layers=blocks, rope=RopeConfig(base=500000.0))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return RandomDecoder(shape, dtype, device)


class Clock:
    """Seconds of each block, said as they are done; ends the run when the time is over."""

    def __init__(self, limit_s: float, device: torch.device, ranks: Ranks) -> None:
        self.limit_s, self.device, self.ranks = limit_s, device, ranks
        self.start, self.ends = now(device), []

    def tick(self, index: int) -> None:
        self.ends.append(now(self.device) - self.start)
        seconds = self.ends[-1] - (self.ends[-2] if len(self.ends) > 1 else 0.0)
        if self.ranks.rank == 0:
            peak = peak_memory(self.device) / 2**30
            print(f"block {index}: {seconds:.2f} s, peak {peak:.2f} GiB", flush=True)
        late = torch.tensor(float(self.ends[-1] + seconds > self.limit_s), device=self.device)
        self.ranks.sum_(late)  # every rank stops at the same block
        if float(late):
            raise OverTimeError


def now(device: torch.device) -> float:
    """Seconds, once the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_memory(device: torch.device) -> int:
    """Bytes of the device."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def run(
    args: argparse.Namespace, model: RandomDecoder, sequences: int, clock: Clock
) -> QuantizedModel | None:
    """Quantize; None where the time was over."""
    ids = torch.randint(
        0, model.config.vocab_size, (sequences, args.length),
        generator=torch.Generator().manual_seed(1),
    ).to(model.device)  # fmt: skip
    recipe = Recipe(method=args.method, layout=GPTQFormat(group_size=args.group_size))

    def take(index: int, weights: dict) -> None:
        for weight in weights.values():
            for tensor in recipe.layout.pack(weight).values():
                tensor.cpu()
        clock.tick(index)

    around = Around(on_block=take, keep_weights=False, ranks=clock.ranks)
    try:
        return quantize_model(model, ids, recipe, around=around)
    except OverTimeError:
        return None


def row_of(args: argparse.Namespace, clock: Clock, result: QuantizedModel | None) -> dict:
    device, ranks, ends = clock.device, clock.ranks, clock.ends
    solve = None if result is None else round(sum(r.seconds for r in result.reports), 2)
    durations = [b - a for a, b in zip([0.0, *ends], ends, strict=False)]
    return {
        "op": "quantize",
        "run": uuid.uuid4().hex[:12],
        "gpu": device_name(device, ranks),
        "model": "tiny, random weights" if args.small else "Llama-3-8B shapes, random weights",
        "impl": f"ours {args.method}",
        "method": args.method,
        "format": "gptq",
        "bits": 4,
        "group_size": args.group_size,
        "symmetric": True,
        "act_order": "static",
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
        "calibration_tokens": args.sequences * args.length,
        "seed": 1,
        "ranks": ranks.world,
        "blocks": len(ends),
        "whole": len(ends) == LAYERS,
        "seconds": round(ends[-1], 2),
        "seconds_all_blocks": round(ends[-1] * LAYERS / len(ends), 1),
        "block_seconds": [round(seconds, 2) for seconds in durations],
        "solve_seconds": solve,
        "peak_memory_gib": round(peak_memory(device) / 2**30, 2),
        "commit": args.commit or git_commit(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
    }


def git_commit() -> str:
    said = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return said.stdout.strip() or "unknown"


def device_name(device: torch.device, ranks: Ranks) -> str:
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ").lower().replace(" ", "_")
    return name if ranks.world == 1 else f"{name}x{ranks.world}"


def main() -> None:
    args = arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", env.local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    ranks = Ranks.join(device)
    progress.set_mode("lines" if ranks.rank == 0 else "quiet")
    start = now(device)
    warm = Clock(1e9, device, ranks)
    run(args, model_of(args, 1, device), min(args.sequences, 8 * ranks.world), warm)
    warm_seconds = now(device) - start
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    model = model_of(args, args.layers, device)
    clock = Clock(args.seconds - warm_seconds, device, ranks)
    result = run(args, model, args.sequences, clock)
    if ranks.rank == 0:
        row = row_of(args, clock, result) | {"warm_up_seconds": round(warm_seconds, 1)}
        if not args.dry_run:
            target = ROOT / "benchmarks" / "results" / row["gpu"] / "quantize.jsonl"
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        print(json.dumps(row))
    ranks.leave()


if __name__ == "__main__":
    main()
