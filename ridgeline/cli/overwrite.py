"""What `--overwrite` may replace: a folder with nothing in it but what ridgeline writes itself
(nn/overwrite.py), which is neither the source nor the current folder, nor contains one of them."""

from __future__ import annotations

import importlib
from pathlib import Path

from ridgeline.core.errors import UserError


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
    overwriting = importlib.import_module("ridgeline.nn.overwrite")  # it imports torch
    if reason := overwriting.why_foreign(out):
        raise UserError(
            f"{command}: out must be a model folder to be replaced, got {out}, {reason}; choose "
            "another or remove it yourself"
        )
