"""Which format a checkpoint is in, by its config, and how a config states a checkpoint's layers.

The one place that knows every format's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline.core.errors import UserError
from ridgeline.formats import awq, awq_config, compressed_tensors_config, gptq_config
from ridgeline.formats.contract import Quantization, WeightFormat

READERS = {
    "gptq": gptq_config.read_config,
    "awq": awq_config.read_config,
    "compressed-tensors": compressed_tensors_config.read_config,
}
"""quant_method -> reader of its config entry."""
_DESCRIBERS = {
    "gptq": gptq_config.describe,
    "awq": awq_config.describe,
    "compressed-tensors": compressed_tensors_config.describe,
}
KEYS = ("quantization_config", "compression_config")
"""Where config.json holds the entry; the second in older compressed-tensors folders."""
SIDE_FILES = ("quantize_config.json", "quant_config.json")
"""Where older writers put the entry instead of config.json."""
MAX_SIDE_FILE_BYTES = 2**20


def detect(config: Mapping[str, Any], folder: Path | None = None) -> Quantization | None:
    """The quantization a checkpoint declares, or None for a plain one.

    config: the folder's config.json; `folder` is searched for a side file where config.json says
    nothing. Raises: UserError for a method that no reader knows, by its name, or a damaged entry.
    """
    entry, where = None, ""
    for key in KEYS:
        if entry is None:
            entry, where = config.get(key), f"config.json {key}"
    if entry is None and folder is not None:
        for name in SIDE_FILES:
            if (folder / name).is_file():
                entry, where = _read_side_file(folder / name), name
                break
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise UserError(
            f"checkpoint: {where} must be an object, got {type(entry).__name__}; restore the file"
        )
    method = _method(entry)
    if method not in READERS:
        raise UserError(
            f"checkpoint: quant_method must be one of {', '.join(READERS)}, got {method!r}; "
            "convert the checkpoint or take an unquantized one"
        )
    return READERS[method](entry, where)


def describe(
    layout: WeightFormat, layouts: Mapping[str, WeightFormat], skipped: Sequence[str] = ()
) -> Quantization:
    """What a config says of quantized layers of these forms, by full name, and of plain linears.

    layout: of most layers. Raises: ValueError for what the format's config cannot state.
    """
    return _DESCRIBERS[layout.method](layout, layouts, skipped)


def _method(entry: Mapping[str, Any]) -> str:
    """quant_method, or what an entry of a writer that left it out must be."""
    method = entry.get("quant_method")
    if method is not None:
        method = str(method).lower()
        return "compressed-tensors" if method == "sparseml" else method
    if "config_groups" in entry:
        return "compressed-tensors"
    version = str(entry.get("version", entry.get("format", ""))).lower()
    gptq_says = ("sym", "desc_act", "checkpoint_format")
    said = any(key in entry for key in gptq_says)
    return "awq" if version in awq.VERSIONS or ("zero_point" in entry and not said) else "gptq"


def _read_side_file(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_SIDE_FILE_BYTES:
            raise UserError(
                f"checkpoint: {path} must be at most {MAX_SIDE_FILE_BYTES} bytes, "
                f"got {path.stat().st_size}; it is no configuration file"
            )
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"checkpoint: could not read {path}: {error}; restore the file") from error
