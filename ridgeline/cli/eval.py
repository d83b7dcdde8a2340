"""`ridgeline eval`: perplexity of a model folder on a text file.

This module imports no torch: what is not there is refused in a fraction of a second; the work is in
eval_work.py.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from ridgeline.cli.command import Command, Result, nothing_kept
from ridgeline.core.dtypes import Device, RunDtype
from ridgeline.core.errors import bad_value
from ridgeline.core.model_folder import check_model_folder
from ridgeline.core.text import read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Perplexity of a model folder on a text file."""

    model: Path
    """A Hugging Face folder, plain or quantized."""
    text: Path
    """A UTF-8 text file; scored joined, in windows that do not overlap."""
    window: int = 1024
    """Tokens of a window, from 2 to the model's context; all but the first are scored."""
    max_windows: int | None = None
    """At most so many windows, from the start of the text; all unless given."""
    dtype: RunDtype = "auto"
    """Of activations and plain weights; auto: bfloat16 on a GPU, float32 on a CPU."""
    device: Device = "auto"
    """auto: the GPU where there is one."""

    def __post_init__(self) -> None:
        if self.window < 2:
            raise bad_value("eval", "window", "be at least 2", self.window, "e.g. 1024")
        if self.max_windows is not None and self.max_windows < 1:
            raise bad_value(
                "eval", "max_windows", "be at least 1", self.max_windows, "leave it out"
            )


def eval(config: EvalConfig) -> Result:
    """Perplexity of the model on the text, with the protocol stated.

    Raises: UserError for a folder or text that cannot be used; ValueError for a text shorter than a
    window or a window beyond the model's context.
    """
    check_model_folder(config.model, "eval: model")
    text = read_text(config.text)
    return importlib.import_module("ridgeline.cli.eval_work").run(config, text)


def show(result: Result) -> str:
    """One line with the protocol."""
    return (
        f"perplexity {result['ppl']:.4f} ({result['nll']:.5f} nats a token) of {result['weights']} "
        f"weights in {result['dtype']} on {result['tokens']:,} tokens, {result['windows']} windows "
        f"of {result['window']}, {result['tokens_per_s']:,.0f} tokens/s"
    )


COMMAND = Command(run=eval, config=EvalConfig, show=show, kept=nothing_kept)
