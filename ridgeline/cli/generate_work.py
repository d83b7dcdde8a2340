"""What `ridgeline generate` does once its arguments have passed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ridgeline.cli.command import Result
from ridgeline.cli.generate import GenerateConfig
from ridgeline.core import progress
from ridgeline.core.arch import detect
from ridgeline.core.errors import bad_value
from ridgeline.engine.load import OpenModel, is_quantized, open_model
from ridgeline.nn.generate import GenerationStats, generate_text
from ridgeline.nn.sampling import SamplingConfig
from ridgeline.nn.tokenizer import Tokenizer


def run(config: GenerateConfig) -> Result:
    """`ridgeline.cli.generate.generate` after its checks."""
    dtype = config.dtype
    if dtype == "auto" and is_quantized(config.model):
        dtype = "bfloat16"
    if config.chat and Tokenizer(config.model).chat_template is None:  # before the weights are read
        raise bad_value(
            "generate", "model", "have a chat template", f"none in {config.model}",
            "give --no-chat, which continues the text",
        )  # fmt: skip
    opened = open_model(config.model, dtype, config.device)
    messages: list[dict[str, str]] = []
    if config.system:
        messages.append({"role": "system", "content": config.system})
    answers = []
    for turn in _turns(config):
        if config.chat:
            messages.append({"role": "user", "content": turn})
            text = opened.tokenizer.apply_chat_template(messages)
        else:
            text = turn
        answer = answer_streamed(opened, text, config.sampling(), plain_text=not config.chat)
        messages.append({"role": "assistant", "content": answer["text"]})
        answers.append({"prompt": turn, **answer})
    return {"model": str(config.model), "weights": opened.weights, "answers": answers}


def answer_streamed(
    opened: OpenModel, prompt: str, sampling: SamplingConfig, *, plain_text: bool = False
) -> dict[str, Any]:
    """Generate after `prompt`, each piece told at once; the text with its counts and rates.

    plain_text: no chat template wrote the prompt, so the tokenizer adds its special tokens.
    """
    stats = GenerationStats()
    pieces = []
    for piece in generate_text(
        opened.model,
        opened.tokenizer,
        prompt,
        sampling,
        add_special_tokens=plain_text,
        stats=stats,
    ):
        pieces.append(piece)
        progress.event("text", text=piece)
        if progress.mode() in ("bars", "lines"):
            print(piece, end="", flush=True)
    progress.say("")
    ceilings = detect(opened.device).ceilings
    return {
        "text": "".join(pieces),
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "finish_reason": stats.finish_reason,
        "prefill_s": stats.prefill_s,
        "tokens_per_s": stats.decode_tokens_per_s,
        "gbps": stats.decode_gbps,
        "percent_of_read_ceiling": 100 * stats.decode_gbps / ceilings.read_gbps,
        "ceiling": ceilings.source,
    }


def _turns(config: GenerateConfig) -> Iterator[str]:
    if config.prompt is not None:
        yield config.prompt
        return
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
