"""`ridgeline generate`: answer a prompt, or a conversation line by line, streamed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.cli.command import Command, Result, nothing_kept
from ridgeline.core import progress
from ridgeline.core.arch import detect
from ridgeline.core.errors import bad_value
from ridgeline.engine.load import Device, OpenModel, RunDtype, is_quantized, open_model
from ridgeline.nn.generate import GenerationStats, SamplingConfig, generate_text
from ridgeline.nn.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """Answer a prompt, streamed token by token."""

    model: Path
    """A Hugging Face folder, plain or quantized."""
    prompt: str | None = None
    """What to answer; unless given, every line of standard input is a turn of one conversation."""
    chat: bool = True
    """Wrap the prompt in the model's chat template; --no-chat continues the text, after what
    the tokenizer puts before a text (a BOS, for many models)."""
    system: str = ""
    """A system message before the first turn (with --chat)."""
    max_new_tokens: int = 128
    """Tokens of an answer at the most, at least 1."""
    temperature: float = 0.0
    """0: greedy; else logits are divided by it, above 0."""
    top_k: int | None = None
    """Only the k most likely tokens, at least 1; all unless given."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability, in (0, 1]."""
    seed: int = 0
    """Of the draw; the same seed gives the same text."""
    dtype: RunDtype = "auto"
    """Of activations and plain weights; auto: bfloat16 on a GPU and for 4-bit weights (the int4
    kernels are fast with it), else float32."""
    device: Device = "auto"
    """auto: the GPU where there is one."""

    def __post_init__(self) -> None:
        self.sampling()
        if self.system and not self.chat:
            raise bad_value(
                "generate", "system", "be empty without a chat template", repr(self.system),
                "drop --no-chat",
            )  # fmt: skip

    def sampling(self) -> SamplingConfig:
        """How tokens are chosen."""
        return SamplingConfig(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
        )


def generate(config: GenerateConfig) -> Result:
    """Answer the prompt, or every line of standard input; text is told as it comes.

    Raises: UserError for a folder that cannot be used; ValueError for a prompt beyond the model's
    context or a chat without a template.
    """
    dtype = config.dtype
    if dtype == "auto" and config.model.is_dir() and is_quantized(config.model):
        dtype = "bfloat16"
    there = config.chat and config.model.is_dir()
    if there and Tokenizer(config.model).chat_template is None:  # before the weights are read
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


def rates_text(answer: dict[str, Any]) -> str:
    """Counts and rates of an answer in one line."""
    return (
        f"[{answer['prompt_tokens']} prompt tokens in {answer['prefill_s']:.2f} s, "
        f"{answer['new_tokens']} new at {answer['tokens_per_s']:.1f} tokens/s, "
        f"{answer['gbps']:.2f} GB/s = "
        f"{answer['percent_of_read_ceiling']:.0f} % of the read ceiling]"
    )


def show(result: Result) -> str:
    """The rates; the text was said as it came."""
    return "\n".join(rates_text(answer) for answer in result["answers"])


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


COMMAND = Command(run=generate, config=GenerateConfig, show=show, kept=nothing_kept)
