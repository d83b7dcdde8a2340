"""`ridgeline generate`: answer a prompt, or a conversation line by line, streamed.

This module imports no torch: what is not there is refused in a fraction of a second; the work is in
generate_work.py.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.cli.command import Command, Result, nothing_kept
from ridgeline.core.dtypes import Device, RunDtype
from ridgeline.core.errors import bad_value
from ridgeline.core.model_folder import check_model_folder
from ridgeline.nn.sampling import SamplingConfig


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
    check_model_folder(config.model, "generate: model")
    return importlib.import_module("ridgeline.cli.generate_work").run(config)


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


COMMAND = Command(run=generate, config=GenerateConfig, show=show, kept=nothing_kept)
