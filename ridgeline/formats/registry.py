"""Which format a checkpoint is in, by its config; the one place that knows their names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.core.errors import UserError
from ridgeline.formats import gptq_config

READERS = {"gptq": gptq_config.read_config}
"""quant_method -> reader of its config entry."""
SIDE_FILES = ("quantize_config.json", "quant_config.json")
"""Where older writers put the entry instead of config.json."""


def detect(config: Mapping[str, Any], folder: Path | None = None) -> gptq_config.GPTQConfig | None:
    """The quantization a checkpoint declares, or None for a plain one.

    config: the folder's config.json; `folder` is searched for a side file where config.json says
    nothing. Raises: UserError for a method that no reader knows, by its name.
    """
    entry, where = config.get("quantization_config"), "config.json quantization_config"
    if entry is None and folder is not None:
        for name in SIDE_FILES:
            if (folder / name).is_file():
                entry, where = _read_side_file(folder / name), name
                break
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise UserError(f"checkpoint: {where} must be an object, got {type(entry).__name__}")
    method = str(entry.get("quant_method", "gptq")).lower()
    if method not in READERS:
        raise UserError(
            f"checkpoint: quant_method must be one of {', '.join(READERS)}, got {method!r}; "
            "convert the checkpoint or take an unquantized one"
        )
    return READERS[method](entry, where)


def _read_side_file(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint: could not read {path}: {error}; restore the file") from error
