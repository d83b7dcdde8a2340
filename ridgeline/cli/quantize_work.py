"""What `ridgeline quantize` does once its arguments have passed: recipe, run, result."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ridgeline.cli.command import Result
from ridgeline.cli.overwrite import check_out
from ridgeline.cli.quantize_report import verdict, written_texts
from ridgeline.cli.quantize_run import (
    Job,
    choose_job_widths,
    plan_text,
    prepare,
    run_job,
)
from ridgeline.core import progress
from ridgeline.core.host_memory import keep_freed_memory
from ridgeline.formats.convert import SourceFacts, target_layout
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.quant.recipe import Recipe

if TYPE_CHECKING:
    from ridgeline.cli.quantize import QuantizeConfig


def recipe_of(config: QuantizeConfig) -> Recipe:
    """What the flags say, for quant. Raises: ValueError for values out of range."""
    by_activation = config.solves and config.act_order == "activation"
    facts = SourceFacts(symmetric=config.symmetric, desc_act=by_activation)
    layout = target_layout(
        GPTQFormat(bits=config.bits, group_size=config.group_size), config.format, facts
    )
    return Recipe(
        method=config.method,
        layout=layout,
        gptq=config.gptq_options(),
        awq=config.awq_options(),
        overrides=config.overrides(),
        batch_sequences=config.batch_sequences,
        lm_head=config.lm_head,
    )


def run(config: QuantizeConfig) -> Result:
    """`ridgeline.cli.quantize.quantize` after its checks."""
    keep_freed_memory()
    if not config.dry_run:
        check_out("quantize", config.out, config.model, overwrite=config.overwrite)
    job = prepare(Job.of(config, recipe_of(config)))
    progress.say(plan_text(job))
    if config.dry_run:
        return {"out": str(config.out), "dry_run": True, **job.said()}
    choose_job_widths(job)
    done, size, seen = run_job(job, lambda done, seen: written_texts(job, done, seen))
    return {
        "model": str(config.model),
        "out": str(config.out),
        "method": config.method,
        "format": config.format,
        "bits": config.bits,
        "group_size": config.group_size,
        "symmetric": config.symmetric,
        "act_order": config.act_order,
        "layers": len(done.reports),
        "skipped": done.skipped,
        "calibration_tokens": done.calibration_tokens,
        "quantize_seconds": done.seconds,
        "bytes": size.total_bytes,
        "bytes_16bit": size.unquantized_bytes,
        "worst": [asdict(report) for report in done.worst()],
        "folds": [sum(fold.accepted for fold in done.folds), len(done.folds)],
        "evaluation": None if done.evaluation is None else asdict(done.evaluation),
        "gates": verdict(config.max_kl, config.max_ppl_increase, done),
        "dry_run": False,
        **job.said(),
        **seen,
    }
