"""The 4-bit model answers a prompt through its chat template, streamed through a KV cache."""

from __future__ import annotations

from ridgeline.cli.generate_work import answer_streamed
from ridgeline.cli.stage import Context, Result, Stage, need
from ridgeline.engine.load import OpenModel, open_model
from ridgeline.nn.generate import SamplingConfig
from ridgeline.quant.linear import quantized_linears
from ridgeline.report.section import Section


def run(context: Context) -> Result:
    """Greedy decoding from the quantized folder."""
    opened = open_model(need(context, "quantize")["folder"], "bfloat16", context.device)
    prompt = context.config.prompt
    text = opened.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    sampling = SamplingConfig(max_new_tokens=context.config.max_new_tokens)
    answer = answer_streamed(opened, text, sampling)
    return {
        "prompt": prompt,
        "weights": opened.weights,
        "dtype": opened.dtype,
        "weight_bytes": opened.model.weight_bytes(),  # of the layouts that the run has made
        "packed_bytes": packed_bytes(opened),
        **answer,
    }


def packed_bytes(opened: OpenModel) -> int:
    """Weights of a step as the checkpoint stores them, whatever the kernels read instead."""
    linears = [linear for _, linear in quantized_linears(opened.model)]
    beyond = sum(linear.read_bytes() - linear.weight_bytes() for linear in linears)
    return opened.model.weight_bytes() - beyond


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
            f"{result['weight_bytes'] / 1e6:.0f} MB of weights as the kernels hold them "
            f"({result['packed_bytes'] / 1e6:.0f} MB in the checkpoint).",
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
