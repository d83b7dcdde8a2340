"""The 4-bit model answers a prompt through its chat template, streamed through a KV cache."""

from __future__ import annotations

from ridgeline.cli.generate import answer_streamed
from ridgeline.cli.stage import Context, Result, Stage, need
from ridgeline.engine.load import open_model
from ridgeline.nn.generate import SamplingConfig
from ridgeline.report.section import Section


def run(context: Context) -> Result:
    """Greedy decoding from the quantized folder."""
    opened = open_model(need(context, "quantize")["folder"], "bfloat16", context.device)
    prompt = context.config.prompt
    text = opened.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    sampling = SamplingConfig(max_new_tokens=context.config.max_new_tokens)
    return {
        "prompt": prompt,
        "weights": opened.weights,
        "dtype": opened.dtype,
        "weight_bytes": opened.model.weight_bytes(),
        **answer_streamed(opened, text, sampling),
    }


def say(result: Result) -> str:
    """The rates; the text was said as it came."""
    return (
        f"{result['new_tokens']} tokens at {result['tokens_per_s']:.1f} tokens/s, "
        f"{result['gbps']:.2f} GB/s of weights and cache = "
        f"{result['percent_of_read_ceiling']:.0f} % of the read ceiling"
    )


def section(result: Result, context: Context) -> Section:
    """The answer and the rates."""
    return Section(
        title="The 4-bit model answers",
        paragraphs=(
            f"Prompt: {result['prompt']} Greedy decoding of {result['weights']} weights with "
            f"activations in {result['dtype']}, one sequence; every step reads "
            f"{result['weight_bytes'] / 1e6:.0f} MB of weights.",
        ),
        quote=result["text"],
        facts=(
            ("tokens/s", f"{result['tokens_per_s']:.1f}"),
            ("GB/s read", f"{result['gbps']:.2f}"),
            ("of the read ceiling", f"{result['percent_of_read_ceiling']:.0f} %"),
            ("until the first token", f"{result['prefill_s']:.2f} s"),
        ),
    )


STAGE = Stage(
    name="generate",
    order=50,
    title="generation",
    run=run,
    section=section,
    say=say,
    depends=("quantize", "prompt", "max_new_tokens"),
)
