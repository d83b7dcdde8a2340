"""A run's state on disk: written whole, checked when read, resumed exactly.

    <run>/checkpoints/step-00000120/
        model.safetensors       parameters by full name, in their dtype
        optimizer.safetensors   exp_avg, exp_avg_sq, step (and master) by "<kind>.<full name>"
        rng.safetensors         generator states
        tokenizer/              tokenizer.json and what belongs to it
        state.json              step, consumed samples, config, and SHA-256 and size of every file

A folder is filled under a temporary name and renamed, so a killed process leaves the previous one;
`latest` reads every byte against the checksums and goes back to the previous good one, with a
warning. Only safetensors and JSON: nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ridgeline.core.errors import UserError
from ridgeline.core.files import atomic_dir

Found = TypeVar("Found")

FORMAT = 1
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_TENSOR_FILES = ("model", "optimizer", "rng")


class DamagedError(UserError):
    """A checkpoint that is not whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that a run goes on from."""

    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """The data order's one integer."""
    config: dict[str, Any]
    """The config as plain values; learning rates follow from it and the step."""
    facts: dict[str, Any]
    """Hashes and what else identifies the run (config_hash, identity_hash, data_fingerprint
    ...)."""
    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    rng: dict[str, torch.Tensor]
    tokenizer: dict[str, str]
    """File name -> text."""


def rng_state() -> dict[str, torch.Tensor]:
    """States of PyTorch's generators (nothing else draws random numbers here)."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return found


def set_rng_state(states: dict[str, torch.Tensor]) -> None:
    """Take over what `rng_state` gave; states of GPUs that this machine lacks are left out."""
    torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{index}"], index)


def save(folder: Path, snapshot: Snapshot, *, keep_last: int) -> Path:
    """Publish a snapshot under `folder`, then remove all but the newest `keep_last`.

    Raises: UserError where the disk refuses; the earlier checkpoints are untouched then.
    """
    path = folder / f"step-{snapshot.step:08d}"
    with atomic_dir(path, overwrite=True) as temporary:
        for name in _TENSOR_FILES:
            _save_tensors(temporary / f"{name}.safetensors", getattr(snapshot, name))
        if snapshot.tokenizer:
            (temporary / "tokenizer").mkdir()
        for name, text in snapshot.tokenizer.items():
            (temporary / "tokenizer" / name).write_text(text, encoding="utf-8")
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        state = {
            "format": FORMAT,
            "step": snapshot.step,
            "consumed_samples": snapshot.consumed_samples,
            "config": snapshot.config,
            "facts": snapshot.facts,
            "files": {
                str(p.relative_to(temporary)): {"bytes": p.stat().st_size, "sha256": _sha256(p)}
                for p in files
            },
        }
        state["sha256"] = _state_digest(state)
        (temporary / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    # A later one can only be a damaged one that was passed over: it does not count.
    older = [other for other in scan(folder) if other.name <= path.name]
    for old in older[keep_last:]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def scan(folder: Path) -> list[Path]:
    """Checkpoints under a folder, newest first, good or not."""
    if not folder.is_dir():
        return []
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found, reverse=True)]


def verify(path: Path) -> dict[str, Any]:
    """Read every byte of a checkpoint against its checksums; returns its state.json.

    Raises: DamagedError naming the first file that is missing, cut or changed.
    """
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        recorded = state.pop("sha256")
        if recorded != _state_digest(state):
            raise DamagedError(f"checkpoint: {path / STATE} was changed after it was written")
        if state["format"] != FORMAT:
            raise DamagedError(
                f"checkpoint: {path} has format {state['format']}, this version reads {FORMAT}"
            )
        for name, facts in state["files"].items():
            file = path / name
            if not file.is_file():
                raise DamagedError(f"checkpoint: {file} is missing")
            if file.stat().st_size != facts["bytes"]:
                raise DamagedError(
                    f"checkpoint: {file} has {file.stat().st_size} bytes, {facts['bytes']} were "
                    "written"
                )
            if _sha256(file) != facts["sha256"]:
                raise DamagedError(f"checkpoint: {file} does not match its checksum")
    except OSError as error:
        raise DamagedError(f"checkpoint: could not read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"checkpoint: {path / STATE} is not whole") from error
    return state


def latest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole, or None; each damaged one passed over gives a
    warning."""

    def checked(path: Path) -> Path:
        verify(path)
        return path

    return _first_whole(folder, checked)


def load_latest(folder: Path) -> Snapshot | None:
    """The newest checkpoint that is whole, read; warnings as `latest`."""
    return _first_whole(folder, load)


def _first_whole(folder: Path, read: Callable[[Path], Found]) -> Found | None:
    for path in scan(folder):
        try:
            return read(path)
        except DamagedError as error:
            warnings.warn(f"{error}; trying the one before", RuntimeWarning, stacklevel=3)
    return None


def load(path: Path) -> Snapshot:
    """Read a checkpoint into CPU memory, checked against its checksums.

    Raises: DamagedError where it is not whole.
    """
    state = verify(path)
    try:
        tensors = {name: load_file(path / f"{name}.safetensors") for name in _TENSOR_FILES}
        texts = {
            file.name: file.read_text(encoding="utf-8")
            for file in sorted((path / "tokenizer").glob("*"))
        }
    except (OSError, SafetensorError) as error:
        raise DamagedError(f"checkpoint: could not read {path}: {error}") from error
    return Snapshot(
        step=state["step"],
        consumed_samples=state["consumed_samples"],
        config=state["config"],
        facts=state["facts"],
        tokenizer=texts,
        **tensors,
    )


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold a run folder for this process, and remove what a killed one left half-written.

    Raises: UserError where another process trains in it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handle = open(run_dir / ".lock", "w")
    except OSError as error:
        raise UserError(f"train: could not use {run_dir}: {error.strerror or error}") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"train: another process is training in {run_dir}; wait, or choose another run_dir"
            ) from error
        _restore_interrupted(run_dir / "checkpoints")
        yield


def _restore_interrupted(folder: Path) -> None:
    """Clear a killed process's temporary folders; put back a checkpoint that it had moved aside."""
    if not folder.is_dir():
        return
    for path in folder.glob(".step-*.old"):
        place = folder / path.name.split(".")[1]
        if not place.exists():
            path.rename(place)
    for pattern in (".step-*.tmp", ".step-*.old"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    try:
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, path)
    except SafetensorError as error:
        raise UserError(f"checkpoint: could not write {path.parent.parent}: {error}") from error


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state_digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
