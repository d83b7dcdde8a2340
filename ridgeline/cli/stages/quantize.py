"""4 bits with GPTQ: calibrated, written, read back, and held against plain rounding."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.cli.convert_work import folder_bytes
from ridgeline.cli.quantize import QuantizeConfig, quantize
from ridgeline.cli.quantize_work import recipe_of
from ridgeline.cli.stage import Context, Result, Stage, fingerprint, need
from ridgeline.cli.stages.perplexity import measure
from ridgeline.cli.tables import bytes_text
from ridgeline.core import progress
from ridgeline.core.files import atomic_write_text
from ridgeline.core.text import wiki_split
from ridgeline.engine.load import OpenModel, open_model
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.linear import quantized_linears
from ridgeline.report.figures import Bar, bar_panels
from ridgeline.report.section import Figure, Section, Table

GROUP, SEQUENCE_TOKENS = 64, 512
"""128 does not divide the model's widths, 576 and 1536."""


def run(context: Context) -> Result:
    """Quantize and measure perplexity, size and bytes a token, before and after.

    Each part's outcome is kept as it comes, and `quantize` keeps every finished block, so an
    interrupted run goes on where it was.
    """
    source, before = need(context, "weights"), need(context, "perplexity")
    config = _config(context, source["folder"])
    parts = _Parts(context)
    rounded = parts.have("rounded", lambda: _rounded_ppl(context, config))
    written = parts.have("quantized", lambda: _written(quantize(config)), needs=config.out)
    opened = open_model(config.out, context.dtype, context.device)
    after = parts.have("after", lambda: measure(opened, context, "perplexity of GPTQ").ppl)
    parts.drop()
    plain_bytes = source["bytes"]
    increase = {"rtn": rounded - before["ppl"], "gptq": after - before["ppl"]}
    return {
        "folder": str(config.out),
        "bits": config.bits,
        "group_size": config.group_size,
        "symmetric": config.symmetric,
        "act_order": config.act_order,
        "calibration_tokens": written["calibration_tokens"],
        "quantize_seconds": written["quantize_seconds"],
        "tokens": before["tokens"],
        "window": before["window"],
        "ppl_before": before["ppl"],
        "ppl_rtn": rounded,
        "ppl_gptq": after,
        "increase_over_rtn": increase["gptq"] / increase["rtn"],
        "bytes_before": plain_bytes,
        "bytes_after": folder_bytes(config.out),
        "bytes_per_token_before": _wide_bytes_per_token(opened),
        "bytes_per_token_after": _packed_bytes_per_token(opened),
    }


class _Parts:
    """Outcomes of the stage's parts until it is whole, in results/quantize.parts.json."""

    def __init__(self, context: Context) -> None:
        self.path = context.folder / "results" / "quantize.parts.json"
        self.fingerprint = fingerprint(STAGE, context)
        self.held: dict[str, Any] = {}
        if {"all", STAGE.name} & set(context.config.redo):
            self.drop()
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        if record.get("fingerprint") == self.fingerprint:
            self.held = record["parts"]

    def have(self, name: str, make: Callable[[], Any], needs: Path | None = None) -> Any:
        """The outcome of a part, made unless it is kept (and what it needs is still there)."""
        if name in self.held and (needs is None or needs.exists()):
            progress.say(f"      {name}: kept from before")
            return self.held[name]
        self.held[name] = make()
        record = {"fingerprint": self.fingerprint, "parts": self.held}
        atomic_write_text(self.path, json.dumps(record, indent=1))
        return self.held[name]

    def drop(self) -> None:
        """The stage is whole, or is to be done anew."""
        self.path.unlink(missing_ok=True)


def _written(result: Result) -> Result:
    """What is said of the run later."""
    return {name: result[name] for name in ("calibration_tokens", "quantize_seconds")}


def _config(context: Context, folder: str) -> QuantizeConfig:
    text = context.folder / "calibration.txt"
    atomic_write_text(text, wiki_split().calibration)
    return QuantizeConfig(
        model=Path(folder),
        out=context.folder / "smollm2-135m-gptq-w4g64",
        text=text,
        group_size=GROUP,
        sequences=context.config.calibration_sequences,
        sequence_tokens=SEQUENCE_TOKENS,
        held_out_windows=0,  # perplexity is measured below, on the test part
        overwrite=True,
        device="cuda" if context.device == "cuda" else "cpu",
    )


def _rounded_ppl(context: Context, config: QuantizeConfig) -> float:
    """Perplexity after plain rounding on the same grid, for comparison; not written."""
    opened = open_model(config.model, context.dtype, context.device)
    quantize_model(opened.model, None, recipe_of(replace(config, method="rtn")))
    return measure(opened, context, "perplexity of RTN").ppl


def _wide_bytes_per_token(opened: OpenModel) -> int:
    """Weights of a decode step at 16 bits: every matmul's, the head included, and the norms'."""
    config = opened.model.config
    norms = sum(p.numel() for n, p in opened.model.named_parameters() if n.endswith("norm.weight"))
    return 2 * (config.matmul_params() + norms)


def _packed_bytes_per_token(opened: OpenModel) -> int:
    """The same with the quantized linears as they are packed, the rest at 16 bits."""
    linears = [linear for _, linear in quantized_linears(opened.model)]
    wide = sum(2 * linear.in_features * linear.out_features for linear in linears)
    return _wide_bytes_per_token(opened) - wide + sum(each.weight_bytes() for each in linears)


def say(result: Result) -> str:
    """The three perplexities and the sizes."""
    return (
        f"perplexity {result['ppl_before']:.3f} -> {result['ppl_gptq']:.3f} (plain rounding: "
        f"{result['ppl_rtn']:.3f}; GPTQ keeps {100 * result['increase_over_rtn']:.0f} % of its "
        f"increase), {bytes_text(result['bytes_before'])} -> {bytes_text(result['bytes_after'])}"
    )


def section(result: Result, context: Context) -> Section:
    """Before and after, with plain rounding beside."""
    names = ("16-bit weights", "4-bit, rounded (RTN)", "4-bit, GPTQ")
    ppls = (result["ppl_before"], result["ppl_rtn"], result["ppl_gptq"])
    sizes = (result["bytes_before"], result["bytes_after"], result["bytes_after"])
    per_token = (
        result["bytes_per_token_before"],
        result["bytes_per_token_after"],
        result["bytes_per_token_after"],
    )
    drawing = bar_panels(
        [
            (
                "perplexity",
                [Bar(name=n, value=v, text=f"{v:.2f}") for n, v in zip(names, ppls, strict=True)],
            ),
            (
                "weights on disk, MB",
                [
                    Bar(name=n, value=v / 1e6, text=f"{v / 1e6:.0f}")
                    for n, v in zip(names, sizes, strict=True)
                ],
            ),
        ]
    )
    kind = "symmetric" if result["symmetric"] else "asymmetric"
    return Section(
        title="4 bits, before and after",
        paragraphs=(
            f"GPTQ, {result['bits']} bits, {kind}, groups of {result['group_size']}, columns by "
            f"descending activation with static groups, calibrated on "
            f"{result['calibration_tokens']:,} tokens of the calibration part in "
            f"{result['quantize_seconds']:.0f} s. The checkpoint was written, read back, and "
            f"scored on the same {result['tokens']:,} test tokens in windows of "
            f"{result['window']:,}. It keeps "
            f"{100 * result['increase_over_rtn']:.0f} % of plain rounding's increase.",
        ),
        figures=(
            Figure(
                svg=drawing,
                caption="Perplexity (lower is better) and size of the safetensors; plain rounding "
                "has the same size. Embedding and head stay at 16 bits.",
            ),
        ),
        tables=(
            Table(
                header=("weights", "perplexity", "increase", "file", "read a token"),
                rows=tuple(
                    (
                        name,
                        f"{ppl:.3f}",
                        f"{ppl - ppls[0]:+.3f}",
                        bytes_text(size),
                        bytes_text(each),
                    )
                    for name, ppl, size, each in zip(names, ppls, sizes, per_token, strict=True)
                ),
            ),
        ),
    )


STAGE = Stage(
    name="quantize",
    order=40,
    title="4 bits with GPTQ",
    run=run,
    section=section,
    say=say,
    depends=("weights", "perplexity", "windows", "calibration_sequences"),
    outputs=lambda result: (result["folder"],),
)
