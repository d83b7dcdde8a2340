"""The 4-bit model behind OpenAI's API: started, asked by the official client, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from ridgeline.cli.bench_client import Target, ask
from ridgeline.cli.stage import Context, Result, Stage, need
from ridgeline.core import env, progress
from ridgeline.core.errors import UserError
from ridgeline.report.section import Section

NAME = "smollm2"
FLAGS = ("--port", "0", "--name", NAME, "--max-model-len", "2048", "--max-num-seqs", "4", "--json")
STOP_S = 60


@dataclass(frozen=True, slots=True)
class Streamed:
    """One streamed answer, as its client saw it."""

    text: str
    tokens: int
    first_s: float
    end_s: float
    client: str


def run(context: Context) -> Result:
    """Start the server, stream one answer, stop the server."""
    folder = need(context, "quantize")["folder"]
    start = time.monotonic()
    with running(folder, context.device) as url:
        ready_s = time.monotonic() - start
        answer = stream(url, context.config.prompt, context.config.max_new_tokens)
        progress.say(answer.text)
        stopping = time.monotonic()
    decode_s = max(answer.end_s - answer.first_s, 1e-9)
    return {
        "prompt": context.config.prompt,
        "client": answer.client,
        "ready_s": round(ready_s, 2),
        "first_token_s": round(answer.first_s, 3),
        "new_tokens": answer.tokens,
        "tokens_per_s": (answer.tokens - 1) / decode_s,
        "stop_s": round(time.monotonic() - stopping, 2),
        "text": answer.text,
    }


@contextlib.contextmanager
def running(folder: str, device: str) -> Iterator[str]:
    """A server in a process of its own, its address; stopped by SIGTERM, it must end well.

    Raises: UserError where it does not start or does not stop.
    """
    command = [sys.executable, "-m", "ridgeline", "serve", folder, "--device", device, *FLAGS]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=env.child_environment(),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield _wait_for_address(process)
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        if process.wait(timeout=STOP_S) != 0:
            raise UserError(f"quickstart: the server did not stop well: {rest.strip()[-300:]}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def _wait_for_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        said: dict[str, Any] = json.loads(line)
        if said["event"] == "serving":
            return said["url"]
        if said["event"] == "error":
            raise UserError(f"quickstart: the server did not start: {said['message']}")
    raise UserError(f"quickstart: the server ended with exit code {process.wait()} as it started")


def stream(url: str, prompt: str, max_new_tokens: int) -> Streamed:
    """One greedy answer, through the official client where it is installed.

    Raises: UserError where no answer comes.
    """
    messages = [{"role": "user", "content": prompt}]
    asked: dict[str, Any] = {
        "model": NAME, "messages": messages, "temperature": 0, "stream": True,
        "max_completion_tokens": max_new_tokens, "stream_options": {"include_usage": True},
    }  # fmt: skip
    if importlib.util.find_spec("openai") is not None:
        return _official(url, asked)
    answer = asyncio.run(ask(Target(url), "/v1/chat/completions", asked))
    if not answer.ok:
        raise UserError(f"quickstart: the server answered {answer.status} {answer.error}")
    client = "plain HTTP (the package openai is not installed)"
    return Streamed(answer.text, answer.output_tokens, answer.first_s, answer.end_s, client)


def _official(url: str, asked: dict[str, Any]) -> Streamed:
    import openai

    start = time.perf_counter()
    pieces: list[str] = []
    first_s = end_s = 0.0
    tokens = 0
    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            for chunk in client.chat.completions.create(**asked):
                if chunk.choices and (piece := chunk.choices[0].delta.content):
                    end_s = time.perf_counter() - start
                    first_s = first_s or end_s
                    pieces.append(piece)
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
    except openai.OpenAIError as error:
        raise UserError(f"quickstart: the server did not answer its client: {error}") from error
    version = metadata.version("openai")
    return Streamed("".join(pieces), tokens, first_s, end_s, f"openai {version}")


def say(result: Result) -> str:
    """Start, first token, rate."""
    return (
        f"ready after {result['ready_s']:.1f} s, {result['new_tokens']} tokens at "
        f"{result['tokens_per_s']:.1f} tokens/s through {result['client']}, the first after "
        f"{result['first_token_s']:.2f} s; stopped in {result['stop_s']:.1f} s"
    )


def section(result: Result, context: Context) -> Section:
    """The answer and the times."""
    return Section(
        title="The 4-bit model as a server",
        paragraphs=(
            f"ridgeline serve in a process of its own, asked through {result['client']} for the "
            "same prompt, greedy, as a stream of server-sent events, then stopped with SIGTERM. "
            "To keep one running: ridgeline serve quickstart.",
        ),
        quote=result["text"],
        facts=(
            ("from start to ready", f"{result['ready_s']:.1f} s"),
            ("until the first token", f"{result['first_token_s']:.2f} s"),
            ("tokens/s", f"{result['tokens_per_s']:.1f}"),
        ),
    )


STAGE = Stage(
    name="serve",
    order=55,
    title="server",
    run=run,
    section=section,
    say=say,
    depends=("quantize", "prompt", "max_new_tokens"),
)
