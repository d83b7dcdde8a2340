"""Refusals of `ridgeline quantize` that need nothing but the file system: no torch is imported.

What can only be seen with the tensors at hand is refused later (quantize_run.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.core.errors import UserError, bad_value, common

if TYPE_CHECKING:
    from ridgeline.cli.quantize import QuantizeConfig

MODEL_FILES = "*.safetensors"


def journal_folder(out: Path) -> Path:
    """Where a run to `out` keeps finished blocks."""
    return out.absolute().parent / f"{out.name}.quantize"


def check_request(config: QuantizeConfig) -> None:
    """Whether the files are there and the sizes can fit.

    Raises: UserError for a model or text that is not there, an `out` that exists; ValueError for a
    group size that does not divide the model's widths.
    """
    try:
        if not (config.dry_run or config.overwrite) and _there(config.out):
            raise UserError(f"quantize: {config.out} exists; choose another or pass --overwrite")
        _check_model(config.model)
        for name in ("text", "held_out"):
            path = getattr(config, name)
            if path is not None and not path.is_file():
                got = "a folder" if path.is_dir() else "none"
                raise UserError(
                    f"quantize: {name} {path} must be a file, got {got}; check the path"
                )
        if not (config.skip or config.override):  # an exception may be what makes it fit
            _check_widths(read_config(config.model), config.group_size)
    except (UserError, ValueError) as error:
        raise common(error) from error.__cause__  # every rank sees the same files


def _there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _check_model(folder: Path) -> None:
    if not folder.is_dir():
        got = "a file" if folder.is_file() else "none"
        raise UserError(f"quantize: model {folder} must be a folder, got {got}; check the path")
    refuse_quantized(folder, read_config(folder))
    if not any(folder.glob(MODEL_FILES)):
        raise UserError(
            f"quantize: model {folder} must hold {MODEL_FILES}, got none; fetch the weights, or "
            "convert them (ridgeline convert)"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises: UserError for a missing or malformed file."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"quantize: model {folder} must hold config.json, got none; check the path"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"quantize: {path} must be readable JSON, got {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"quantize: {path} must hold an object, got {type(found).__name__}")
    return found


def refuse_quantized(folder: Path, config: dict[str, Any]) -> None:
    """Refuse a source whose weights are packed already. Raises: UserError."""
    entry = config.get("quantization_config")
    if entry:
        method = entry.get("quant_method", "unknown") if isinstance(entry, dict) else "unknown"
        raise UserError(
            f"quantize: model {folder} must hold plain weights, got {method} weights; quantize "
            "the model it was made from"
        )


def _check_widths(config: dict[str, Any], group_size: int) -> None:
    """The inputs of a decoder's linears as config.json tells them; what it leaves open is left to
    the tensors."""
    heads, head_dim = config.get("num_attention_heads"), config.get("head_dim")
    hidden = config.get("hidden_size")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    attended = heads * head_dim if isinstance(heads, int) and isinstance(head_dim, int) else None
    widths = {
        "self_attn.q_proj": hidden,
        "self_attn.o_proj": attended,
        "mlp.down_proj": config.get("intermediate_size"),
    }
    for name, width in widths.items():
        if isinstance(width, int) and width % group_size:
            raise bad_value(
                "quantize",
                "group_size",
                f"divide the {width} inputs of {name}",
                group_size,
                "choose a divisor, for example 64, or skip the layer",
            )
