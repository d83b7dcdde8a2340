"""Decoding of one sequence by a model split over GPUs, end to end.

    torchrun --nproc-per-node 2 benchmarks/engine/bench_ranks.py --results benchmarks/results/h200x2
        Llama-3-8B's shape with random weights in bf16 and W4A16, greedy, decode steps recorded;
        --trial runs it tiny, on CPUs over gloo, and writes nothing

Every rank makes its own part of the weights; rank 0 schedules and samples, as in a server. A step
is everything between two tokens; bytes are those of one rank, and so is the ceiling. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.one_sequence import (
    decode,
    gpu_name,
    rounds,
    row_of,
    save,
)
from benchmarks.engine.random_weights import group_of, random_weights
from ridgeline.core import env
from ridgeline.core.arch import detect
from ridgeline.engine.llm import LLM, EngineConfig
from ridgeline.engine.weights import Shard
from ridgeline.nn.config import DecoderConfig
from ridgeline.train.presets import preset

KINDS = ("bf16", "w4a16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="folder of serve.jsonl")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3, help="each its own prompt")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers, for a trial")
    parser.add_argument("--no-graphs", action="store_true", help="decode steps as plain calls")
    parser.add_argument("--commit", default="", help="default: git's")
    parser.add_argument("--trial", action="store_true", help="tiny, on CPUs")
    args = parser.parse_args()
    args.device, args.threads = "cpu" if args.trial else "cuda", 1
    if args.trial:
        args.prompt_tokens, args.new_tokens, args.rounds = 12, 16, 1
        torch.set_num_threads(1)
    args.run = uuid.uuid4().hex[:12]
    shape = preset("tiny" if args.trial else "llama-8b")
    if args.layers:
        shape = replace(shape, num_layers=args.layers)
    rows = [row for kind in args.kinds if (row := measured(args, shape, kind)) is not None]
    if env.rank() == 0:
        print(json.dumps({"run": args.run, "rows": len(rows)}), flush=True)
    os._exit(0)  # groups that torchrun ends need not be left one by one


def measured(args: argparse.Namespace, shape: DecoderConfig, kind: str) -> dict[str, Any] | None:
    """A row; None on the other ranks."""
    if args.device == "cuda":
        torch.cuda.set_device(env.local_rank())
    ranks = env.world_size()
    shard = Shard(rank=env.rank(), ranks=ranks)
    impl = None if kind == "bf16" else "auto"
    where = f"cuda:{env.local_rank()}" if args.device == "cuda" else "cpu"
    config = EngineConfig(
        max_model_len=None if args.trial else 2048,
        max_num_seqs=8,
        num_pages=512,
        cuda_graphs=not args.no_graphs,
    )
    llm = LLM(random_weights(shape, impl, where, shard), config)
    if llm.rank:
        llm.follow()
        llm.close()
        return None
    decode(llm, args)
    values = rounds(llm, args, args.device)
    recorded = llm.runner.graphs is not None and bool(llm.runner.graphs.recorded)
    llm.close()
    stored = kind if kind == "bf16" else f"{kind}_g{group_of(shape)}"
    name = f"llama-8b shape, {shape.num_layers} layers, random weights"
    values |= {"ranks": ranks, "graphs": recorded}
    if args.device == "cuda":
        values |= {"gpu": f"{gpu_name(detect(args.device).device)}x{ranks}"}
    row = row_of(args, "ridgeline", model=name, weights=stored, dtype="bfloat16", **values)
    save(args, row)
    return row


if __name__ == "__main__":
    main()
