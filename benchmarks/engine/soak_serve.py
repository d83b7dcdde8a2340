"""A server at twice its capacity, with everything that clients do wrong; nothing may break.

Ten minutes on loopback against a small random model (or --model): clients that stream, that wait,
that leave, that send what is malformed, that read nothing, that ask for JSON or for embeddings.
Fails unless the process lives, every accepted request ends, the shed ones got 429 with Retry-After,
no page or request is left, and the memory of the server stays flat. A request's time is DEADLINE_S:
the server ends it then (408, counted as `late`), and a client waits a while longer before it says
that its request did not end. So a starved machine is slow, but not wrong.

    python benchmarks/engine/soak_serve.py --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import platform
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.cli.bench_client import Target, ask, connect, fetch
from ridgeline.core.env import child_environment
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import save_pretrained
from ridgeline.train.presets import preset
from ridgeline.train.tokens import byte_tokenizer

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "soak_serve.jsonl"
SEQUENCES, QUEUE = 4, 8
DEADLINE_S = 100.0
PATIENCE_S = 80.0
"""How much longer a client waits: for a grammar's compilation, and for a busy machine."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MALFORMED = (
    b"", b"{", b"[]", b'{"model": 3}', b"\xff", b'{"model": "m", "prompt": ""}', b"[" * 3000,
    b'{"model": "m", "prompt": [999999]}', b'{"model": "m", "prompt": "x", "n": 99}',
    b'{"model": "m", "prompt": "x", "surprise": 1}', b'{"model": "m", "prompt": "\\ud800"}',
)  # fmt: skip
KINDS = ("stream", "stream", "whole", "leave", "malformed", "stall", "json", "embed", "chat")


@dataclass
class Tally:
    """What happened."""

    sent: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory_mib: list[tuple[float, float]] = field(default_factory=list)

    def see(self, kind: str, status: int, ok: bool, detail: str = "") -> None:
        """Count an answer; what is neither 2xx nor 4xx, or not ended, is wrong."""
        self.answers[f"{kind} {status}"] += 1
        if not ok:
            self.wrong.append(f"{kind}: {status} {detail[:200]}")


def tiny_model(folder: Path) -> Path:
    """A decoder of 2 layers with fresh weights and a tokenizer of bytes."""
    tokenizer = byte_tokenizer()
    companions = folder / "tokenizer"
    companions.mkdir(parents=True)
    for name, text in tokenizer.files().items():
        (companions / name).write_text(text, encoding="utf-8")
    (companions / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    shape = replace(
        preset("tiny"),
        vocab_size=tokenizer.vocab_size,
        max_seqlen=512,
        eos_token_ids=(tokenizer.end_id,),
    )
    model = Decoder(shape, dtype=torch.float32, seed=1)
    save_pretrained(model, folder / "tiny", tokenizer_from=companions)
    return folder / "tiny"


def start_server(model: Path, *flags: str) -> tuple[subprocess.Popen[str], str]:
    """A server process on a free port, and its address."""
    command = [
        *(sys.executable, "-m", "ridgeline", "serve", str(model), "--port", "0", "--json"),
        *("--name", "m", "--max-queue-requests", str(QUEUE), "--max-num-seqs", str(SEQUENCES)),
        *("--deadline-s", str(DEADLINE_S)),
        *flags,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=child_environment(OMP_NUM_THREADS="1")
    )
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "serving":
            return process, event["url"]
    raise SystemExit(f"the server did not start: exit code {process.wait()}")


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


async def _post(target: Target, path: str, data: bytes) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await connect(target)
    try:
        writer.write(f"POST {path} HTTP/1.1\r\n".encode() + target.headers(len(data)) + data)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        return int(lines[0].split(" ")[1]), headers, body
    finally:
        writer.close()


async def _one(kind: str, target: Target, draw: random.Random, tally: Tally) -> None:
    """One client's one request; whatever it does wrong, the server must not."""
    prompt = "".join(draw.choices("abcdef ", k=draw.randint(1, 120)))
    body: dict[str, Any] = {
        "model": "m", "prompt": prompt, "max_tokens": draw.randint(1, 48), "ignore_eos": True,
        "temperature": draw.choice([0.0, 0.8]), "n": draw.choice([1, 1, 1, 2]),
    }  # fmt: skip
    tally.sent[kind] += 1
    if kind == "stream":
        answer = await ask(target, "/v1/completions", {**body, "stream": True})
        if answer.status == 429:
            tally.see(kind, 429, answer.retry_after is not None, "no Retry-After")
        elif answer.status == 408 or "took longer than" in (answer.error or ""):
            tally.see(kind, 408, True)  # before its first token, or after
        else:
            tally.see(kind, answer.status, answer.ok, answer.error or "it did not end")
    elif kind in ("leave", "stall"):
        await _rude(kind, target, {**body, "stream": True, "max_tokens": 300}, draw, tally)
    else:
        path, data = _plain(kind, body, draw)
        status, headers, text = await _post(target, path, data)
        good = status in (200, 408) or (status == 429 and "retry-after" in headers)
        if kind == "malformed":
            good = 400 <= status < 500
        if kind == "json" and status == 200:
            choice = json.loads(text)["choices"][0]
            with contextlib.suppress(ValueError):
                good = choice["finish_reason"] == "length" or bool(json.loads(choice["text"]))
        tally.see(kind, status, good, text.decode("utf-8", "replace"))


def _plain(kind: str, body: dict[str, Any], draw: random.Random) -> tuple[str, bytes]:
    if kind == "malformed":
        return "/v1/completions", draw.choice(MALFORMED)
    if kind == "embed":
        asked = {"model": "m", "input": [body["prompt"], "b"]}
        return "/v1/embeddings", json.dumps(asked).encode()
    if kind == "chat":
        messages = [{"role": "user", "content": body.pop("prompt")}]
        return "/v1/chat/completions", json.dumps({**body, "messages": messages}).encode()
    if kind == "json":
        del body["ignore_eos"]
        schema = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return "/v1/completions", json.dumps({**body, "response_format": asked}).encode()
    return "/v1/completions", json.dumps(body).encode()


async def _rude(
    kind: str, target: Target, body: dict[str, Any], draw: random.Random, tally: Tally
) -> None:
    """Leave in the middle, or read nothing for a while."""
    reader, writer = await connect(target)
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" + target.headers(len(data)) + data)
    try:
        if kind == "leave":
            await asyncio.sleep(draw.uniform(0.0, 0.5))
            tally.see(kind, 0, True)
        else:
            await asyncio.sleep(draw.uniform(0.5, 2.0))
            status = int((await reader.readline()).split(b" ")[1])
            tally.see(kind, status, status in (200, 408, 429))
    finally:
        writer.transport.abort()


async def soak(target: Target, pid: int, seconds: float, clients: int, seed: int) -> Tally:
    """Load the server until the time is over; every client's last request ends."""
    tally, end = Tally(), time.monotonic() + seconds
    start = time.monotonic()

    async def client(number: int) -> None:
        draw = random.Random(seed * 1000 + number)
        while time.monotonic() < end:
            kind = draw.choice(KINDS)
            try:
                async with asyncio.timeout(DEADLINE_S + PATIENCE_S):
                    await _one(kind, target, draw, tally)
            except (OSError, TimeoutError, ValueError, IndexError) as error:
                tally.see(kind, 0, False, repr(error))
            await asyncio.sleep(draw.uniform(0.0, 0.2))

    async def watch() -> None:
        while time.monotonic() < end:
            tally.memory_mib.append((time.monotonic() - start, memory_mib(pid)))
            health = await fetch(target, "/health")
            if health["status"] != "ready" or health["last_step_age_s"] > 60:
                tally.wrong.append(f"health: {health}")
            await asyncio.sleep(max(0.5, seconds / 120))

    await asyncio.gather(watch(), *(client(number) for number in range(clients)))
    return tally


async def after(target: Target) -> dict[str, float]:
    """Counters once nothing runs any more."""
    for _ in range(600):
        numbers = await metrics(target)
        if not numbers["requests_running"] and not numbers["http_inside"]:
            break
        await asyncio.sleep(0.1)
    return numbers


async def metrics(target: Target) -> dict[str, float]:
    """Metrics without labels, by name without the prefix."""
    reader, writer = await connect(target)
    writer.write(b"GET /metrics HTTP/1.1\r\n" + target.headers(0))
    text = (await reader.read()).partition(b"\r\n\r\n")[2].decode()
    writer.close()
    pairs = (line.split(" ") for line in text.splitlines() if line and line[0] != "#")
    return {k.removeprefix("ridgeline_"): float(v) for k, v in pairs if "{" not in k}


def verdict(tally: Tally, numbers: dict[str, float], exit_code: int) -> dict[str, Any]:
    """What was found; `failures` is empty where all is well."""
    failures = list(tally.wrong[:20])
    for name in ("requests_running", "requests_waiting", "queued_tokens", "kv_pages_used"):
        if numbers[name]:
            failures.append(f"{name} is {numbers[name]:.0f} when nothing runs")
    if exit_code:
        failures.append(f"the server ended with exit code {exit_code}")
    settled = [mib for _, mib in tally.memory_mib[len(tally.memory_mib) // 3 :]] or [0.0]
    half = len(settled) // 2
    first, last = max(settled[: half or 1]), max(settled[half:])
    if last > 1.05 * first + 8:
        failures.append(f"memory grew from {first:.0f} to {last:.0f} MiB")
    if not any(key.endswith(" 429") for key in tally.answers):
        failures.append("nothing was shed: the load was below the capacity")
    return {
        "sent": dict(tally.sent),
        "answers": dict(sorted(tally.answers.items())),
        "memory_mib": [round(first, 1), round(last, 1)],
        "generated_tokens": int(numbers["generation_tokens_total"]),
        "slow_readers": int(numbers["slow_readers_total"]),
        "clients_gone": int(numbers["clients_gone_total"]),
        "late": sum(count for key, count in tally.answers.items() if key.endswith(" 408")),
        "wrong": len(tally.wrong),
        "failures": failures,
    }


def run(seconds: float, model: Path | None = None, seed: int = 0) -> dict[str, Any]:
    """Start a server, soak it, stop it; the verdict."""
    with tempfile.TemporaryDirectory() as scratch:
        process, url = start_server(model or tiny_model(Path(scratch)))
        try:
            target = Target(url)
            tally = asyncio.run(soak(target, process.pid, seconds, 2 * QUEUE, seed))
            numbers = asyncio.run(after(target))
            process.send_signal(signal.SIGTERM)
            return verdict(tally, numbers, process.wait(timeout=60))
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/cpu")
    options = parser.parse_args()
    model = {} if options.model is None else {"model": options.model.name}
    row = common() | model | {"seconds": options.seconds, "seed": options.seed}
    row |= run(options.seconds, options.model, options.seed)
    if options.record:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    print(json.dumps(row))
    return bool(row["failures"])


def common() -> dict[str, Any]:
    """What every result row says of its origin."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "op": "soak_serve",
        "impl": "server",  # no implementation of a kernel: the tables leave it out
        "run": f"soak-{int(time.time())}",
        "gpu": "cpu",
        "model": "2 layers, random weights, float32",
        "shape": {"sequences": SEQUENCES, "queue": QUEUE, "clients": 2 * QUEUE},
        "commit": commit.stdout.strip() or "unknown",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
    }


if __name__ == "__main__":
    sys.exit(main())
