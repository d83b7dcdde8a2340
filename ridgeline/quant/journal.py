"""What a run has finished, on disk: killed at any moment, the next run goes on from there.

  <folder>/run.json                     the fingerprint: model, recipe, data, ranks, versions
  <folder>/block-00003.safetensors      a finished block: packed layers and plain tensors
  <folder>/block-00003.json             its reports
  <folder>/state-00003-of-0.safetensors hidden states after it, one file a rank
  <folder>/done-00003                   written last: the block counts
  <folder>/.lock                        held by the process at work in it

Each file is written under another name, flushed and renamed; a block counts when its `done` file is
there, so at most the block at hand is done again. Hidden states keep their dtype, so that the run
goes on with the same bits. Only the newest state is kept.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ridgeline.core import progress
from ridgeline.core.errors import UserError
from ridgeline.core.files import atomic_path, atomic_write_text
from ridgeline.core.protocols import BlockwiseModel
from ridgeline.formats.base import QuantizedWeight
from ridgeline.quant.awq import FoldReport
from ridgeline.quant.block import BlockResult
from ridgeline.quant.evaluate import Evaluation
from ridgeline.quant.ranks import Ranks
from ridgeline.quant.recipe import Recipe
from ridgeline.quant.report import BlockReport, ModuleReport

_LOCK = ".lock"
_KNOWN = re.compile(r"run\.json|block-\d{5}\.(safetensors|json)|state-\d{5}-of-\d+\.safetensors|"
                    r"\.lock|done-\d{5}|\..*\.tmp")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run goes on."""

    blocks: int
    """Finished blocks."""
    batches: list[torch.Tensor]
    """Hidden states of this rank's batches."""
    evaluation: list[torch.Tensor]


class Journal:
    """One run's folder."""

    def __init__(
        self, folder: Path, fingerprint: Mapping[str, Any], recipe: Recipe, ranks: Ranks,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Open the folder of a run with this fingerprint, or start over in it.

        Raises: UserError for a folder that holds something else, or a disk that refuses.
        """
        self.folder, self.recipe, self.ranks, self.device = folder, recipe, ranks, device
        if ranks.rank == 0:
            self._open(dict(fingerprint))
        ranks.wait()

    def _open(self, fingerprint: dict[str, Any]) -> None:
        held = list(self.folder.iterdir()) if self.folder.is_dir() else []
        foreign = [path.name for path in held if not _KNOWN.fullmatch(path.name)]
        if foreign or (self.folder.exists() and not self.folder.is_dir()):
            raise UserError(
                f"quantize: {self.folder} must hold an unfinished run, got "
                f"{foreign[0] if foreign else 'a file'}; move it away"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        weakref.finalize(self, os.close, _locked(self.folder))
        path = self.folder / "run.json"
        if path.is_file():
            changed = _changed(self.folder, fingerprint)
            if not changed:
                if self.finished:
                    progress.say(f"quantize: going on after {self.finished} finished blocks")
                return
            progress.say(
                f"quantize: an unfinished run in {self.folder} had another "
                f"{', '.join(changed)}; starting over"
            )
        for held_file in held:
            if held_file.name != _LOCK:
                held_file.unlink()
        try:
            atomic_write_text(path, json.dumps(fingerprint, indent=1, default=str))
        except UserError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    # ---- going on ----------------------------------------------------------------------------

    @property
    def finished(self) -> int:
        """Blocks that count."""
        return _count(self.folder)

    def last_state(self) -> State | None:
        """Where to go on; None: at the start."""
        blocks = self.finished
        if blocks == 0:
            return None
        tensors = load_file(self._state(blocks - 1), device=str(self.device))
        held: dict[str, list[torch.Tensor]] = {"batch": [], "evaluation": [], "none": []}
        for name in sorted(tensors):
            held[name.split(".")[0]].append(tensors[name])
        return State(blocks=blocks, batches=held["batch"], evaluation=held["evaluation"])

    def result_of(self, index: int) -> BlockResult:
        """A finished block's reports."""
        said = _read(self.folder / f"block-{index:05d}.json")
        return BlockResult(
            index=index,
            reports=[ModuleReport(**row) for row in said["modules"]],
            skipped=said["skipped"],
            folds=[
                FoldReport(**{**row, "consumers": tuple(row["consumers"])}) for row in said["folds"]
            ],
            block=None if said["block"] is None else BlockReport(**said["block"]),
        )

    def weights_of(self, index: int) -> tuple[dict[str, QuantizedWeight], dict[str, torch.Tensor]]:
        """A finished block's (layers, plain tensors), by full name."""
        parts: dict[str, dict[str, torch.Tensor]] = {}
        path = self.folder / f"block-{index:05d}.safetensors"
        for name, tensor in load_file(path, device=str(self.device)).items():
            layer, _, part = name.rpartition(".")
            parts.setdefault(layer, {})[part] = tensor
        weights: dict[str, QuantizedWeight] = {}
        plain: dict[str, torch.Tensor] = {}
        packed = {report.name for report in self.result_of(index).reports}
        for layer, tensors in parts.items():
            layout = self.recipe.layout_of(layer)
            if layer in packed and layout is not None:
                weights[layer] = layout.unpack(tensors)
            else:
                plain |= {f"{layer}.{part}": tensor for part, tensor in tensors.items()}
        return weights, plain

    def keep(
        self,
        model: BlockwiseModel,
        result: BlockResult,
        batches: list[torch.Tensor],
        evaluation: Evaluation | None,
        ranks: Ranks,
    ) -> None:
        """Write a finished block and where the run stands; after that it counts."""
        index = result.index
        if ranks.rank == 0:
            self._write(f"block-{index:05d}.safetensors", self._tensors_of(model, result))
            said = {
                "modules": [asdict(report) for report in result.reports],
                "skipped": result.skipped,
                "folds": [asdict(fold) for fold in result.folds],
                "block": None if result.block is None else asdict(result.block),
            }
            atomic_write_text(self.folder / f"block-{index:05d}.json", json.dumps(said, indent=1))
        state = {f"batch.{i:05d}": x for i, x in enumerate(batches)}
        following = [] if evaluation is None else evaluation.state()
        state |= {f"evaluation.{i:05d}": x for i, x in enumerate(following)}
        self._write(self._state(index).name, state or {"none": torch.zeros(1)})
        ranks.wait()
        if ranks.rank == 0:
            atomic_write_text(self.folder / f"done-{index:05d}", "")
        ranks.wait()
        if index:
            self._state(index - 1).unlink(missing_ok=True)

    def _tensors_of(self, model: BlockwiseModel, result: BlockResult) -> dict[str, torch.Tensor]:
        """Packed layers, and the norms that a scale was folded into."""
        tensors: dict[str, torch.Tensor] = {}
        for name, weight in result.weights.items():
            layout = self.recipe.layout_of(name)
            assert layout is not None
            for part, tensor in layout.pack(weight).items():
                tensors[f"{name}.{part}"] = tensor
        prefix = model.block_prefix(result.index) + "."
        for fold in result.folds:
            if fold.accepted and fold.producer not in result.weights:
                norm = model.blocks[result.index].get_submodule(fold.producer.removeprefix(prefix))
                tensors[f"{fold.producer}.weight"] = norm.weight
        return tensors

    def _write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        contents = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        with atomic_path(self.folder / name) as temporary:
            try:
                save_file(contents, temporary)
            except SafetensorError as error:  # a full disk, among others
                raise UserError(f"write: could not write {self.folder / name}: {error}") from error

    def _state(self, index: int) -> Path:
        return self.folder / f"state-{index:05d}-of-{self.ranks.rank}.safetensors"

    # ---- the end -----------------------------------------------------------------------------

    def tensors(self) -> dict[str, Path]:
        """Every tensor of the finished blocks -> its file, in order."""
        found: dict[str, Path] = {}
        for index in range(self.finished):
            path = self.folder / f"block-{index:05d}.safetensors"
            with safe_open(path, framework="pt") as handle:
                found |= dict.fromkeys(sorted(handle.keys()), path)
        return found

    def num_bytes(self) -> int:
        """On disk now."""
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def remove(self) -> None:
        """Once the result stands elsewhere."""
        if self.ranks.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def finished_blocks(folder: Path, fingerprint: Mapping[str, Any]) -> int:
    """Blocks that a run with this fingerprint would not do again; looks only."""
    if not (folder / "run.json").is_file() or _changed(folder, fingerprint):
        return 0
    return _count(folder)


def _count(folder: Path) -> int:
    count = 0
    while (folder / f"done-{count:05d}").is_file():
        count += 1
    return count


def _changed(folder: Path, fingerprint: Mapping[str, Any]) -> list[str]:
    """What the run in a folder had otherwise."""
    before = _read(folder / "run.json")
    return sorted(key for key in fingerprint if before.get(key) != fingerprint[key])


def _locked(folder: Path) -> int:
    """The lock of a run's folder as an open file, held until that is closed; the process itself may
    take it again.

    Raises: UserError where another process has it.
    """
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:  # what POSIX says of a lock that is held
        os.close(handle)
        raise UserError(
            f"quantize: {folder} must belong to one run, got another process at work in it; wait "
            "for it, or choose another --out"
        ) from error
    except OSError:
        pass  # a file system without locks: as it was before there was one
    return handle


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"quantize: {path} must be readable JSON, got {error}; remove {path.parent}"
        ) from error
