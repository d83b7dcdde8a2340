"""What `ridgeline convert` does once its arguments have passed."""

from __future__ import annotations

from pathlib import Path

from ridgeline.cli.command import Result
from ridgeline.cli.convert import ConvertConfig
from ridgeline.core.dtypes import dtype_name, torch_dtype
from ridgeline.core.errors import UserError
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
from ridgeline.train.config import is_checkpoint
from ridgeline.train.export import export_checkpoint


def run(config: ConvertConfig) -> Result:
    """`ridgeline.cli.convert.convert` after its checks."""
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
                f"convert: source {config.source} must hold plain weights with format keep, got "
                "quantized ones; name the format to write, for example --format gptq"
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
            f"convert: source {config.source} must hold quantized weights with format "
            f"{config.format}, got plain ones; use ridgeline quantize --format {config.format}"
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
