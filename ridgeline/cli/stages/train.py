"""Training from scratch on real text: interrupted, resumed, and held against a run that was not."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path

from ridgeline.cli.stage import Context, Result, Stage
from ridgeline.core.errors import UserError
from ridgeline.core.files import atomic_write_text
from ridgeline.core.text import wiki_split
from ridgeline.nn.hf import load_config
from ridgeline.report.figures import loss_curve
from ridgeline.report.section import Figure, Section
from ridgeline.train.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelChoice,
    OptimConfig,
    TrainConfig,
)
from ridgeline.train.metrics import read_rows
from ridgeline.train.trainer import TrainResult, train

SEQLEN, SAMPLES, VOCAB = 256, 8, 4096
PRESET = "small"
FOLDER, MARKER = "quickstart-train", ".made-by-ridgeline-quickstart"


def run(context: Context) -> Result:
    """Train, stopped at a third and resumed; then the same run without a stop, a little further."""
    folder = fresh_folder(context.folder)
    text = folder / "text.jsonl"
    documents = wiki_split().train
    atomic_write_text(text, "".join(json.dumps({"text": each}) + "\n" for each in documents))
    stop, beyond = context.config.train_steps // 3, max(2, context.config.train_steps // 6)
    interrupted = unless_signalled(train(_config(context, folder / "run"), stop_at_step=stop))
    resumed = unless_signalled(train(_config(context, folder / "run")))
    reference = unless_signalled(
        train(_config(context, folder / "uninterrupted"), stop_at_step=stop + beyond)
    )
    losses = [*interrupted.losses, *resumed.losses]
    again = list(reference.losses[stop:])
    rows = [row for row in read_rows(folder / "run") if "tokens_per_s" in row]
    shape = load_config(folder / "run" / "model")
    return {
        "preset": PRESET,
        "parameters": shape.num_params(),
        "layers": shape.num_layers,
        "hidden": shape.hidden_size,
        "vocab": shape.vocab_size,
        "seqlen": SEQLEN,
        "tokens_per_step": SEQLEN * SAMPLES,
        "documents": len(documents),
        "dtype": context.dtype,
        "losses": losses,
        "resumed_at": stop,
        "uninterrupted": again,
        "largest_difference": max(abs(a - b) for a, b in zip(losses[stop:], again, strict=False)),
        "eval_loss": resumed.eval_loss,
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows),
        "mfu_causal": statistics.median(row["mfu_causal"] for row in rows),
        "mfu_noncausal": statistics.median(row["mfu_noncausal"] for row in rows),
        "peak_memory_gib": max(row["peak_memory_gib"] for row in rows),
        "flops_per_step": SEQLEN * SAMPLES * shape.flops_per_token(SEQLEN),
        "folder": str(folder / "run" / "model"),
    }


def fresh_folder(parent: Path, name: str = FOLDER) -> Path:
    """A stage's own folder, emptied; one without the marker is somebody else's.

    Raises: UserError for a folder that this stage did not make, or a disk that refuses.
    """
    folder = parent / name
    if folder.is_symlink() or (folder.exists() and not (folder / MARKER).is_file()):
        raise UserError(
            f"quickstart: {folder} must be a folder that quickstart made to be replaced, got one "
            f"without {MARKER}; move it away or choose another --out"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).touch()
        for entry in folder.iterdir():  # the marker stays: an interrupted removal can go on
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != MARKER:
                entry.unlink()
    except OSError as error:
        raise UserError(f"quickstart: could not empty {folder}: {error.strerror}") from error
    return folder


def _config(context: Context, run_dir: Path) -> TrainConfig:
    steps = context.config.train_steps
    return TrainConfig(
        run_dir=run_dir,
        steps=steps,
        batch_samples=SAMPLES,
        micro_batch_samples=SAMPLES,
        dtype="bfloat16" if context.device == "cuda" else "float32",
        device="cuda" if context.device == "cuda" else "cpu",
        model=ModelChoice(preset=PRESET),
        data=DataConfig(
            files=(context.folder / FOLDER / "text.jsonl",),
            tokenizer="bpe",
            vocab_size=VOCAB,
            seqlen=SEQLEN,
            cache=context.folder / FOLDER / "tokens",
        ),
        optim=OptimConfig(lr=3e-3, warmup_steps=min(10, steps)),
        checkpoint=CheckpointConfig(every_steps=0),
        log=LogConfig(eval_samples=32),
    )


def unless_signalled(result: TrainResult) -> TrainResult:
    """The result, unless a signal cut the run short. Raises: KeyboardInterrupt then."""
    if result.interrupted in ("SIGINT", "SIGTERM"):
        raise KeyboardInterrupt
    return result


def say(result: Result) -> str:
    """The loss and the rates."""
    return (
        f"loss {result['losses'][0]:.3f} -> {result['losses'][-1]:.3f} in {len(result['losses'])} "
        f"steps of {result['tokens_per_step']:,} tokens, {result['tokens_per_s']:,.0f} tokens/s, "
        f"MFU {100 * result['mfu_causal']:.1f} % causal; resumed at step {result['resumed_at']}, "
        f"losses differ by at most {result['largest_difference']:g}"
    )


def section(result: Result, context: Context) -> Section:
    """The curve and the rates."""
    stop, again = result["resumed_at"], result["uninterrupted"]
    curve = loss_curve(
        range(1, len(result["losses"]) + 1),
        result["losses"],
        resumed_at=stop,
        check=(range(stop + 1, stop + 1 + len(again)), again),
    )
    return Section(
        title="Training from scratch",
        paragraphs=(
            f"A decoder of {result['parameters'] / 1e6:.2f} M parameters ({result['layers']} "
            f"layers of width {result['hidden']}, its own vocabulary of "
            f"{result['vocab']:,} tokens) on {result['documents']:,} Wikipedia leads, packed into "
            f"samples of {result['seqlen']} tokens without attention across documents, in "
            f"{result['dtype']}.",
            f"The run was stopped after step {stop} and resumed from its checkpoint. A second run "
            f"that was not stopped gives the same losses: the largest difference over the "
            f"{len(again)} steps after the resume is {result['largest_difference']:g}.",
        ),
        facts=(
            (
                "loss, first to last step",
                f"{result['losses'][0]:.2f} -> {result['losses'][-1]:.2f}",
            ),
            ("loss on held-out text", f"{result['eval_loss']:.3f}"),
            ("tokens/s", f"{result['tokens_per_s']:,.0f}"),
            ("MFU, causal counting", f"{100 * result['mfu_causal']:.1f} %"),
            ("MFU, non-causal counting", f"{100 * result['mfu_noncausal']:.1f} %"),
        ),
        figures=(
            Figure(
                svg=curve,
                caption="Training loss by step, with the step at which the run was resumed; rings "
                "are the run that was not interrupted.",
            ),
        ),
    )


STAGE = Stage(
    name="train",
    order=60,
    title="training from scratch",
    run=run,
    section=section,
    say=say,
    depends=("train_steps",),
    outputs=lambda result: (result["folder"],),
)
