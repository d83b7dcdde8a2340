"""Stages of the quickstart: small objects, found by listing `cli/stages`.

A stage is a module in that folder with a `STAGE`: to add one is to add a file. Its result is plain
data, kept as JSON in the run folder, so a run that was interrupted goes on where it was; its
section is what the report says of it.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import ridgeline
from ridgeline.cli import stages
from ridgeline.core.arch import detect
from ridgeline.core.errors import UserError, bad_value
from ridgeline.core.files import atomic_write_text
from ridgeline.report.section import Section

Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickstartConfig:
    """The whole path on real weights, from perplexity to 4 bits, ending in a report."""

    out: Path | None = None
    """Folder of the run (results/, models, report.html); "quickstart" in the cache unless given."""
    redo: tuple[str, ...] = ()
    """Stages to run again although their results are kept; "all" for every one."""
    device: str = "auto"
    """cpu, cuda, or auto: the GPU where there is one."""
    windows: int = 6
    """Windows of 1,024 tokens that each perplexity is measured on, at least 1."""
    calibration_sequences: int = 24
    """Sequences of 512 tokens that GPTQ is calibrated on, at least 1."""
    train_steps: int = 40
    """Optimizer steps of the training stage, at least 8."""
    max_new_tokens: int = 64
    """Tokens of the generated answer at the most, at least 1."""
    prompt: str = "What is the capital of France, and what is it known for?"
    """What the 4-bit model is asked."""

    def __post_init__(self) -> None:
        least = {"windows": 1, "calibration_sequences": 1, "train_steps": 8, "max_new_tokens": 1}
        for name, low in least.items():
            if (value := getattr(self, name)) < low:
                raise bad_value("quickstart", name, f"be at least {low}", value, "raise it")
        if self.device not in ("auto", "cpu", "cuda"):
            raise bad_value("quickstart", "device", "be auto, cpu or cuda", self.device, "use auto")


@dataclass(slots=True, kw_only=True)
class Context:
    """What stages share."""

    config: QuickstartConfig
    folder: Path
    """The run folder."""
    device: str
    """cpu or cuda."""
    results: dict[str, Result] = field(default_factory=dict)
    """Results of the stages before, by name."""

    @property
    def dtype(self) -> str:
        """What models run in: bfloat16 on a GPU, float32 on a CPU (many multiply bf16 slowly)."""
        return "bfloat16" if self.device == "cuda" else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of the quickstart."""

    name: str
    order: int
    """Stages run by rising order; leave gaps."""
    title: str
    run: Callable[[Context], Result]
    """Does the work. The result is JSON data; "seconds" and "finished" are added to it."""
    section: Callable[[Result, Context], Section]
    """What the report says of a result."""
    say: Callable[[Result], str]
    """The result in a line or two."""
    depends: tuple[str, ...] = ()
    """Fields of the config and names of stages on which the result depends."""
    outputs: Callable[[Result], tuple[str, ...]] = lambda result: ()
    """Paths that must still exist for a kept result to count."""
    kept: bool = True
    """False: run again every time."""


def all_stages() -> list[Stage]:
    """Every stage in cli/stages, in order."""
    found = [
        importlib.import_module(f"{stages.__name__}.{module.name}").STAGE
        for module in pkgutil.iter_modules(stages.__path__)
    ]
    return sorted(found, key=lambda stage: stage.order)


def fingerprint(stage: Stage, context: Context) -> dict[str, Any]:
    """What a kept result must share with this run to count."""
    values: dict[str, Any] = {
        "version": ridgeline.__version__,
        "torch": metadata.version("torch"),
        "machine": detect(context.device).device,
        "device": context.device,
    }
    config = asdict(context.config)
    for name in stage.depends:
        earlier = context.results.get(name, {})
        values[name] = config[name] if name in config else earlier.get("finished")
    return values


def result_path(folder: Path, stage: Stage) -> Path:
    """Where a stage's result is kept."""
    return folder / "results" / f"{stage.name}.json"


def keep(stage: Stage, context: Context, result: Result) -> None:
    """Write a result, all or nothing."""
    record = {"fingerprint": fingerprint(stage, context), "result": result}
    atomic_write_text(result_path(context.folder, stage), json.dumps(record, indent=1))


def kept_result(stage: Stage, context: Context) -> Result | None:
    """The result of an earlier run of this stage where it still counts."""
    if not stage.kept:
        return None
    try:
        record = json.loads(result_path(context.folder, stage).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if record.get("fingerprint") != fingerprint(stage, context):
        return None
    result = record["result"]
    return result if all(Path(path).exists() for path in stage.outputs(result)) else None


def need(context: Context, name: str) -> Result:
    """The result of an earlier stage. Raises: UserError where it has not run."""
    if name not in context.results:
        raise UserError(f"quickstart: stage {name} must run first; run ridgeline quickstart")
    return context.results[name]
