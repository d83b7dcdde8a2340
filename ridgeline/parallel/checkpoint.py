"""A run's state on disk: the same folder from any layout, written whole, checked when read.

    <run>/checkpoints/step-00000120/
        model*.safetensors      fp32 master parameters by full name, a file or a few a rank
        optimizer*.safetensors  exp_avg, exp_avg_sq and step by "<kind>.<full name>"
        rng*.safetensors        generator states of each rank
        metadata.json           where each box of each tensor is (storage.py)
        tokenizer/              tokenizer.json and what belongs to it
        state.json              step, consumed samples, config, and SHA-256 and size of every file

All ranks fill one folder under a temporary name; when the last one has flushed its files, rank 0
writes state.json and renames, so that a killed run leaves the previous checkpoint and nothing half
written is ever seen. A load reads every byte against the checksums, each rank a share, and goes
back to the previous good one together, with one warning. A save can go on in a thread beside the
training, on host copies and a process group of its own. The folder must be one that all nodes see.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ridgeline.core.errors import UserError
from ridgeline.core.files import atomic_dir
from ridgeline.parallel.storage import DamagedError, State, file_facts, staged, write_state
from ridgeline.parallel.tensor_file import WRITERS

Found = TypeVar("Found")
Group = dist.ProcessGroup | None

FORMAT = 2
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a checkpoint says beside its tensors."""

    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """The data order's one integer."""
    config: dict[str, Any]
    """The config as plain values; learning rates follow from it and the step."""
    facts: dict[str, Any]
    """Hashes and what else identifies the run (config_hash, identity_hash, data_fingerprint
    ...)."""
    tokenizer: dict[str, str] = field(default_factory=dict)
    """File name -> text."""


class Saver:
    """Writes checkpoints of one run, at most one at a time; every rank makes and calls its own.

    group: a gloo group of all ranks that nothing else uses; None: one process.
    """

    def __init__(self, folder: Path, *, keep_last: int, group: Group = None) -> None:
        self._folder, self._keep_last, self._group = folder, keep_last, group
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, record: Record, state: State, *, beside: bool = False) -> None:
        """Publish a checkpoint, then remove all but the newest.

        beside: return when the state is copied to host memory and write it in a thread; the next
        save waits for it. A collective call.
        Raises: UserError on every rank where the disk refuses one; the earlier checkpoints are
        untouched then. With `beside` the next `wait` raises it.
        """
        self.wait()
        if not beside:
            self._write(record, state)
            return
        copied = staged(state)

        def run() -> None:
            try:
                self._write(record, copied)
            except BaseException as error:
                self._error = error

        # One process finishes its save before it ends; many may wait for a rank that is gone.
        daemon = self._group is not None
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=daemon)
        self._thread.start()

    def wait(self) -> None:
        """Until the checkpoint under way is published. Raises: what kept it from that."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if (error := self._error) is not None:
            self._error = None
            raise error

    @property
    def failed(self) -> bool:
        """Whether the save beside the training went wrong; `wait` raises how."""
        return self._error is not None

    def _write(self, record: Record, state: State) -> None:
        if self._group is None:
            publish(self._folder, record, state, keep_last=self._keep_last)
        elif dist.get_rank(self._group) == 0:
            self._lead(self._group, record, state)
        else:
            self._follow(self._group, state)

    def _lead(self, group: dist.ProcessGroup, record: Record, state: State) -> None:
        problem, told = None, False

        def tell(folder: Path) -> None:
            nonlocal told
            told = True
            _broadcast(group, str(folder))

        try:
            publish(
                self._folder, record, state, keep_last=self._keep_last, group=group, filling=tell
            )
        except Exception as error:
            problem = error
        if not told:
            _broadcast(group, None)
        _broadcast(group, None if problem is None else str(problem))
        if problem is not None:
            raise problem

    def _follow(self, group: dist.ProcessGroup, state: State) -> None:
        problem = None
        if (folder := _broadcast(group, None)) is not None:
            try:
                write_state(Path(folder), state, group)
            except Exception as error:
                problem = error
        outcome = _broadcast(group, None)
        if problem is not None:
            raise problem
        if outcome is not None:
            raise UserError(outcome)


def _broadcast(group: dist.ProcessGroup, value: Any) -> Any:
    """What rank 0 says."""
    held = [value]
    dist.broadcast_object_list(held, group=group, group_src=0)
    return held[0]


def publish(
    folder: Path,
    record: Record,
    state: State,
    *,
    keep_last: int,
    group: Group = None,
    filling: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Write a checkpoint under `folder` from rank 0, then remove all but the newest `keep_last`.

    filling is told the temporary folder, into which the other ranks of the group then write.
    Raises: UserError where the disk refuses; the earlier checkpoints are untouched then.
    """
    path = folder / f"step-{record.step:08d}"
    with atomic_dir(path, overwrite=True) as temporary:
        filling(temporary)
        written = write_state(temporary, state, group)
        if record.tokenizer:
            (temporary / "tokenizer").mkdir()
        for name, text in record.tokenizer.items():
            (temporary / "tokenizer" / name).write_text(text, encoding="utf-8")
        files = sorted(str(p.relative_to(temporary)) for p in temporary.rglob("*") if p.is_file())
        state_json = {
            "format": FORMAT,
            "step": record.step,
            "consumed_samples": record.consumed_samples,
            "config": record.config,
            "facts": record.facts,
            "files": {name: written.get(name) or file_facts(temporary / name) for name in files},
        }
        state_json["sha256"] = _state_digest(state_json)
        (temporary / STATE).write_text(json.dumps(state_json, indent=1), encoding="utf-8")
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


def verify(path: Path, *, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Read a checkpoint's bytes against their checksums; returns its state.json.

    share: (rank, ranks) reads the files of this rank only, largest first dealt in turn.
    Raises: DamagedError naming the first file that is missing, cut or changed; UserError for one of
    another version of the format.
    """
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        recorded = state.pop("sha256")
        if recorded != _state_digest(state):
            raise DamagedError(f"checkpoint: {path / STATE} was changed after it was written")
        if state["format"] != FORMAT:
            raise UserError(
                f"checkpoint: {path} has format {state['format']}, this version reads {FORMAT}; "
                "go on with the version that wrote it, or choose another run_dir"
            )
        names = sorted(state["files"], key=lambda name: (-state["files"][name]["bytes"], name))
        with ThreadPoolExecutor(WRITERS) as pool:
            mine = names[share[0] :: share[1]]
            list(pool.map(lambda name: _verify_file(path / name, state["files"][name]), mine))
    except OSError as error:
        raise DamagedError(f"checkpoint: could not read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"checkpoint: {path / STATE} is not whole") from error
    return state


def _verify_file(file: Path, facts: dict[str, Any]) -> None:
    if not file.is_file():
        raise DamagedError(f"checkpoint: {file} is missing")
    if file.stat().st_size != facts["bytes"]:
        raise DamagedError(
            f"checkpoint: {file} has {file.stat().st_size} bytes, {facts['bytes']} were written"
        )
    if file_facts(file)["sha256"] != facts["sha256"]:
        raise DamagedError(f"checkpoint: {file} does not match its checksum")


def newest_whole(folder: Path, group: Group = None) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole with its state.json, the same on every rank, or None.

    Each damaged one passed over gives a warning on rank 0. A collective call.
    Raises: UserError on every rank for a checkpoint of another version.
    """
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    names = [path.name for path in scan(folder)] if rank == 0 else []
    names = names if group is None else _broadcast(group, names)
    for name in names:
        state, problem = None, None
        try:
            state = verify(folder / name, share=(rank, ranks))
        except UserError as error:
            problem = (isinstance(error, DamagedError), str(error))
        problems = [problem] if group is None else _gathered(group, problem)
        found = [each for each in problems if each is not None]
        if not found:
            assert state is not None
            return folder / name, state
        for damaged, text in found:
            if not damaged:
                raise UserError(text)
        if rank == 0:
            warnings.warn(f"{found[0][1]}; trying the one before", RuntimeWarning, stacklevel=2)
    return None


def _gathered(group: dist.ProcessGroup, value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def restore_interrupted(folder: Path) -> None:
    """Clear a killed run's temporary folders; put back a checkpoint that it had moved aside."""
    if not folder.is_dir():
        return
    for path in folder.glob(".step-*.old"):
        place = folder / path.name.split(".")[1]
        if not place.exists():
            path.rename(place)
    for pattern in (".step-*.tmp", ".step-*.old"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _state_digest(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
