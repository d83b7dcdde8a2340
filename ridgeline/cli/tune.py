"""`ridgeline tune <op>`: time the valid tiles of a problem here and keep the fastest."""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ridgeline.cli.command import Command, Result
from ridgeline.cli.explain import config_text
from ridgeline.cli.problems import AttentionShape
from ridgeline.cli.tables import number, table
from ridgeline.core import env, progress, registry, tuned
from ridgeline.core.arch import Arch, detect
from ridgeline.core.errors import UserError, bad_value
from ridgeline.kernels.attention.config import forget_kept, kernels_of

_SWEEP = "ridgeline.kernels.attention.tune"
"""Imported when there is something to time: it needs Triton."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneAttention(AttentionShape):
    """The tiles of the Triton attention kernels; a result holds for lengths up to the same power
    of two."""

    workers: int | None = None
    """Processes that compile beside the timing; the cores less one unless given, 0 for none."""
    seconds: float = 120.0
    """Time for all kernels of the problem: tiles that are not compiled by then are left, and the
    fastest of the others is kept."""

    def __post_init__(self) -> None:
        AttentionShape.__post_init__(self)
        if self.workers is not None and self.workers < 0:
            raise bad_value(
                "tune", "workers", "not be negative", self.workers, "give 0 to compile in turn"
            )
        if not self.seconds > 0:
            raise bad_value("tune", "seconds", "be positive", self.seconds, "give some seconds")


def tune(config: TuneAttention, timer: Any = None) -> Result:
    """Time the tiles of every kernel that the problem runs and keep the fastest of each.

    timer: (runs, repetitions) -> microseconds of each; CUDA events unless given.

    Raises: UserError without a GPU; NotImplementedError for a problem that Triton's implementation
    refuses; ValueError for flags that describe no problem.
    """
    problem = config.problem()
    arch = device_arch()
    registry.select(problem, arch, "triton")
    sweep = importlib.import_module(_SWEEP)
    timer = timer or sweep.device_timer(arch)
    workers = max(0, (os.cpu_count() or 1) - 1) if config.workers is None else config.workers
    workers = 0 if env.triton_interpreted() else workers
    names = kernels_of(problem)
    counts = [len(sweep.configs_of(problem, arch, name)) for name in names]
    rows = []
    file = tuned.path(arch)
    end = time.monotonic() + config.seconds
    with progress.task("tune", sum(counts), "tiles") as advance:
        for to_go, name in zip(range(len(names), 0, -1), names, strict=True):
            share = (end - time.monotonic()) / to_go
            outcome = sweep.tune_kernel(
                problem, arch, name, timer, workers=workers, seconds=share, advance=advance
            )
            file = tuned.save("attention", arch, {outcome.key: sweep.entry(outcome)})
            rows.append(asdict(outcome))
    forget_kept()
    return {
        "op": problem.op,
        "problem": asdict(problem),
        "arch": arch.name,
        "device": arch.device,
        "chosen": registry.select(problem, arch).name,
        "kernels": rows,
        "file": str(file),
    }


def device_arch() -> Arch:
    """The architecture to tune for: this machine's GPU, or the Triton interpreter's.

    Raises: UserError where there is neither.
    """
    if env.triton_interpreted():
        return importlib.import_module(_SWEEP).kernels.arch_of(torch.device("cpu"))
    if not torch.cuda.is_available():
        raise UserError("tune: no CUDA device is usable here; run it on the machine to be tuned")
    return detect("cuda")


def show(result: Result) -> str:
    """Shipped and best tile of each kernel."""
    rows = [
        (
            row["kernel"],
            f"{row['tried']} ({row['failed']} failed, {row['left']} left)",
            number(row["shipped_us"]),
            number(row["best_us"]),
            config_text(row["best"]) + (" (as shipped)" if row["best"] == row["shipped"] else ""),
        )
        for row in result["kernels"]
    ]
    lines = [
        f"{result['op']} on {result['arch']} ({result['device']})",
        "",
        table(("kernel", "tiles tried", "shipped us", "best us", "best tile"), rows),
        "",
        f"kept in {result['file']}",
    ]
    if result["chosen"] != "triton":
        lines.append(
            f"this problem runs on {result['chosen']} here; the tiles serve impl triton "
            "(RIDGELINE_IMPL_ATTENTION=triton)"
        )
    return "\n".join(lines)


def kept(_config: TuneAttention) -> str:
    """After Ctrl-C."""
    return "kernels that were finished are kept; the same command times all again"


COMMAND = Command(run=tune, config={"attention": TuneAttention}, show=show, kept=kept)
