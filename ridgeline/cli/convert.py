"""`ridgeline convert`: a GGUF file, a Hugging Face folder or a checkpoint of any layout in, a
Hugging Face folder out; plain weights in another dtype, quantized ones in another format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ridgeline.cli.command import Command, Result
from ridgeline.cli.overwrite import check_out
from ridgeline.cli.tables import bytes_text
from ridgeline.core.dtypes import dtype_name, torch_dtype
from ridgeline.core.errors import UserError, bad_value
from ridgeline.engine.load import is_quantized
from ridgeline.nn import gguf
from ridgeline.nn.hf import (
    GENERATION_CONFIG,
    TOKENIZER_FILES,
    load_config,
    load_pretrained,
    save_pretrained,
)
from ridgeline.quant.checkpoint import (
    Extras,
    convert_checkpoint,
    load_quantized,
    write_checkpoint,
)
from ridgeline.train.export import export_checkpoint, is_checkpoint


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
    if not config.source.exists():
        raise UserError(f"convert: source must exist, got {config.source}; check the path")
    check_out("convert", config.out, config.source, overwrite=config.overwrite)
    if config.format != "keep":
        return _requantized(config)
    if is_checkpoint(config.source):
        read, written = export_checkpoint(
            config.source,
            config.out,
            dtype=None if config.dtype == "keep" else config.dtype,
            max_shard_bytes=int(config.max_shard_gb * 1e9),
            overwrite=config.overwrite,
        )
        return _facts(read, config.out, written)
    if config.source.is_dir():
        if is_quantized(config.source):
            raise UserError(
                f"convert: {config.source} must hold plain weights with format keep, got quantized "
                "ones; name the format to write, for example --format gptq"
            )
        dtype = None if config.dtype == "keep" else torch_dtype(config.dtype)
        model = load_pretrained(config.source, dtype=dtype)
        save_pretrained(
            model,
            config.out,
            tokenizer_from=config.source,
            max_shard_bytes=int(config.max_shard_gb * 1e9),
            overwrite=config.overwrite,
        )
        written = dtype_name(next(model.parameters()).dtype)
    else:
        written = "float16" if config.dtype == "keep" else config.dtype
        gguf.convert(
            config.source, config.out, dtype=torch_dtype(written), overwrite=config.overwrite
        )
    return _facts(config.source, config.out, written)


def _facts(source: Path, out: Path, dtype: str) -> Result:
    shape = load_config(out)
    return {
        "source": str(source),
        "out": str(out),
        "family": shape.family,
        "parameters": shape.num_params(),
        "dtype": dtype,
        "bytes": folder_bytes(out),
    }


def _requantized(config: ConvertConfig) -> Result:
    """Quantized folder in, quantized folder in another format out."""
    if not config.source.is_dir() or not is_quantized(config.source):
        raise UserError(
            f"convert: {config.source} must hold quantized weights with format {config.format}, "
            f"got plain ones; use ridgeline quantize --format {config.format}"
        )
    source = load_quantized(config.source)
    before = source.quantization.layout
    converted = convert_checkpoint(source, config.format, lossy=config.lossy)
    names = (*TOKENIZER_FILES, GENERATION_CONFIG)
    write_checkpoint(
        config.out,
        converted,
        extras=Extras(
            files=tuple(config.source / n for n in names if (config.source / n).is_file()),
            max_shard_bytes=int(config.max_shard_gb * 1e9),
        ),
        overwrite=config.overwrite,
    )
    dtype = f"{config.format} {before.bits}-bit, from {before.method}"
    return _facts(config.source, config.out, dtype) | {"layers": len(converted.packed)}


def folder_bytes(folder: Path) -> int:
    """Bytes of a folder's safetensors."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def show(result: Result) -> str:
    """What was written."""
    return (
        f"{result['out']}: {result['family']}, {result['parameters'] / 1e6:.1f} M parameters in "
        f"{result['dtype']}, {bytes_text(result['bytes'])} of weights"
    )


def kept(config: ConvertConfig) -> str:
    """After Ctrl-C."""
    return f"{config.out} is as it was before"


COMMAND = Command(run=convert, config=ConvertConfig, show=show, kept=kept)
