"""`ridgeline bench serve`: load a running server and measure what its clients see.

Open loop: requests arrive by a Poisson process of a given rate, whatever the server does (a slow
server does not slow its clients down, so queueing shows). Closed loop: so many clients, each
asking again as soon as it has its answer. Prompts are random token ids of exact lengths, with
prefixes that groups of them share where asked for.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ridgeline.cli.bench_client import Answer, Target, ask, fetch
from ridgeline.cli.command import Command, Result, nothing_kept
from ridgeline.cli.tables import number, table
from ridgeline.core import env, progress
from ridgeline.core.errors import UserError, bad_value
from ridgeline.core.files import atomic_write_text
from ridgeline.report.latency import latency_figure

PERCENTILES = (50, 90, 95, 99)
FIRST_ID = 100
"""Random prompts leave the first ids out: most special tokens are among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServeConfig:
    """Load a running server and measure latencies and throughput."""

    url: str = "http://127.0.0.1:8000"
    """Of the server, without /v1; the key is RIDGELINE_API_KEY."""
    model: str | None = None
    """The model's name; the server's first one unless given."""
    requests: int = 64
    """In all, at least 1."""
    rate: float | None = None
    """Poisson arrivals, requests a second; unless given, a closed loop of `concurrency` clients."""
    concurrency: int = 8
    """Clients of the closed loop, at least 1."""
    input_tokens: int = 128
    """Mean tokens of a prompt, a shared prefix not counted, at least 1."""
    output_tokens: int = 64
    """Mean tokens of an answer, at least 1; the end token is ignored."""
    lengths: Literal["fixed", "uniform", "lognormal"] = "fixed"
    """fixed: the means; uniform: means times 1 - spread .. 1 + spread; lognormal: a long tail with
    the spread as its sigma."""
    spread: float = 0.5
    """Of uniform and lognormal lengths, in [0, 1]."""
    prefix_tokens: int = 0
    """Tokens before each prompt that all prompts of a group share."""
    prefix_groups: int = 1
    """Groups with a shared prefix each, at least 1."""
    temperature: float = 0.0
    """0: greedy."""
    warmup: int = 1
    """Requests before the measured ones, at least 0."""
    seed: int = 0
    """Of arrivals, lengths and prompts."""
    vocab_size: int | None = None
    """Prompts are ids below it; asked from the server unless given."""
    out: Path | None = None
    """A folder for bench.json (every request) and bench.svg (the distributions)."""

    def __post_init__(self) -> None:
        least = {
            "requests": 1, "concurrency": 1, "input_tokens": 1, "output_tokens": 1,
            "prefix_tokens": 0, "prefix_groups": 1, "warmup": 0,
        }  # fmt: skip
        for name, low in least.items():
            if (value := getattr(self, name)) < low:
                raise bad_value("bench", name, f"be at least {low}", value, "raise it")
        if self.rate is not None and not self.rate > 0:
            raise bad_value("bench", "rate", "be above 0 requests a second", self.rate, "raise it")
        if not 0 <= self.spread <= 1:
            raise bad_value("bench", "spread", "lie in [0, 1]", self.spread, "change it")
        if not self.url.startswith(("http://", "https://")):
            raise bad_value("bench", "url", "start with http:// or https://", self.url, "change it")


def bench(config: BenchServeConfig) -> Result:
    """Send the requests and return the numbers.

    Raises: UserError where no server answers, or none of the requests was answered.
    """
    return asyncio.run(_run(config))


async def _run(config: BenchServeConfig) -> Result:
    target = Target(config.url.rstrip("/"), env.api_key())
    listed = (await fetch(target, "/v1/models"))["data"]
    model = config.model or listed[0]["id"]
    known = next((each for each in listed if each["id"] == model), {})
    bodies = make_bodies(config, model, config.vocab_size or known.get("vocab_size"))
    for body in bodies[: config.warmup]:
        first = await ask(target, "/v1/completions", body)
        if not first.ok:
            raise UserError(f"bench: the server must answer, got {first.status} {first.error}")
    with progress.task("requests", len(bodies) - config.warmup) as advance:
        start = time.perf_counter()
        answers = await _send(config, target, bodies[config.warmup :], advance)
        seconds = time.perf_counter() - start
    result = summarize(answers, seconds)
    if not result["answered"]:
        raise UserError(f"bench: no request was answered; the first error: {answers[0].error}")
    load = {key: str(v) if isinstance(v, Path) else v for key, v in asdict(config).items()}
    result |= {"model": model, "load": load}
    if config.out is not None:
        result["files"] = _write(config.out, result, answers)
    return result


def make_bodies(
    config: BenchServeConfig, model: str, vocab_size: int | None
) -> list[dict[str, Any]]:
    """Every request's body, warm-up first; the same for the same config."""
    if vocab_size is None:
        raise UserError("bench: this server does not say its vocab_size; give --vocab-size")
    draw = random.Random(config.seed)
    low = min(FIRST_ID, vocab_size // 2)

    def ids(count: int) -> list[int]:
        return [draw.randrange(low, vocab_size) for _ in range(count)]

    prefixes = [ids(config.prefix_tokens) for _ in range(config.prefix_groups)]
    bodies = []
    for number_ in range(config.warmup + config.requests):
        prompt = prefixes[number_ % len(prefixes)] + ids(_length(draw, config, config.input_tokens))
        bodies.append(
            {
                "model": model,
                "prompt": prompt,
                "max_tokens": _length(draw, config, config.output_tokens),
                "temperature": config.temperature,
                "seed": config.seed + number_,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
    return bodies


def _length(draw: random.Random, config: BenchServeConfig, mean: int) -> int:
    if config.lengths == "uniform":
        return max(1, round(mean * draw.uniform(1 - config.spread, 1 + config.spread)))
    if config.lengths == "lognormal":
        sigma = config.spread
        return max(1, round(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))
    return mean


async def _send(
    config: BenchServeConfig, target: Target, bodies: Sequence[dict[str, Any]], advance: Any
) -> list[Answer]:
    async def one(body: dict[str, Any]) -> Answer:
        answer = await ask(target, "/v1/completions", body)
        advance(1)
        return answer

    if config.rate is None:
        queue = list(enumerate(bodies))[::-1]
        answers: dict[int, Answer] = {}

        async def client() -> None:
            while queue:
                index, body = queue.pop()
                answers[index] = await one(body)

        await asyncio.gather(*(client() for _ in range(min(config.concurrency, len(bodies)))))
        return [answers[index] for index in range(len(bodies))]
    draw, tasks = random.Random(config.seed + 1), []
    due = time.perf_counter()
    for body in bodies:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(one(body)))
        due += draw.expovariate(config.rate)
    return list(await asyncio.gather(*tasks))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles (nearest rank) and maximum; zeros without values."""
    ordered = sorted(values)
    if not ordered:
        return {"mean": 0.0, **{f"p{p}": 0.0 for p in PERCENTILES}, "max": 0.0}
    ranks = {f"p{p}": ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] for p in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **ranks, "max": ordered[-1]}


def gaps_ms(answer: Answer) -> list[float]:
    """Milliseconds between the events with text of one answer."""
    times = answer.arrivals_s
    return [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)]


def summarize(answers: Sequence[Answer], seconds: float) -> Result:
    """Percentiles of latencies, throughput, and what was refused."""
    done = [answer for answer in answers if answer.ok]
    per_token = [
        1e3 * (a.end_s - a.first_s) / (a.output_tokens - 1) for a in done if a.output_tokens > 1
    ]
    prompt, output = sum(a.prompt_tokens for a in done), sum(a.output_tokens for a in done)
    others = Counter(str(a.status or "no answer") for a in answers if not a.ok)
    return {
        "requests": len(answers),
        "answered": len(done),
        "refused": others.pop("429", 0),
        "failed": dict(others),
        "seconds": seconds,
        "ttft_ms": percentiles([1e3 * a.first_s for a in done]),
        "inter_token_ms": percentiles([gap for a in done for gap in gaps_ms(a)]),
        "time_per_output_token_ms": percentiles(per_token),
        "latency_ms": percentiles([1e3 * a.end_s for a in done]),
        "requests_per_s": len(done) / seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": sum(a.cached_tokens for a in done),
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (prompt + output) / seconds,
    }


def _write(folder: Path, result: Result, answers: Sequence[Answer]) -> list[str]:
    done = [answer for answer in answers if answer.ok]
    rows = [
        {
            "status": a.status, "error": a.error, "ttft_s": a.first_s, "latency_s": a.end_s,
            "prompt_tokens": a.prompt_tokens, "output_tokens": a.output_tokens,
            "cached_tokens": a.cached_tokens, "arrivals_s": a.arrivals_s,
        }
        for a in answers
    ]  # fmt: skip
    data, drawing = folder / "bench.json", folder / "bench.svg"
    atomic_write_text(data, json.dumps({"result": result, "requests": rows}))
    figure = latency_figure(
        [
            ("to the first token", [1e3 * a.first_s for a in done]),
            ("between tokens", [gap for a in done for gap in gaps_ms(a)]),
            ("of the whole answer", [1e3 * a.end_s for a in done]),
        ]
    )
    atomic_write_text(drawing, figure)
    return [str(data), str(drawing)]


_ROWS = (
    ("first token", "ttft_ms"),
    ("between tokens", "inter_token_ms"),
    ("per output token", "time_per_output_token_ms"),
    ("whole answer", "latency_ms"),
)


def show(result: Result) -> str:
    """Percentiles as a table, throughput under it."""
    columns = ["mean", *(f"p{p}" for p in PERCENTILES), "max"]
    rows = [[name, *(number(result[key][c]) for c in columns)] for name, key in _ROWS]
    failed = sum(result["failed"].values())
    lines = [
        table(["ms", *columns], rows),
        "",
        f"{result['answered']} of {result['requests']} requests answered in "
        f"{result['seconds']:.1f} s ({result['refused']} refused with 429, {failed} failed)",
        f"{result['output_tokens_per_s']:,.1f} output tokens/s, "
        f"{result['total_tokens_per_s']:,.1f} with prompts, {result['requests_per_s']:.2f} "
        f"requests/s; {result['cached_tokens']:,} of {result['prompt_tokens']:,} prompt tokens "
        "from the prefix cache",
    ]
    return "\n".join([*lines, *(f"wrote {path}" for path in result.get("files", ()))])


COMMAND = Command(run=bench, config={"serve": BenchServeConfig}, show=show, kept=nothing_kept)
