"""Time and peak memory of quantizing a Llama-3-8B-shaped model on one GPU, or on several.

    python benchmarks/quant/bench_quantize_8b.py                                   # 32 blocks
    python benchmarks/quant/bench_quantize_8b.py --blocks 8 --budget-s 200         # a part
    torchrun --nproc-per-node 2 benchmarks/quant/bench_quantize_8b.py              # two GPUs

Weights are random of the right shapes, made on the device block by block in the place of being read
from disk; calibration is 128 x 2,048 random tokens, bf16. Every block is calibrated, solved, packed
and copied to the host, as `ridgeline quantize` does, but not written. After a warm-up on one block
(kernels are compiled then) blocks are done until all are or `--budget-s` is over; `seconds` is what
they took, `seconds_all_blocks` that times 32 / done, the same where all were done. One row is
appended to benchmarks/results/<gpu>/quantize.jsonl; the last line of stdout is JSON.
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


class OverBudgetError(Exception):
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
    parser.add_argument("--blocks", type=int, default=LAYERS)
    parser.add_argument("--budget-s", type=float, default=1e9)
    parser.add_argument("--method", default="gptq", choices=["gptq", "awq", "awq+gptq"])
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--small", action="store_true", help="a tiny shape, to check the script")
    parser.add_argument("--dry-run", action="store_true", help="measure, append nothing")
    return parser.parse_args()


def model_of(args: argparse.Namespace, blocks: int, device: torch.device) -> RandomDecoder:
    torch.manual_seed(0)
    sizes = SMALL if args.small else SHAPE
    shape = DecoderConfig(**sizes, num_layers=blocks, rope=RopeConfig(base=500000.0))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return RandomDecoder(shape, dtype, device)


def run(args: argparse.Namespace, model: RandomDecoder, sequences: int, ranks: Ranks) -> list:
    """Quantize; (block, seconds since the start) of each block."""
    ids = torch.randint(
        0, model.config.vocab_size, (sequences, args.length),
        generator=torch.Generator().manual_seed(1),
    ).to(model.device)  # fmt: skip
    recipe = Recipe(method=args.method, layout=GPTQFormat(group_size=args.group_size))
    start, done, packed_bytes = time.perf_counter(), [], 0

    def take(index: int, weights: dict) -> None:
        nonlocal packed_bytes
        for weight in weights.values():
            packed = recipe.layout.pack(weight)
            packed_bytes += sum(tensor.cpu().nbytes for tensor in packed.values())
        done.append((index, time.perf_counter() - start))
        late = torch.tensor(float(done[-1][1] > args.budget_s), device=model.device)
        ranks.sum_(late)  # every rank stops at the same block
        if float(late):
            raise OverBudgetError

    try:
        quantize_model(
            model, ids, recipe, around=Around(on_block=take, keep_weights=False, ranks=ranks)
        )
    except OverBudgetError:
        pass
    return done


def row_of(args: argparse.Namespace, done: list, device: torch.device, ranks: Ranks) -> dict:
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    seconds = done[-1][1]
    return {
        "op": "quantize",
        "run": uuid.uuid4().hex[:12],
        "gpu": device_name(device, ranks),
        "model": "Llama-3-8B shapes, random weights",
        "impl": f"ours {args.method}",
        "method": args.method,
        "format": "gptq",
        "bits": 4,
        "group_size": args.group_size,
        "symmetric": True,
        "act_order": "static",
        "dtype": "bfloat16",
        "calibration_tokens": args.sequences * args.length,
        "seed": 1,
        "ranks": ranks.world,
        "blocks": len(done),
        "seconds": round(seconds, 2),
        "seconds_all_blocks": round(seconds * LAYERS / len(done), 1),
        "block_seconds": [round(b - a, 2) for (_, a), (_, b) in zip(done, done[1:], strict=False)],
        "peak_memory_gib": round(peak / 2**30, 2),
        "commit": commit.stdout.strip() or "unknown",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
    }


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
    warm = argparse.Namespace(**vars(args))
    warm.budget_s = 1e9
    start = time.perf_counter()
    run(warm, model_of(args, 1, device), min(args.sequences, 8 * ranks.world), ranks)
    warm_seconds = time.perf_counter() - start
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    done = run(args, model_of(args, args.blocks, device), args.sequences, ranks)
    if ranks.rank == 0:
        row = row_of(args, done, device, ranks) | {"warm_up_seconds": round(warm_seconds, 1)}
        if not args.dry_run:
            target = ROOT / "benchmarks" / "results" / row["gpu"] / "quantize.jsonl"
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        print(json.dumps(row))
    ranks.leave()


if __name__ == "__main__":
    main()
