"""`ridgeline quickstart`: every stage in order, each result kept, a report at the end."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ridgeline.cli.command import Command, Result
from ridgeline.cli.problems import best_device
from ridgeline.cli.stage import (
    Context,
    QuickstartConfig,
    Stage,
    all_stages,
    keep,
    kept_result,
)
from ridgeline.core import env, progress
from ridgeline.core.errors import UserError, bad_value


def quickstart(config: QuickstartConfig) -> Result:
    """Run every stage whose result is not kept; returns all results by stage name.

    Raises: ValueError for an unknown stage in `redo`; UserError for a download, disk or device that
    refuses.
    """
    stages = all_stages()
    names = [stage.name for stage in stages]
    for name in config.redo:
        if name not in (*names, "all"):
            raise bad_value(
                "quickstart", "redo", f"be one of {', '.join(names)}, all", name, "drop it"
            )
    context = open_context(config)
    start = time.monotonic()
    for number, stage in enumerate(stages, start=1):
        again = stage.name in config.redo or "all" in config.redo
        context.results[stage.name] = _run_or_keep(
            stage, context, again, f"[{number}/{len(stages)}]"
        )
    return {
        "folder": str(context.folder),
        "report": context.results["report"]["path"],
        "seconds": round(time.monotonic() - start, 1),
        "stages": context.results,
    }


def open_context(config: QuickstartConfig) -> Context:
    """The run folder and the device. Raises: UserError for a GPU that is not here."""
    if config.device == "cuda" and best_device() != "cuda":
        raise UserError("quickstart: no CUDA device is usable here; use --device cpu")
    device = best_device() if config.device == "auto" else config.device
    folder = run_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    return Context(config=replace(config, device=device), folder=folder, device=device)


def run_folder(config: QuickstartConfig) -> Path:
    """Where the run's files are."""
    return (config.out or env.cache_dir() / "quickstart").absolute()


def _run_or_keep(stage: Stage, context: Context, again: bool, label: str) -> Result:
    if not again and (result := kept_result(stage, context)) is not None:
        progress.say(f"{label} {stage.title}: kept from {result['finished']}")
        progress.say(f"      {stage.say(result)}")
        progress.event("stage", name=stage.name, state="kept", result=result)
        return result
    progress.say(f"{label} {stage.title}")
    progress.event("stage", name=stage.name, state="started")
    start = time.monotonic()
    result = stage.run(context)
    result["seconds"] = round(time.monotonic() - start, 2)
    result["finished"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    keep(stage, context, result)
    progress.say(f"      {stage.say(result)} ({result['seconds']:.0f} s)")
    progress.event("stage", name=stage.name, state="done", result=result)
    return result


def show(result: Result) -> str:
    """Where the report is."""
    return f"done in {result['seconds']:.0f} s; report: {result['report']}"


def kept(config: QuickstartConfig) -> str:
    """After Ctrl-C."""
    return f"finished stages are kept in {run_folder(config)}; the same command goes on from there"


COMMAND = Command(run=quickstart, config=QuickstartConfig, show=show, kept=kept, tells_sigterm=True)
