"""Whether a folder can be a model at all, told from its outside: no torch is imported, so a command
refuses a mistyped path in a fraction of a second."""

from __future__ import annotations

from pathlib import Path

from ridgeline.core.errors import UserError


def check_model_folder(folder: Path, what: str = "model:") -> None:
    """what: the start of the message, "eval: model" for a command's argument.

    Raises: UserError for what is no folder with a config.json.
    """
    if not folder.is_dir():
        got = "a file" if folder.exists() else "none"
        raise UserError(f"{what} {folder} must be a folder, got {got}; check the path")
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{what} {folder} must be a model folder with a config.json, got none; check the path"
        )
