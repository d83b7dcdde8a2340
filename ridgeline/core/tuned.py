"""Tile configs that `ridgeline tune` measured on this machine, kept in the user cache.

    <cache>/tuned/<arch>_<device>.json: {version: {op: {key: entry}}}

A version names the package and Triton, since another compiler wants other tiles; entries of other
versions are left alone and not used. What a key and an entry hold is the op's business. Files are
replaced whole, under a lock: several processes may tune at once, and a reader sees a whole file.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import warnings
from pathlib import Path
from typing import Any

import ridgeline
from ridgeline.core import env
from ridgeline.core.arch import Arch
from ridgeline.core.files import atomic_write_text


def path(arch: Arch) -> Path:
    """Where the configs of a device are, or would be."""
    safe = "".join(c if c.isalnum() else "_" for c in arch.device)
    return env.cache_dir() / "tuned" / f"{arch.name}_{safe}.json"


def version() -> str:
    """What an entry is good for: this package with this Triton."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return f"ridgeline {ridgeline.__version__}, triton {triton}"


def load(op: str, arch: Arch) -> dict[str, Any]:
    """{key: entry} of an op on a device; empty where nothing was tuned.

    A file that cannot be read is ignored with a warning.
    """
    file = path(arch)
    if not file.exists():
        return {}
    try:
        return dict(_read(file).get(version(), {}).get(op, {}))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warn(file, f"it cannot be read ({error})")
        return {}


def save(op: str, arch: Arch, entries: dict[str, Any]) -> Path:
    """Add entries, replacing those of the same keys; returns the file.

    Raises: UserError when the disk refuses.
    """
    file = path(arch)
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            kept = _read(file) if file.exists() else {}
            kept.setdefault(version(), {}).setdefault(op, {}).update(entries)
        except (ValueError, TypeError, AttributeError):  # damaged: start again
            kept = {version(): {op: dict(entries)}}
        atomic_write_text(file, json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return file


def warn(file: Path, why: str) -> None:
    """Say that something in a file is not used."""
    warnings.warn(
        f"tuned tiles: {file} is not used in full: {why}; remove it or run `ridgeline tune` again",
        RuntimeWarning,
        stacklevel=3,
    )


def _read(file: Path) -> dict[str, Any]:
    kept = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(kept, dict):
        raise ValueError("not a JSON object")
    return kept
