"""`ridgeline quantize`: a Hugging Face folder in, a folder in 4 bits (or 2, 3, 8) out.

This module imports no torch: arguments that make no sense and files that are not there are refused
in a fraction of a second (quantize_checks.py); the work is in quantize_work.py.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.cli.command import Command, Result
from ridgeline.cli.quantize_checks import check_request, journal_folder
from ridgeline.cli.tables import bytes_text, table
from ridgeline.core.dtypes import Device, RunDtype
from ridgeline.core.errors import bad_value
from ridgeline.quant.options import AWQOptions, GPTQOptions, Override, parse_override

GATE_FAILED = 3
"""Exit code of a run whose result a gate refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """Quantize a Hugging Face folder with GPTQ, AWQ or plain rounding."""

    model: Path
    """A Hugging Face folder with plain weights."""
    out: Path
    """The folder to write; it appears whole or not at all. Finished blocks are kept beside it, so
    that a run that was stopped goes on."""
    text: Path | None = None
    """Calibration text (UTF-8), or JSON lines (.jsonl) of documents or chats; the built-in set
    (Wikipedia leads, fetched once) unless given."""
    json_field: str = "text"
    """Of a line's text in JSON lines without chat messages."""
    method: Literal["gptq", "awq", "awq+gptq", "rtn"] = "gptq"
    """gptq; awq: scales folded by measured error, then rounded; awq+gptq: folded, then gptq; rtn:
    round to nearest, no calibration."""
    bits: Literal[2, 3, 4, 8] = 4
    """Of a weight."""
    format: Literal["gptq", "awq", "compressed-tensors"] = "gptq"
    """What to write it as; awq has 4 bits and no act-order by activation."""
    group_size: int = 128
    """Inputs that share a scale; must divide what the kernels need (64 for widths like 576)."""
    symmetry: Literal["auto", "symmetric", "asymmetric"] = "auto"
    """symmetric: no zero points; auto: asymmetric for awq and awq+gptq, else symmetric."""
    act_order: Literal["static", "natural", "activation"] = "static"
    """Columns by descending activation with groups as stored (static, free at run time), as they
    are stored (natural), or with groups along that order (activation: a g_idx table)."""
    damp: float = 0.02
    """Added to the Hessian's diagonal as a fraction of its mean, in (0, 1]."""
    clip: bool = True
    """Search each group's range instead of taking its extremes."""
    sequences: int = 32
    """Calibration sequences, at least 1."""
    sequence_tokens: int = 512
    """Tokens of a calibration sequence, from 2 to the model's context."""
    batch_sequences: int = 8
    """Sequences of one forward; bounds memory."""
    seed: int = 0
    """Of the choice of calibration sequences."""
    skip: tuple[str, ...] = ()
    """Regular expressions; linears whose full name matches one stay as they are."""
    override: tuple[str, ...] = ()
    """Exceptions, PATTERN=bits:8,group:32 or PATTERN=skip; the first that matches counts."""
    lm_head: bool = False
    """Quantize the vocabulary projection too; a tied one gets a weight of its own."""
    target_bits: float | None = None
    """Choose each layer's width by its measured error, with at most so many stored bits a weight
    in the mean, scales and zero points included; gptq and compressed-tensors only."""
    widths: tuple[Literal[2, 3, 4, 8], ...] = (3, 4, 8)
    """That target-bits chooses from."""
    held_out: Path | None = None
    """Text to compare the two models on; unless given, what calibration left of its own."""
    held_out_windows: int = 4
    """Windows of sequence-tokens tokens for the comparison; 0: none."""
    max_kl: float | None = None
    """Gate: exit with 3 when KL(unquantized || quantized) on the held-out text is above, nats."""
    max_ppl_increase: float | None = None
    """Gate: exit with 3 when perplexity rises by a larger fraction (0.05: five percent)."""
    max_shard_gb: float = 5.0
    """Largest safetensors file, GB (1e9 bytes), above 0."""
    dry_run: bool = False
    """Predict peak memory, time and disk; write nothing."""
    overwrite: bool = False
    """Replace `out` where it is a model folder with nothing else in it."""
    dtype: RunDtype = "auto"
    """Of weights and activations while it runs; auto: bfloat16 on a GPU, float32 on a CPU."""
    device: Device = "auto"
    """auto: the GPU where there is one."""

    def __post_init__(self) -> None:
        self.gptq_options()
        self.overrides()
        if self.group_size < 1:
            raise bad_value("quantize", "group_size", "be at least 1", self.group_size, "e.g. 64")
        least = {
            "held_out_windows": 0, "batch_sequences": 1, "sequences": 1, "sequence_tokens": 2
        }  # fmt: skip
        for name, low in least.items():
            if getattr(self, name) < low:
                raise bad_value(
                    "quantize", name, f"be at least {low}", getattr(self, name), "e.g. 4"
                )
        if self.format == "awq" and self.bits != 4:
            raise bad_value("quantize", "bits", "be 4 in awq", self.bits, "choose another format")
        if self.format == "awq" and self.solves and self.act_order == "activation":
            raise bad_value(
                "quantize", "act_order", "be static or natural in awq", "activation",
                "use static, or another format",
            )  # fmt: skip
        if self.target_bits is not None and (
            self.format == "awq" or self.method == "rtn" or not self.widths
        ):
            raise bad_value(
                "quantize", "target_bits", "come with calibration, widths, and gptq or "
                "compressed-tensors", f"{self.method}, {self.widths}, {self.format}",
                "awq files hold one width",
            )  # fmt: skip
        if self.max_shard_gb <= 0:
            raise bad_value("quantize", "max_shard_gb", "be above 0", self.max_shard_gb, "e.g. 5")
        gates = {"max_kl": self.max_kl, "max_ppl_increase": self.max_ppl_increase}
        for name, value in gates.items():
            if value is not None and (value < 0 or self.held_out_windows == 0):
                got = "no held-out windows" if value >= 0 else value
                raise bad_value(
                    "quantize", name, "be 0 or more, with held-out text", got, "e.g. 0.1"
                )

    def gptq_options(self) -> GPTQOptions:
        """How gptq solves a layer. Raises: ValueError for values out of range."""
        return GPTQOptions(
            order=self.act_order if self.solves else "static",
            damping=self.damp,
            clip_search=self.clip,
        )

    def awq_options(self) -> AWQOptions:
        """How awq searches."""
        return AWQOptions(clip=self.clip)

    def overrides(self) -> tuple[Override, ...]:
        """Exceptions in their order. Raises: ValueError for one that cannot be read."""
        return (
            *(Override(pattern=pattern, skip=True) for pattern in self.skip),
            *(parse_override(text) for text in self.override),
        )

    @property
    def solves(self) -> bool:
        """Whether codes are found by gptq."""
        return self.method in ("gptq", "awq+gptq")

    @property
    def symmetric(self) -> bool:
        """What `symmetry` comes to."""
        if self.symmetry == "auto":
            return not self.method.startswith("awq")
        return self.symmetry == "symmetric"


def quantize(config: QuantizeConfig) -> Result:
    """Quantize every linear of every block and write the folder, all or nothing.

    Raises: UserError for a model or text that cannot be used, text too short, an `out` that exists,
    a disk that refuses; ValueError for widths that the group size does not fit.
    """
    check_request(config)
    return importlib.import_module("ridgeline.cli.quantize_work").run(config)


def show(result: Result) -> str:
    """Sizes, what the comparison says, and the worst layers."""
    if result["dry_run"]:
        return ""
    rows = [
        (worst["name"], f"{worst['relative_error']:.4f}")
        for worst in result["worst"]
        if worst["relative_error"] is not None
    ]
    lines = [
        f"{result['out']}: {result['layers']} layers in {result['bits']} bits, group "
        f"{result['group_size']}, {bytes_text(result['bytes'])} (16-bit: "
        f"{bytes_text(result['bytes_16bit'])}), {result['quantize_seconds']:.0f} s"
    ]
    if said := result["evaluation"]:
        lines.append(
            f"held-out text: perplexity {said['ppl_before']:.3f} -> {said['ppl_after']:.3f}, KL "
            f"{said['kl']:.3g}, same first choice {100 * said['top1_agreement']:.1f} % of "
            f"{said['tokens']:,} tokens"
        )
    if result["folds"][1]:
        lines.append(f"scales folded at {result['folds'][0]} of {result['folds'][1]} places")
    if rows:
        lines += ["", table(("worst layers", "relative output error"), rows)]
    lines += [f"gate: {line}" for line in result["gates"]]
    return "\n".join(lines)


def kept(config: QuantizeConfig) -> str:
    """After Ctrl-C or SIGTERM."""
    folder = journal_folder(config.out)
    finished = len(list(folder.glob("done-*")))
    if not finished:
        return f"{config.out} is as it was before"
    blocks = "1 finished block is" if finished == 1 else f"{finished} finished blocks are"
    return (
        f"{config.out} is as it was before; {blocks} kept in {folder}, the same command goes on "
        "from there"
    )


def exit_code(result: Result) -> int:
    """3 where a gate refuses the result."""
    return GATE_FAILED if result.get("gates") else 0


COMMAND = Command(
    run=quantize, config=QuantizeConfig, show=show, kept=kept, code=exit_code, tells_sigterm=True,
    flags={"damping": "--damp", "override.pattern": "a pattern of --skip or --override"},
)  # fmt: skip
