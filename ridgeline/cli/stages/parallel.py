"""Training on four processes: two data ranks, each a pipeline of two, held against one process."""

from __future__ import annotations

import json
from pathlib import Path

from ridgeline.cli.stage import Context, Result, Stage
from ridgeline.cli.stages.train import fresh_folder, unless_signalled
from ridgeline.core.files import atomic_write_text
from ridgeline.core.text import wiki_split
from ridgeline.parallel.layout import Layout
from ridgeline.report.section import Section, Table
from ridgeline.train.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelChoice,
    OptimConfig,
    TrainConfig,
)
from ridgeline.train.launch import train_here
from ridgeline.train.metrics import read_rows
from ridgeline.train.trainer import train

LAYOUT = Layout(dp_shard=2, pp=2)
PRESET = "tiny"
SEQLEN, SAMPLES, DOCUMENTS = 128, 8, 400
STEPS, MORE = 4, 2
FOLDER = "quickstart-parallel"


def run(context: Context) -> Result:
    """Four processes for some steps, then one from their checkpoint; and one for all of them."""
    folder = fresh_folder(context.folder, FOLDER)
    documents = wiki_split().train[:DOCUMENTS]
    text = folder / "text.jsonl"
    atomic_write_text(text, "".join(json.dumps({"text": each}) + "\n" for each in documents))
    one = unless_signalled(train(_config(folder, "one", Layout())))
    train_here(_config(folder, "four", LAYOUT), stop_at_step=STEPS)
    resumed = unless_signalled(train(_config(folder, "four", Layout())))
    rows = [row for row in read_rows(folder / "four") if row["kind"] == "train"]
    reference = [row for row in read_rows(folder / "one") if row["kind"] == "train"]
    split = next((row["step_ms"] for row in rows if "step_ms" in row), {})
    return {
        "layout": LAYOUT.describe(),
        "ranks": LAYOUT.world_size,
        "preset": PRESET,
        "resumed_at": resumed.resumed_from,
        "losses": [row["loss"] for row in rows],
        "reference_losses": list(one.losses),
        "largest_difference": max(
            abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(rows, reference, strict=True)
        ),
        "largest_norm_difference": max(
            abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"]
            for a, b in zip(rows, reference, strict=True)
        ),
        "step_ms": split,
    }


def _config(folder: Path, name: str, layout: Layout) -> TrainConfig:
    return TrainConfig(
        run_dir=folder / name,
        steps=STEPS + MORE,
        batch_samples=SAMPLES,
        micro_batch_samples=2,
        device="cpu",
        layout=layout,
        timeout_s=120.0,
        model=ModelChoice(preset=PRESET),
        data=DataConfig(
            files=(folder / "text.jsonl",),
            tokenizer="byte",
            seqlen=SEQLEN,
            eval_fraction=0.0,
            cache=folder / "tokens",
        ),
        optim=OptimConfig(lr=3e-3, warmup_steps=2),
        checkpoint=CheckpointConfig(every_steps=0, export=False),
        log=LogConfig(),
    )


def say(result: Result) -> str:
    """The layout and how far it is from one process."""
    gap = result["largest_difference"]
    close = f"within {gap:.0e} of" if gap else "the losses of"
    return (
        f"{result['layout']} on {result['ranks']} processes, then one process from step "
        f"{result['resumed_at']}: loss {result['losses'][0]:.4f} -> {result['losses'][-1]:.4f}, "
        f"{close} one process"
    )


def section(result: Result, context: Context) -> Section:
    """Losses side by side."""
    pairs = zip(result["losses"], result["reference_losses"], strict=True)
    rows = tuple(
        (
            str(step),
            result["layout"] if step <= result["resumed_at"] else "one process, resumed",
            f"{ours:.7f}",
            f"{theirs:.7f}",
        )
        for step, (ours, theirs) in enumerate(pairs, start=1)
    )
    return Section(
        title="Training on four processes",
        paragraphs=(
            f"The same run twice: on one process, and on {result['ranks']} as {result['layout']} "
            f"(data parallel with sharded state, times a pipeline), whose checkpoint one process "
            f"then took over after step {result['resumed_at']}. Same data order, same losses.",
        ),
        facts=(
            ("largest difference of a loss, relative", f"{result['largest_difference']:.0e}"),
            ("of a gradient norm", f"{result['largest_norm_difference']:.0e}"),
        ),
        tables=(Table(header=("step", "on", "loss", "loss of one process"), rows=rows),),
    )


STAGE = Stage(
    name="parallel",
    order=65,
    title="training on four processes",
    run=run,
    section=section,
    say=say,
)
