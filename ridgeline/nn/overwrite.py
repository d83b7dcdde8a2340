"""Which folders may be replaced by a written model: those that hold nothing else.

A folder may be replaced where it is empty, or holds a config.json that names a model and otherwise
nothing but files (no folders) that a written model consists of.
"""

from __future__ import annotations

import json
from pathlib import Path

from ridgeline.nn.hf import GENERATION_CONFIG, TOKENIZER_FILES
from ridgeline.nn.tensorfile import INDEX

QUANTIZE_REPORT = "quantize_report.json"
QUANTIZE_CSV = "quantize_report.csv"
QUANTIZE_HTML = "quantize_report.html"
MODEL_CARD = "README.md"
_WRITTEN = frozenset(
    {
        *TOKENIZER_FILES,
        GENERATION_CONFIG,
        INDEX,
        QUANTIZE_REPORT,
        QUANTIZE_CSV,
        QUANTIZE_HTML,
        MODEL_CARD,
        "config.json",
        "quantize_config.json",
        "quant_config.json",
    }
)


def why_foreign(out: Path) -> str | None:
    """Why `out` is no folder that ridgeline wrote; None: it is one, or empty, or not there."""
    if not out.exists() and not out.is_symlink():
        return None
    if out.is_symlink() or not out.is_dir():
        return "which is no folder"
    entries = sorted(out.iterdir())
    if not entries:
        return None
    for entry in entries:
        known = entry.name in _WRITTEN or entry.name.endswith(".safetensors")
        if not known or entry.is_symlink() or not entry.is_file():
            return f"which holds {entry.name}"
    try:
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "which has no readable config.json"
    if not isinstance(config, dict) or "model_type" not in config:
        return "whose config.json names no model"
    return None
