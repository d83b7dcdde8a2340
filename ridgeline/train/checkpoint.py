"""A training run's checkpoints: generator states, the run folder's lock, a checkpoint read whole.

The format, its saving and its checks are parallel/checkpoint.py's, the same for every layout.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.errors import UserError
from ridgeline.parallel.checkpoint import Group, restore_interrupted, verify
from ridgeline.parallel.storage import (
    Piece,
    State,
    read_metadata,
    read_state,
    read_whole,
    whole_piece,
)
from ridgeline.train.optim import PartOptimizer

MODEL, OPTIMIZER, RNG = "model", "optimizer", "rng"
"""Sections of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A checkpoint read whole into host memory, whatever layout wrote it."""

    step: int
    consumed_samples: int
    config: dict[str, Any]
    facts: dict[str, Any]
    model: dict[str, torch.Tensor]
    """fp32 master parameters by full name."""
    optimizer: dict[str, torch.Tensor]
    """exp_avg, exp_avg_sq, step by "<kind>.<full name>"."""
    rng: dict[str, torch.Tensor]
    tokenizer: dict[str, str]
    """File name -> text."""


def load(path: Path) -> Snapshot:
    """Read a checkpoint, checked against its checksums.

    Raises: DamagedError where it is not whole.
    """
    state = verify(path)
    tensors = {section: read_whole(path, section) for section in (MODEL, OPTIMIZER, RNG)}
    return Snapshot(
        step=state["step"],
        consumed_samples=state["consumed_samples"],
        config=state["config"],
        facts=state["facts"],
        tokenizer=tokenizer_files(path),
        **tensors,
    )


def tokenizer_files(path: Path) -> dict[str, str]:
    """A checkpoint's tokenizer, file name -> text."""
    return {
        file.name: file.read_text(encoding="utf-8")
        for file in sorted((path / "tokenizer").glob("*"))
    }


# ---- random numbers ------------------------------------------------------------------------------


def rng_state() -> dict[str, torch.Tensor]:
    """States of PyTorch's generators that this process uses: the CPU's and its GPU's (nothing else
    draws random numbers here)."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_rng_state(states: dict[str, torch.Tensor]) -> None:
    """Take over what `rng_state` gave; a GPU's is left out where there is none."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _rng_prefix(rank: int) -> str:
    return f"{RNG}/" + (f"rank{rank}." if rank else "")


# ---- a run's state as pieces ---------------------------------------------------------------------


def run_state(parameters: dict[str, Piece], optimizer: PartOptimizer, rank: int = 0) -> State:
    """Everything that a run goes on from, as boxes of whole tensors.

    parameters: the fp32 masters that this rank holds; the optimizer's moments are cut alike.
    """
    state: State = {f"{MODEL}/{name}": _kept(piece) for name, piece in parameters.items()}
    for key, tensor in optimizer.state_tensors().items():
        name = key.partition(".")[2]
        if tensor.dim() == 0:
            state[f"{OPTIMIZER}/{key}"] = [whole_piece(tensor)]
        else:
            at = parameters[name]
            piece = Piece(tensor=tensor.detach(), offsets=at.offsets, shape=at.shape)
            state[f"{OPTIMIZER}/{key}"] = _kept(piece)
    for name, tensor in rng_state().items():
        state[f"{_rng_prefix(rank)}{name}"] = [whole_piece(tensor)]
    return state


def _kept(piece: Piece) -> list[Piece]:
    return [piece] if piece.tensor.numel() else []


@torch.no_grad()
def restore(
    path: Path,
    parameters: dict[str, Piece],
    optimizer: PartOptimizer,
    *,
    rank: int = 0,
    group: Group = None,
) -> None:
    """Read a checkpoint of any layout into this rank's parameters, moments and generators.

    A collective call. Raises: UserError where names or shapes do not fit the model.
    """
    saved = read_metadata(path).state_dict_metadata
    stepped = any(key.startswith(f"{OPTIMIZER}/exp_avg.") for key in saved)
    optimizer.reset_state(stepped=stepped)
    state = run_state(parameters, optimizer, rank)
    states = {key: pieces for key, pieces in state.items() if key.startswith(f"{RNG}/")}
    for key in states.keys() - saved.keys():  # more ranks than wrote it: those keep their own
        del state[key]
    read_state(path, state, group, sections=(MODEL, OPTIMIZER))
    optimizer.masters_changed()
    prefix = _rng_prefix(rank)
    set_rng_state(
        {
            key.removeprefix(prefix): pieces[0].tensor
            for key, pieces in states.items()
            if key in state
        }
    )


# ---- the run folder ------------------------------------------------------------------------------


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold a run folder for this run, and remove what a killed one left half-written.

    Raises: UserError where another run trains in it.
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
        restore_interrupted(run_dir / "checkpoints")
        yield
