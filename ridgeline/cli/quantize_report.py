"""What a quantization run says of itself: gates, and the files it puts beside the weights
(quantize_report.json, .csv, .html, and a model card)."""

from __future__ import annotations

import csv
import io
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import ridgeline
from ridgeline.cli.quantize_run import Job
from ridgeline.cli.tables import bytes_text
from ridgeline.core.arch import detect
from ridgeline.core.dtypes import dtype_name
from ridgeline.nn.overwrite import MODEL_CARD, QUANTIZE_CSV, QUANTIZE_HTML, QUANTIZE_REPORT
from ridgeline.quant.block import HEAD
from ridgeline.quant.report import ModuleReport, QuantizedModel
from ridgeline.report.figures import Bar, bar_panels, lines
from ridgeline.report.html import render
from ridgeline.report.section import Figure, Report, Section, Table

_NAMED = 5
"""Worst modules that a gate names."""


def verdict(
    max_kl: float | None, max_ppl_increase: float | None, done: QuantizedModel
) -> list[str]:
    """One line for each gate that refuses the result, the worst modules named."""
    asked = max_kl is not None or max_ppl_increase is not None
    said = done.evaluation
    if said is None:
        return ["nothing was measured: no held-out text was left; give --held-out"] if asked else []
    failed = []
    if max_kl is not None and not said.kl <= max_kl:
        failed.append(f"KL must be at most {max_kl:g}, got {said.kl:.3g}")
    rise = said.ppl_after / said.ppl_before - 1.0
    if max_ppl_increase is not None and not rise <= max_ppl_increase:
        failed.append(
            f"perplexity must rise by at most {100 * max_ppl_increase:g} %, got {100 * rise:.1f} %"
        )
    names = ", ".join(f"{report.name} {_error(report):.3f}" for report in done.worst(_NAMED))
    return [f"{line}; worst modules by output error: {names}" for line in failed]


def _error(report: ModuleReport) -> float:
    return report.weight_error if report.relative_error is None else report.relative_error


def written_texts(
    job: Job, done: QuantizedModel, measured: dict[str, Any]
) -> tuple[tuple[str, str], ...]:
    """(file name, contents) of everything that goes beside the weights."""
    config = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(job.config).items()}
    summary = done.summary() | {
        "config": config,
        "calibration": None if job.tokens is None else job.tokens.source,
        "predicted": asdict(job.prediction),
        "measured": measured,
        "decode_speedup": decode_speedup(job, done),
        "gates": verdict(job.config.max_kl, job.config.max_ppl_increase, done),
        "versions": {"ridgeline": ridgeline.__version__, "torch": torch.__version__},
    }
    return (
        (QUANTIZE_REPORT, json.dumps(summary, indent=1)),
        (QUANTIZE_CSV, csv_text(done)),
        (QUANTIZE_HTML, render(page(job, done, measured))),
        (MODEL_CARD, card(job, done)),
    )


def calibration_text(job: Job, done: QuantizedModel) -> str:
    """What the run was calibrated on."""
    if job.tokens is None or done.calibration_tokens == 0:
        return "not calibrated"
    return (
        f"calibrated on {done.calibration_tokens:,} tokens of {job.tokens.source}, "
        f"seed {job.config.seed}"
    )


def csv_text(done: QuantizedModel) -> str:
    """One row a module."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*asdict(done.reports[0])] if done.reports else ["name"])
    writer.writeheader()
    writer.writerows(asdict(report) for report in done.reports)
    return text.getvalue()


def decode_speedup(job: Job, done: QuantizedModel) -> float:
    """Of a decode step bound by the bytes of weights it reads, against 16 bits: every linear and
    the head once."""
    head = 2 * job.model.config.vocab_size * job.model.config.hidden_size
    if any(report.name == HEAD for report in done.reports):
        head = 0  # among the reports
    wide = sum(2 * report.n * report.k for report in done.reports)
    return (wide + head) / (sum(report.bytes for report in done.reports) + head)


# ---- the page --------------------------------------------------------------------------------


def page(job: Job, done: QuantizedModel, measured: dict[str, Any]) -> Report:
    """The whole report."""
    config = job.config
    sections = [_outcome(job, done, measured)]
    if any(report.relative_error is not None for report in done.reports):
        sections.append(_layers(done))
    if any(block.held_out_error is not None for block in done.blocks):
        sections.append(_blocks(done))
    if done.folds:
        sections.append(_folds(done))
    sections.append(_modules(done))
    group = config.group_size
    return Report(
        title=f"{config.model.name}, {config.method} at {config.bits} bits",
        lead=(
            f"Groups of {group}, {'symmetric' if config.symmetric else 'asymmetric'}, written as "
            f"{config.format}; {calibration_text(job, done)}."
        ),
        sections=tuple(sections),
        machine=(
            ("device", detect(job.device.type).device),
            ("dtype of the run", dtype_name(job.model.dtype)),
            ("versions", f"ridgeline {ridgeline.__version__}, torch {torch.__version__}, "
             f"Python {platform.python_version()}"),
            ("finished", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ),
    )  # fmt: skip


def _outcome(job: Job, done: QuantizedModel, measured: dict[str, Any]) -> Section:
    size, guess = measured["size"], job.prediction
    facts = [
        ("weights", bytes_text(size["total_bytes"])),
        ("at 16 bits", bytes_text(size["unquantized_bytes"])),
        ("decode speed-up by bytes", f"{decode_speedup(job, done):.2f} x"),
        ("seconds, all blocks", f"{sum(block.seconds for block in done.blocks):.0f}"),
    ]
    figures: tuple[Figure, ...] = ()
    if said := done.evaluation:
        facts = [
            ("perplexity before", _perplexity(said.ppl_before)),
            ("perplexity after", _perplexity(said.ppl_after)),
            ("KL, nats a token", f"{said.kl:.3g}"),
            ("same first choice", f"{100 * said.top1_agreement:.1f} %"),
            *facts,
        ]
        pairs = (("16 bits", said.ppl_before), (f"{job.config.bits} bits", said.ppl_after))
        wide, packed = size["unquantized_bytes"] / 1e6, size["total_bytes"] / 1e6
        bytes_ = (("16 bits", wide), (f"{job.config.bits} bits", packed))
        panels = [
            ("perplexity", [Bar(name=n, value=v, text=_perplexity(v)) for n, v in pairs]),
            ("weights, MB", [Bar(name=n, value=v, text=f"{v:,.3g}") for n, v in bytes_]),
        ]
        caption = f"Held-out text, {said.tokens:,} tokens in windows of {said.window}."
        figures = (Figure(svg=bar_panels(panels), caption=caption),)
    gates = verdict(job.config.max_kl, job.config.max_ppl_increase, done)
    plan = Table(
        header=("", "predicted", "measured"),
        rows=(
            ("peak memory", bytes_text(guess.device_bytes), bytes_text(measured["peak_bytes"])),
            (
                "seconds",
                f"{guess.seconds:.0f}",
                f"{sum(block.seconds for block in done.blocks):.0f}",
            ),
            ("folder", bytes_text(guess.out_bytes), bytes_text(size["total_bytes"])),
        ),
        caption="What the run was predicted to take, and what it took",
    )
    return Section(
        title="Outcome",
        paragraphs=tuple(f"Gate not passed: {line}." for line in gates),
        facts=tuple(facts),
        figures=figures,
        tables=(plan,),
    )


def _perplexity(value: float) -> str:
    """Five digits are enough of any."""
    return f"{value:.3f}" if value < 1000 else f"{value:.4g}"


def _common_prefix(names: Sequence[str]) -> str:
    """What all module names begin with, up to a dot ("model.layers.")."""
    parts = [name.split(".")[:-1] for name in names]
    same = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1 or column[0].isdigit():
            break
        same.append(column[0])
    return ".".join([*same, ""]) if same else ""


def _layers(done: QuantizedModel) -> Section:
    kinds: dict[str, tuple[list[int], list[float]]] = {}
    for report in done.reports:
        if report.relative_error is not None:
            places, values = kinds.setdefault(report.name.rpartition(".")[2], ([], []))
            places.append(_block_of(report.name))
            values.append(report.relative_error)
    drawing = lines(
        [(name, *points) for name, points in kinds.items()],
        x="block",
        y="relative output error",
        log=True,
    )
    caption = (
        "Norm of each layer's output error on the calibration tokens over the norm of its output; "
        "inputs come through the quantized layers before it."
    )
    return Section(title="Layers", figures=(Figure(svg=drawing, caption=caption),))


def _blocks(done: QuantizedModel) -> Section:
    known = [(_block_of(b.name), b.held_out_error) for b in done.blocks if b.held_out_error]
    drawing = lines(
        [("error", [place for place, _ in known], [error for _, error in known])],
        x="block",
        y="relative error at the output",
    )
    caption = (
        "Distance of each block's output from the unquantized model's on held-out text, every "
        "block up to it quantized, over the norm of the latter."
    )
    return Section(title="Blocks", figures=(Figure(svg=drawing, caption=caption),))


def _folds(done: QuantizedModel) -> Section:
    accepted = sum(fold.accepted for fold in done.folds)
    prefix = _common_prefix([fold.producer for fold in done.folds])
    rows = [
        (
            fold.producer.removeprefix(prefix),
            ", ".join(name.rpartition(".")[2] for name in fold.consumers),
            "folded" if fold.accepted else f"not: {fold.reason}",
            "" if fold.ratio is None else f"{fold.ratio:.2f}{' / w' if fold.over_weights else ''}",
            "" if fold.error_plain is None else f"{fold.error_plain:.4f}",
            "" if fold.error_scaled is None else f"{fold.error_scaled:.4f}",
        )
        for fold in done.folds
    ]
    table = Table(
        header=("producer", "consumers", "decision", "exponent", "plain", "scaled"),
        rows=tuple(rows),
        caption=(
            f"Relative error of the parent's output on tokens that the scale was not chosen on; "
            f"producers by their name in {prefix.rstrip('.') or 'the model'}"
        ),
    )
    text = f"Scales were folded at {accepted} of {len(rows)} places: where that lowers the error."
    return Section(title="Folds", paragraphs=(text,), tables=(table,))


def _modules(done: QuantizedModel) -> Section:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    def damping(report: ModuleReport) -> str:
        raised = f" ({report.damping_raises} raises)" if report.damping_raises else ""
        return number(report.damping, "g") + raised

    ranked: Sequence[ModuleReport] = sorted(done.reports, key=lambda report: -_error(report))
    prefix = _common_prefix([report.name for report in ranked if report.name != HEAD])
    rows = [
        (
            report.name.removeprefix(prefix),
            f"{report.n} x {report.k}",
            str(report.bits),
            number(report.relative_error, ".4f"),
            number(report.weight_error, ".4f"),
            number(report.loss, ".3g"),
            damping(report),
            str(report.dead_columns),
            f"{report.seconds:.2f}",
        )
        for report in ranked
    ]
    header = (
        "module", "out x in", "bits", "output error", "weight error", "loss", "damping",
        "dead inputs", "s",
    )  # fmt: skip
    caption = (
        f"Every module, the worst first, by its name in {prefix.rstrip('.') or 'the model'}; "
        "errors are relative"
    )
    table = Table(header=header, rows=tuple(rows), caption=caption)
    skipped = (f"Left as they were: {', '.join(done.skipped)}.",) if done.skipped else ()
    return Section(title="Modules", paragraphs=skipped, tables=(table,))


def _block_of(name: str) -> int:
    return next((int(part) for part in name.split(".") if part.isdigit()), 0)


# ---- model card ------------------------------------------------------------------------------


def card(job: Job, done: QuantizedModel) -> str:
    """README.md of the folder."""
    config = job.config
    form = "symmetric" if config.symmetric else "asymmetric"
    lines_ = [
        "---",
        "tags: [quantized, ridgeline]",
        f"quantization: {config.format}",
        "---",
        "",
        f"# {config.model.name}, {config.bits}-bit {config.method}",
        "",
        f"Quantized with ridgeline {ridgeline.__version__}: {config.method}, {config.bits} bits, "
        f"groups of {config.group_size}, {form}, stored as {config.format}.",
        "",
        "| | |",
        "| --- | --- |",
        f"| data | {calibration_text(job, done)} |",
        f"| column order | {job.recipe.gptq.order if job.recipe.solver == 'gptq' else '-'} |",
        f"| layers | {len(done.reports)} quantized, {len(done.skipped)} left as they were |",
    ]
    if said := done.evaluation:
        lines_ += [
            f"| perplexity on held-out text | {said.ppl_before:.3f} -> {said.ppl_after:.3f} |",
            f"| KL divergence | {said.kl:.3g} nats a token |",
            f"| same first choice | {100 * said.top1_agreement:.1f} % of {said.tokens:,} tokens |",
        ]
    lines_ += ["", f"Every layer's error: `{QUANTIZE_HTML}`, `{QUANTIZE_CSV}`.", ""]
    return "\n".join(lines_)
