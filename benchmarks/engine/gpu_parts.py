"""The parts of bench_engine.py that need a GPU, at Llama-3-8B's shape with random weights: one
sequence, many requests, Transformers' continuous batching, and engine against trainer.

One process makes the weights once and writes each row as soon as it has it; a part that fails is
told at the end and does not keep the others from running.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.engine import throughput
from benchmarks.engine.one_sequence import (
    decode,
    rounds,
    row_of,
    save,
)
from benchmarks.engine.random_weights import group_of, random_weights
from ridgeline.core.arch import detect
from ridgeline.core.errors import UserError
from ridgeline.engine.graphs import GRAPH_SIZES
from ridgeline.engine.llm import LLM, EngineConfig
from ridgeline.engine.params import SamplingParams
from ridgeline.engine.weights import Packed, Weights
from ridgeline.integrations import transformers as hf
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder
from ridgeline.parallel.loss import token_logprobs
from ridgeline.train.presets import preset
from ridgeline.train.scoring import log_probabilities

PARTS = ("decode", "load", "peer", "agreement")
KINDS = ("bf16", "w4a16")
PEERS = ("ridgeline_flash2", "ridgeline_flash", "sdpa")
"""Attention of Transformers' continuous batching: this package's kernels behind its FlashAttention
wrapper (with a 2 in the name it reads decode steps' keys in their pages, as it would with
FlashAttention 2 or 3), and what it takes by itself where no FlashAttention is installed."""
STEP_TOKENS = 8192
"""Of our engine under load: prompts of all requests wait, so few large steps are best. The default
(2048) is for clients that read along."""
GIB = 2**30


def on_gpu(args: argparse.Namespace) -> int:
    """Run the parts that were asked for; how many failed."""
    shape = preset("tiny" if args.trial else "llama-8b")
    if args.layers:
        shape = replace(shape, num_layers=args.layers)
    bench = _Bench(args, shape)
    failed: list[str] = []
    for name, part in bench.parts():
        start_s = time.perf_counter()
        try:
            save(args, part())
        except Exception:  # told, and the next part is tried
            failed.append(name)
            traceback.print_exc()
        print(f"{name}: {time.perf_counter() - start_s:.1f} s", flush=True)
        _clear(args.device)
    print(f"failed: {', '.join(failed) or 'nothing'}", flush=True)
    return len(failed)


def leave(code: int) -> None:
    """End the process at once: a peer's thread may still run."""
    os._exit(code)


class _Bench:
    """The parts, on weights that are made when first asked for."""

    def __init__(self, args: argparse.Namespace, shape: DecoderConfig) -> None:
        self.args, self.shape, self.device = args, shape, args.device
        self.impl = "auto"

    def parts(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Names and what makes their rows, most wanted first."""
        chosen, kinds = self.args.parts, self.args.kinds
        made: dict[str, Callable[[str], dict[str, Any]]] = {
            "decode": self.decoded,
            "load": self.loaded,
        }
        for part, of in made.items():
            for kind in kinds if part in chosen else ():
                yield f"{part} {kind}", functools.partial(of, kind)
        for attention in self.args.peers if "peer" in chosen else ():
            self.weights.cache_clear()
            yield f"peer {attention}", functools.partial(self.peer, attention)
        if "agreement" in chosen:
            self.weights.cache_clear()
            yield "agreement", self.agreement
            yield "agreement, batch-invariant", self.invariant_agreement

    @functools.cache  # noqa: B019  # lives as long as the process
    def weights(self, kind: str) -> Weights:
        """bf16 weights, or random 4-bit codes of one scale."""
        start_s = time.perf_counter()
        made = random_weights(self.shape, None if kind == "bf16" else self.impl, self.device)
        print(f"{kind} weights: {time.perf_counter() - start_s:.1f} s", flush=True)
        return made

    def llm(self, kind: str, config: EngineConfig, warm: Callable[[LLM], Any]) -> LLM:
        """An engine that ran once; where the Hopper kernels are not compiled for this machine, on
        Triton."""
        try:
            llm = LLM(self.weights(kind), config)
            warm(llm)
            return llm
        except UserError as error:
            if self.impl != "auto" or kind == "bf16":
                raise
            print(f"auto: {error}; with triton", flush=True)
        self.impl = "triton"
        self.weights.cache_clear()
        return self.llm(kind, config, warm)

    def row(self, impl: str, kind: str, values: dict[str, Any]) -> dict[str, Any]:
        stored = kind if kind == "bf16" else f"{kind}_g{group_of(self.shape)}"
        name = f"llama-8b shape, {self.shape.num_layers} layers, random weights"
        return row_of(self.args, impl, model=name, weights=stored, dtype="bfloat16", **values)

    # ---- one sequence ------------------------------------------------------------------------

    def decoded(self, kind: str) -> dict[str, Any]:
        """One sequence, token by token."""
        args = self.args
        config = EngineConfig(max_model_len=2048, max_num_seqs=8, num_pages=512)
        llm = self.llm(kind, config, lambda llm: decode(llm, args))
        values = rounds(llm, args, self.device)
        values |= {"graph_ms": _graph_ms(llm), "matmul": _kernel_of(self.weights(kind))}
        if llm.runner.graphs is not None:
            graphs = llm.runner.graphs
            values |= {"ways_ms": {k: round(v, 4) for k, v in graphs.times_ms.get(1, {}).items()}}
            values |= {"refused": graphs.refused, "tiles": _tiles(llm)}
            values |= {"started_ahead": graphs.started_ahead, "used_ahead": graphs.used_ahead}
        return self.row("ridgeline", kind, values)

    # ---- many requests -----------------------------------------------------------------------

    @functools.cached_property
    def load(self) -> throughput.Load:
        """The requests of all."""
        args = self.args
        return throughput.Load.drawn(
            args.requests, args.shortest, args.longest, self.shape.vocab_size
        )

    def loaded(self, kind: str) -> dict[str, Any]:
        """Many requests through the engine."""
        args = self.args
        config = EngineConfig(
            max_model_len=2 * args.longest,
            max_num_seqs=args.requests,
            max_step_tokens=STEP_TOKENS,
            memory_gib=None if self.device == "cpu" else 100.0,  # both kinds of weights are there
        )
        first = throughput.Load.shrinking(args.requests, args.longest, GRAPH_SIZES, STEP_TOKENS)
        llm = self.llm(kind, config, lambda llm: throughput.ours(llm, first))
        values = {**throughput.ours(llm, self.load).values(), "load": self.load.described()}
        values |= {"matmul": _kernel_of(self.weights(kind))}
        values |= {"preemptions": llm.core.scheduler.preemptions}
        values |= {"steps": llm.counters.steps, "used_ahead": llm.core.used_ahead}
        values |= {"step_tokens": STEP_TOKENS}
        values |= self._share(llm.counters.weight_bytes, values["seconds"])
        if llm.runner.graphs is not None:
            times = llm.runner.graphs.times_ms
            rounded = {n: {k: round(v, 3) for k, v in times[n].items()} for n in sorted(times)}
            values |= {"ways_ms_by_rows": {n: found for n, found in rounded.items() if n > 8}}
        return _of_many(self.row("ridgeline", kind, values))

    def _share(self, weight_bytes: float, seconds: float) -> dict[str, Any]:
        """What the load takes at the ceilings."""
        floor_s = self.load.floor_s(self.shape, weight_bytes, detect(self.device).ceilings)
        return {"floor_s": round(floor_s, 2), "percent_of_floor": round(100 * floor_s / seconds, 1)}

    def peer(self, attention: str) -> dict[str, Any]:
        """The same requests through Transformers' continuous batching."""
        import transformers

        args = self.args
        if attention in hf.PACKAGE_NAMES:
            hf.enable()
        model = throughput.transformers_model(self.shape, self.device, torch.bfloat16, attention)
        run, used = throughput.theirs(model, self.load, args.peer_limit_s)
        values = {**run.values(), "load": self.load.described()}
        values |= {"matmul": "cublas", **used, "limit_s": args.peer_limit_s}
        if run.finished == len(self.load.prompts):
            values |= self._share(2.0 * self.shape.matmul_params(), values["seconds"])
        print(used, flush=True)
        impl = f"transformers {transformers.__version__} continuous batching"
        return _of_many(self.row(f"{impl}, {attention}", "bf16", values))

    # ---- engine and trainer ------------------------------------------------------------------

    def agreement(self) -> dict[str, Any]:
        """RMS of the engine's log-probabilities minus the trainer's loss's, sampled tokens, bf16;
        and of the trainer's own in two batches (floor_nats): what the order of sums alone makes."""
        args = self.args
        shape = replace(self.shape, num_layers=min(8, self.shape.num_layers))
        model = _random_decoder(shape, self.device)
        llm = LLM(model, EngineConfig(max_model_len=512, max_num_seqs=8, num_pages=512))
        count = 16 if args.trial else 64
        params = SamplingParams(
            temperature=1.0, seed=1, max_tokens=count, logprobs=0, ignore_eos=True
        )
        prompts = [[(31 * i + 7 * n) % 250 for i in range(n)] for n in (5, 64, 128, 300)]
        gaps: list[float] = []
        floor: list[float] = []
        for made in llm.generate(prompts, params):
            choice, first = made.choices[0], len(made.prompt_ids)
            text = torch.tensor([made.prompt_ids + choice.token_ids], device=self.device)
            own = _trainers(model, text, first)
            told = torch.tensor([t.logprob for t in choice.logprobs or []], device=own.device)
            gaps += (told - own).tolist()
            step = max(1, count // 8)
            pieces = [
                _trainers(model, text[:, : first + k + step], first + k)
                for k in range(0, count, step)
            ]
            floor += (torch.cat(pieces) - own).tolist()
        values = {"rms_nats": _rms(gaps), "floor_nats": _rms(floor), "tokens": len(gaps)}
        values |= {"max_nats": round(max(map(abs, gaps)), 6)}
        values |= {"check": "engine against trainer, log-probabilities"}
        name = f"llama-8b shape, {shape.num_layers} layers, random weights"
        return row_of(args, "ridgeline", model=name, weights="bf16", dtype="bfloat16", **values)

    def invariant_agreement(self) -> dict[str, Any]:
        """The same where both compute every row alike (nn/invariant.py): sampled token by token by
        the engine, in a batch; whole texts, one by one, by the trainer."""
        args = self.args
        shape = replace(self.shape, num_layers=min(8, self.shape.num_layers))
        model, longest = _random_decoder(shape, self.device), 512
        config = EngineConfig(
            max_model_len=longest, max_num_seqs=8, num_pages=512, batch_invariant=True
        )
        params = SamplingParams(
            temperature=1.0,
            seed=1,
            max_tokens=16 if args.trial else 64,
            logprobs=0,
            ignore_eos=True,
        )
        prompts = [[(31 * i + 7 * n) % 250 for i in range(n)] for n in (5, 64, 128, 300)]
        gaps: list[float] = []
        for made in LLM(model, config).generate(prompts, params):
            choice, first = made.choices[0], len(made.prompt_ids)
            own = log_probabilities(
                model, made.prompt_ids + choice.token_ids, batch_invariant=True, max_len=longest
            )[first - 1 :]
            told = torch.tensor([t.logprob for t in choice.logprobs or []], device=own.device)
            gaps += (told - own).tolist()
        values = {"rms_nats": _rms(gaps), "tokens": len(gaps)}
        values |= {"max_nats": round(max(map(abs, gaps)), 6)}
        values |= {"check": "engine against trainer, log-probabilities, both batch-invariant"}
        name = f"llama-8b shape, {shape.num_layers} layers, random weights"
        return row_of(args, "ridgeline", model=name, weights="bf16", dtype="bfloat16", **values)


def _of_many(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what only one sequence has."""
    return {
        key: value
        for key, value in row.items()
        if key not in ("batch", "prompt_tokens", "new_tokens")
    }


def _clear(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _kernel_of(weights: Weights) -> str:
    """The implementation of the layers' matmuls."""
    down = weights.layers[0].down
    return down.prepared.impl if isinstance(down, Packed) else "cublas"


def _graph_ms(llm: LLM) -> float | None:
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


def _tiles(llm: LLM) -> dict[str, str]:
    """How the recorded step's one-row kernels go over their weights."""
    graphs = llm.runner.graphs
    recorded = None if graphs is None else graphs.recorded.get(1)
    configs = getattr(recorded.forward, "configs", {}) if recorded is not None else {}
    return {
        name: f"{c.block_n}x{c.block_k}, {c.num_warps} warps, {c.num_stages} stages"
        + (", overlapped" if c.overlap else "")
        for name, c in configs.items()
    }


def _random_decoder(shape: DecoderConfig, device: str) -> Decoder:
    model = Decoder(shape, device="meta", dtype=torch.bfloat16)
    model.materialize(device)
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                std = 2 * shape.init_std if name.startswith("lm_head") else shape.init_std
                parameter.normal_(0.0, std, generator=generator)
    return model.eval().requires_grad_(False)


def _rms(gaps: list[float]) -> float:
    return round(statistics.fmean(gap * gap for gap in gaps) ** 0.5, 6)


def _trainers(model: Decoder, text: torch.Tensor, first: int) -> torch.Tensor:
    """Log-probabilities of text[first:] as the trainer's loss computes them."""
    with torch.no_grad():
        x_PC = model.head_input(model.hidden(text))[0, first - 1 : -1]
        return token_logprobs(x_PC, model.head_linear().weight, text[0, first:])
