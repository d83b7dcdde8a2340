"""Tensors of all ranks in safetensors files, through PyTorch's distributed checkpoint (DCP).

    <folder>/model-00003.safetensors      what rank 3 writes of section "model" (no number: alone);
             model-00003.1.safetensors    more files where it is large, written at the same time
            /metadata.json                name -> dtype, whole shape, chunks (offsets, sizes, file)

A tensor is known by "<section>/<full name>" and its whole shape; each rank states which boxes of it
it holds (`Piece`). DCP's planners do the rest: one writer for boxes that several ranks hold, the
check that the boxes tile the whole, and the cutting of saved boxes into wanted ones. Its own file
storage is not used: that pickles its metadata and its tensors, and files are never unpickled here.
Bound by checksums or the disk; a rank writes each byte once and reads what its boxes overlap.
Source of the interfaces: torch.distributed.checkpoint (planner.py, storage.py), PyTorch 2.11-2.14.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ridgeline.core.dtypes import dtype_name, torch_dtype
from ridgeline.core.errors import UserError
from ridgeline.parallel.tensor_file import WRITERS, cut_in_parts, write_tensors

METADATA = "metadata.json"


class DamagedError(UserError):
    """A checkpoint that is not whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a whole tensor that this rank holds."""

    tensor: torch.Tensor
    """Plain (no DTensor); of the box's sizes. Loading writes into it."""
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole."""


State = dict[str, list[Piece]]
"""By "<section>/<full name>"; an empty list is a tensor of which this rank holds nothing."""


def whole_piece(tensor: torch.Tensor) -> Piece:
    """All of a tensor, held here."""
    return Piece(tensor=tensor.detach(), offsets=(0,) * tensor.dim(), shape=tuple(tensor.shape))


def staged(state: State) -> State:
    """Copies in host memory, so that training may go on while they are written."""
    # Copies first and one wait at the end: transfers from a GPU overlap each other.
    copied = {
        name: [Piece(tensor=_host_copy(p.tensor), offsets=p.offsets, shape=p.shape) for p in pieces]
        for name, pieces in state.items()
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copied


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
    return tensor.clone(memory_format=torch.contiguous_format)


# ---- saving -----------------------------------------------------------------------------------


class PiecePlanner(DefaultSavePlanner):
    """DCP's default plan, made of pieces."""

    state_dict: Any

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """This rank's boxes."""
        items = [
            WriteItem(
                index=MetadataIndex(name, piece.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape),
                    properties=TensorProperties(dtype=piece.tensor.dtype),
                    size=torch.Size(piece.shape),
                ),
            )
            for name, pieces in self.state_dict.items()
            for piece in pieces
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor of a box."""
        pieces: list[Piece] = self.state_dict[index.fqn]
        return next(p.tensor for p in pieces if torch.Size(p.offsets) == index.offset)


class SafetensorsWriter(StorageWriter):
    """One file a rank and section; the coordinator writes metadata.json."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder, self._number = folder, "" if world_size == 1 else f"-{rank:05d}"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between saves."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any folder."""
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the folder exists."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, flushed to disk."""
        sections: dict[str, dict[str, torch.Tensor]] = {}
        indices: dict[tuple[str, str], MetadataIndex] = {}
        for item in plan.items:
            section, _, name = item.index.fqn.partition("/")
            assert item.tensor_data is not None and item.index.offset is not None
            if item.tensor_data.chunk.sizes != item.tensor_data.size:
                name += "@" + ",".join(map(str, item.index.offset))
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            sections.setdefault(section, {})[name] = tensor
            indices[section, name] = item.index
        files: list[tuple[str, str, dict[str, torch.Tensor]]] = []
        for section, tensors in sections.items():
            for number, part in enumerate(cut_in_parts(tensors)):
                more = f".{number}" if number else ""
                files.append((section, f"{section}{self._number}{more}.safetensors", part))
        with ThreadPoolExecutor(WRITERS) as pool:
            facts = list(pool.map(lambda file: self._write(file[1], file[2]), files))
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [
                WriteResult(indices[section, key], told["bytes"], (file, key, told))
                for (section, file, part), told in zip(files, facts, strict=True)
                for key in part
            ]
        )
        return done

    def _write(self, file: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        try:
            return write_tensors(self._folder / file, tensors)
        except OSError as error:
            raise UserError(
                f"checkpoint: could not write {self._folder}: {error.strerror or error}"
            ) from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata.json; the files' checksums are kept for the caller."""
        places = {r.index: r.storage_data for rank in results for r in rank}
        tensors: dict[str, Any] = {}
        self.files: dict[str, dict[str, Any]] = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            chunks = []
            for chunk in stored.chunks:
                file, key, facts = places[MetadataIndex(name, chunk.offsets)]
                self.files[file] = facts
                chunks.append(
                    {
                        "offsets": list(chunk.offsets),
                        "sizes": list(chunk.sizes),
                        "file": file,
                        "key": key,
                    }
                )
            dtype = dtype_name(stored.properties.dtype)
            tensors[name] = {"dtype": dtype, "shape": list(stored.size), "chunks": chunks}
        (self._folder / METADATA).write_text(json.dumps(tensors), encoding="utf-8")


def file_facts(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with open(path, "rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def write_state(
    folder: Path, state: State, group: dist.ProcessGroup | None
) -> dict[str, dict[str, Any]]:
    """Write all ranks' pieces into a folder, a collective call.

    Returns the files' sizes and checksums on rank 0 ({} elsewhere).
    Raises: UserError on every rank where one of them fails.
    """
    planner = PiecePlanner()
    if group is None:
        writer = SafetensorsWriter(folder, 0, 1)
        planner.set_up_planner(state, is_coordinator=True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        results = writer.write_data(planner.finish_plan(plans[0]), planner).value()
        writer.finish(metadata, [results])
    else:
        writer = SafetensorsWriter(folder, dist.get_rank(group), dist.get_world_size(group))
        with _dcp_errors():
            dcp_save(state, storage_writer=writer, planner=planner, process_group=group)
    return getattr(writer, "files", {})


# ---- loading ----------------------------------------------------------------------------------


def read_metadata(folder: Path) -> Metadata:
    """metadata.json as DCP's. Raises: DamagedError where it is not whole."""
    try:
        tensors = json.loads((folder / METADATA).read_text(encoding="utf-8"))
        stored: dict[str, Any] = {}
        places: dict[MetadataIndex, tuple[str, str]] = {}
        for name, facts in tensors.items():
            chunks = []
            for chunk in facts["chunks"]:
                offsets = torch.Size(chunk["offsets"])
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk["sizes"])))
                places[MetadataIndex(name, offsets)] = (chunk["file"], chunk["key"])
            properties = TensorProperties(dtype=torch_dtype(facts["dtype"]))
            stored[name] = TensorStorageMetadata(properties, torch.Size(facts["shape"]), chunks)
    except OSError as error:
        raise DamagedError(f"checkpoint: could not read {folder}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"checkpoint: {folder / METADATA} is not whole") from error
    return Metadata(state_dict_metadata=stored, storage_data=places)


class WantedPlanner(DefaultLoadPlanner):
    """DCP's load plan for pieces, which must together want all that sections hold."""

    def __init__(self, sections: tuple[str, ...]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._sections = sections

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take over what is wanted."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Reads that fill this rank's pieces."""
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        pieces: list[Piece]
        for name, pieces in self.state_dict.items():
            if name not in stored:
                raise UserError(
                    f"checkpoint: it must hold every tensor of the model, got no {name}"
                )
            for piece in pieces:
                items += _reads(name, piece, stored[name])
        return LoadPlan(items, planner_data=sorted(self.state_dict))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As they are, if nothing of the sections is left over."""
        assert self.metadata is not None
        wanted = {name for plan in global_plan for name in plan.planner_data}
        held = self.metadata.state_dict_metadata
        for name in sorted(held.keys() - wanted):
            if name.partition("/")[0] in self._sections:
                raise UserError(
                    f"checkpoint: it must hold tensors of the model only, got {name}; choose "
                    "another run_dir"
                )
        return global_plan

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where a read goes."""
        pieces: list[Piece] = self.state_dict[read_item.dest_index.fqn]
        offset = read_item.dest_index.offset
        tensor = next(p.tensor for p in pieces if torch.Size(p.offsets) == offset)
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            tensor = tensor.narrow(dim, start, length)
        return tensor


def _reads(name: str, piece: Piece, stored: Any) -> list[ReadItem]:
    assert isinstance(stored, TensorStorageMetadata)
    if tuple(stored.size) != piece.shape:
        raise UserError(
            f"checkpoint: {name} has shape {tuple(stored.size)}, the model {piece.shape}; choose "
            "another run_dir"
        )
    box = ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape)
    items = create_read_items_for_chunk_list(name, stored, [box])
    if sum(math.prod(item.lengths) for item in items) != piece.tensor.numel():
        raise DamagedError(f"checkpoint: {METADATA} does not tile {name}")
    return items


class SafetensorsReader(StorageReader):
    """Reads boxes out of the files that metadata.json names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any folder."""
        return True

    def read_metadata(self, *args: Any) -> Metadata:
        """metadata.json."""
        return read_metadata(self._folder)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        """Where each saved box is."""
        self._places: Mapping[MetadataIndex, tuple[str, str]] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the wanted pieces, file by file."""
        by_file: dict[str, list[tuple[str, ReadItem]]] = {}
        for item in plan.items:
            file, key = self._places[item.storage_index]
            by_file.setdefault(file, []).append((key, item))
        for file, wanted in by_file.items():
            try:
                with safe_open(self._folder / file, framework="pt") as tensors:
                    for key, item in wanted:
                        planner.resolve_tensor(item).copy_(_box(tensors, key, item))
            except (OSError, SafetensorError) as error:
                path = self._folder / file
                raise DamagedError(f"checkpoint: could not read {path}: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _box(tensors: Any, key: str, item: ReadItem) -> torch.Tensor:
    if len(item.lengths) == 0:
        return tensors.get_tensor(key)
    ranges = tuple(
        slice(start, start + length)
        for start, length in zip(item.storage_offsets, item.lengths, strict=True)
    )
    return tensors.get_slice(key)[ranges]


def read_state(
    folder: Path, state: State, group: dist.ProcessGroup | None, *, sections: tuple[str, ...]
) -> None:
    """Fill all ranks' pieces from a folder, a collective call.

    sections: those of which nothing may be left over.
    Raises: UserError on every rank where one of them fails.
    """
    if group is None:
        _read_here(folder, state, read_metadata(folder), sections=sections)
        return
    planner, reader = WantedPlanner(sections), SafetensorsReader(folder)
    with _dcp_errors():
        dcp_load(state, storage_reader=reader, planner=planner, process_group=group)


def iterate_whole(folder: Path, section: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a section, whole, in host memory, by full name, one at a time."""
    metadata = read_metadata(folder)
    for name, stored in metadata.state_dict_metadata.items():
        if name.startswith(f"{section}/"):
            assert isinstance(stored, TensorStorageMetadata)
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
            _read_here(folder, {name: [whole_piece(tensor)]}, metadata, sections=())
            yield name.partition("/")[2], tensor


def read_whole(folder: Path, section: str) -> dict[str, torch.Tensor]:
    """All of `iterate_whole`."""
    return dict(iterate_whole(folder, section))


def _read_here(
    folder: Path, state: State, metadata: Metadata, *, sections: tuple[str, ...]
) -> None:
    planner, reader = WantedPlanner(sections), SafetensorsReader(folder)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([planner.create_local_plan()])
    reader.read_data(plans[0], planner).wait()


@contextlib.contextmanager
def _dcp_errors() -> Iterator[None]:
    """Turns DCP's exception (of all ranks, with tracebacks) into the first rank's own."""
    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        if isinstance(error, UserError):
            raise error from None
        raise RuntimeError(f"checkpoint: rank {rank}: {type(error).__name__}: {error}") from failed
