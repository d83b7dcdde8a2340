"""What `ridgeline eval` does once its arguments have passed."""

from __future__ import annotations

from ridgeline.cli.command import Result
from ridgeline.cli.eval import EvalConfig
from ridgeline.engine.load import open_model
from ridgeline.nn.perplexity import perplexity


def run(config: EvalConfig, text: str) -> Result:
    """`ridgeline.cli.eval.eval` after its checks."""
    opened = open_model(config.model, config.dtype, config.device)
    measured = perplexity(
        opened.model,
        opened.tokenizer.encode(text),
        window=config.window,
        max_windows=config.max_windows,
    )
    return {
        "model": str(config.model),
        "text": str(config.text),
        "weights": opened.weights,
        "dtype": opened.dtype,
        "device": str(opened.device),
        "ppl": measured.ppl,
        "nll": measured.nll,
        "tokens": measured.tokens,
        "windows": measured.windows,
        "window": measured.window,
        "seconds": measured.seconds,
        "tokens_per_s": measured.tokens / measured.seconds,
    }
