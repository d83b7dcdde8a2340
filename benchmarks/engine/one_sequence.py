"""What the engine's benchmarks share: a row of results, and the decoding of one sequence."""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.arch import detect
from ridgeline.engine.llm import LLM
from ridgeline.engine.params import SamplingParams

WARM_STEPS = 8
"""Left out at the start of each run: graphs are recorded in them."""


def save(args: argparse.Namespace, row: dict[str, Any]) -> None:
    """Append a row to serve.jsonl, or to agreement.jsonl where it is no speed, as soon as it is
    there; a trial writes nothing."""
    if args.trial:
        return
    args.results.mkdir(parents=True, exist_ok=True)
    name = "serve" if "tokens_per_s" in row else "agreement"
    with open(args.results / f"{name}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def gpu_name(device: str) -> str:
    """Of the results' folders: h200, else the device's own name."""
    return "h200" if "H200" in device else device


def row_of(args: argparse.Namespace, impl: str, **values: Any) -> dict[str, Any]:
    arch = detect(args.device)
    row = {
        "op": "serve",
        "impl": impl,
        "run": args.run,
        "gpu": "cpu" if args.device == "cpu" else gpu_name(arch.device),
        "batch": 1,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        **values,
        "commit": args.commit or commit(),
        "versions": {"torch": torch.__version__},
        "date": datetime.date.today().isoformat(),
    }
    if args.device == "cpu":
        row |= {"threads": args.threads, "cpu": arch.device}
    print({k: v for k, v in row.items() if k in SHOWN}, flush=True)
    return row


SHOWN = ("impl", "model", "weights", "tokens_per_s", "itl_ms_p50", "ttft_ms_p50", "tbps")
SHOWN += ("percent_of_ceiling", "graph_ms", "ways_ms", "rms_nats", "floor_nats", "finished")


def commit() -> str:
    here = Path(__file__).parent
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True
    )
    return told.stdout.strip()


# ---- ours ------------------------------------------------------------------------------------


def prompt_of(args: argparse.Namespace, turn: int) -> list[int]:
    """Another prompt each round."""
    return [((17 + 2 * turn) * i + 3 + 5 * turn) % 1000 + 1 for i in range(args.prompt_tokens)]


def decode(llm: LLM, args: argparse.Namespace, turn: int = 0) -> tuple[float, list[float]]:
    """(seconds to the first token, seconds of each later step) of one request."""
    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)
    request = llm.request(
        prompt_of(args, turn), params, salt=uuid.uuid4().hex
    )  # no prefix of an earlier round
    marks = [time.perf_counter()]
    llm.core.add(request, args.new_tokens)
    while llm.core.has_work:
        if any(output.deltas for output in llm.core.step()):
            marks.append(time.perf_counter())
    steps = [after - before for before, after in zip(marks, marks[1:], strict=False)]
    assert len(steps) == args.new_tokens
    return steps[0], steps[1:]


def summary(first: list[float], steps: list[float], step_bytes: float | None) -> dict[str, Any]:
    median = statistics.median(steps)
    low, *_, high = statistics.quantiles(steps, n=5)
    found: dict[str, Any] = {
        "tokens_per_s": round(1 / median, 2),
        "ttft_ms_p50": round(1e3 * statistics.median(first), 3),
        "itl_ms_p50": round(1e3 * median, 4),
        "itl_ms_p20": round(1e3 * low, 4),
        "itl_ms_p80": round(1e3 * high, 4),
    }
    if step_bytes is not None:
        found |= {"bytes_per_step": int(step_bytes), "tbps": round(step_bytes / median / 1e12, 4)}
    return found


def step_bytes(llm: LLM, args: argparse.Namespace) -> float:
    kept = args.prompt_tokens + args.new_tokens / 2
    return llm.counters.weight_bytes + kept * llm.plan.kv_bytes_per_token


def rounds(llm: LLM, args: argparse.Namespace, device: str) -> dict[str, Any]:
    """What `args.rounds` requests measured, beside the rate at which a GPU reads."""
    firsts: list[float] = []
    every: list[float] = []
    for turn in range(args.rounds):
        first, steps = decode(llm, args, turn)
        firsts.append(first)
        every += steps[WARM_STEPS:]
    values = summary(firsts, every, step_bytes(llm, args))
    if device.startswith("cuda"):
        ceiling = detect(device).ceilings.read_gbps / 1e3
        share = round(100 * values["tbps"] / ceiling, 1)
        values |= {"ceiling": ceiling, "percent_of_ceiling": share}
    return values
