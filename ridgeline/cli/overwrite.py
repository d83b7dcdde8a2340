"""What `--overwrite` may replace: a folder with nothing in it but what ridgeline writes itself.

A folder is replaced only where it is empty, or holds a config.json that names a model and otherwise
nothing but files (no folders) that a written model consists of. An `out` that is or contains the
source or the current folder is refused whatever it holds.
"""

from __future__ import annotations

import json
from pathlib import Path

from ridgeline.core.errors import UserError
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


def check_out(command: str, out: Path, source: Path, *, overwrite: bool) -> None:
    """Whether a model may be written to `out`, before any work is done.

    Raises: UserError for an `out` that exists without `overwrite`, or that may not be replaced.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise UserError(f"{command}: {out} exists; choose another or pass --overwrite")
    real = out.resolve()
    for name, kept in (("the source", source.resolve()), ("the current folder", Path.cwd())):
        if kept == real or real in kept.parents:
            raise UserError(
                f"{command}: out must not be or contain {name} {kept}, got {out}; choose another"
            )
    if reason := _foreign(out):
        raise UserError(
            f"{command}: out must be a model folder to be replaced, got {out}, {reason}; choose "
            "another or remove it yourself"
        )


def _foreign(out: Path) -> str | None:
    """Why `out` is no folder that ridgeline wrote; None: it is one, or empty."""
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
