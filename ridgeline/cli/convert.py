"""`ridgeline convert`: a GGUF file, a Hugging Face folder or a checkpoint of any layout in, a
Hugging Face folder out; plain weights in another dtype, quantized ones in another format.

This module imports no torch: what is not there is refused in a fraction of a second; the work is in
convert_work.py.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.cli.command import Command, Result
from ridgeline.cli.overwrite import check_out
from ridgeline.cli.tables import bytes_text
from ridgeline.core.errors import UserError, bad_value
from ridgeline.train.config import is_checkpoint

GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig:
    """Write a GGUF file, a Hugging Face folder or a checkpoint as a Hugging Face folder."""

    source: Path
    """A .gguf file, a folder with config.json and safetensors, or a checkpoint of `ridgeline train`
    (or its run folder: the newest good one)."""
    out: Path
    """The folder to write; it appears whole or not at all."""
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Of the weights; keep: the folder's own, a training run's, float16 for a GGUF file."""
    format: Literal["keep", "gptq", "awq", "compressed-tensors"] = "keep"
    """Of quantized weights: gptq, awq or compressed-tensors, code for code; keep: plain weights."""
    lossy: bool = False
    """Round where the format cannot hold the quantized weights as they are (act-order in awq, for
    example) instead of refusing."""
    max_shard_gb: float = 5.0
    """Largest safetensors file, GB (1e9 bytes), above 0; not for a GGUF file, whose model is
    written with the default."""
    overwrite: bool = False
    """Replace `out` where it is a model folder with nothing else in it."""

    def __post_init__(self) -> None:
        if self.max_shard_gb <= 0:
            raise bad_value("convert", "max_shard_gb", "be above 0", self.max_shard_gb, "e.g. 5")
        if self.format != "keep" and self.dtype != "keep":
            raise bad_value(
                "convert", "dtype", "be keep with a format", self.dtype, "codes have no dtype"
            )
        if self.format == "keep" and self.lossy:
            raise bad_value(
                "convert", "lossy", "come with a format", "format keep", "name the format"
            )


def convert(config: ConvertConfig) -> Result:
    """Write `source` as a Hugging Face folder, all or nothing.

    Raises: UserError for a source that cannot be read or that the format cannot hold, an `out` that
    exists, a disk that refuses.
    """
    check_source(config)
    check_out("convert", config.out, config.source, overwrite=config.overwrite)
    return importlib.import_module("ridgeline.cli.convert_work").run(config)


def check_source(config: ConvertConfig) -> None:
    """Whether the source looks like something that can be converted. Raises: UserError."""
    source = config.source
    if not source.exists():
        raise UserError(f"convert: source must exist, got {source}; check the path")
    if source.is_dir():
        if not ((source / "config.json").is_file() or is_checkpoint(source)):
            raise UserError(
                f"convert: source {source} must be a model folder with a config.json, a checkpoint "
                "or a run folder, got another folder; check the path"
            )
        return
    with open(source, "rb") as file:
        if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise UserError(
                f"convert: source {source} must be a GGUF file or a folder, got another file; "
                "check the path"
            )
    if config.format != "keep":
        raise UserError(
            f"convert: source {source} must hold quantized weights with format {config.format}, "
            f"got a GGUF file; convert it, then use ridgeline quantize --format {config.format}"
        )


def show(result: Result) -> str:
    """What was written."""
    return (
        f"{result['out']}: {result['family']}, {result['parameters'] / 1e6:.1f} M parameters in "
        f"{result['dtype']}, {bytes_text(result['bytes'])} of weights"
    )


def kept(config: ConvertConfig) -> str:
    """After Ctrl-C."""
    return f"{config.out} is as it was before"


COMMAND = Command(run=convert, config=ConvertConfig, show=show, kept=kept, tells_sigterm=True)
