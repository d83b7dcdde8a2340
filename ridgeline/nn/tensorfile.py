"""Tensors of a checkpoint folder, read lazily from safetensors, single or sharded.

Only safetensors and JSON are read: nothing is unpickled and no code of a checkpoint runs. A shard
is mapped, not loaded; `get` copies one tensor out of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ridgeline.core.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 64 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 64 MiB.

    Raises: UserError for a missing, too large, or malformed file.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise UserError(
                f"checkpoint: {path} must be at most {MAX_JSON_BYTES} bytes, "
                f"got {path.stat().st_size}; it is no configuration file"
            )
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"checkpoint: {path.name} must exist, got none in {path.parent}; "
            "give a Hugging Face model folder"
        ) from None
    except OSError as error:
        raise UserError(f"checkpoint: could not read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"checkpoint: {path} must be JSON, got {error}; restore the file"
        ) from error
    if not isinstance(value, dict):
        raise UserError(
            f"checkpoint: {path} must hold a JSON object, got {type(value).__name__}; restore it"
        )
    return value


class TensorFolder:
    """Names, shapes and tensors of the safetensors in a folder.

    Raises: UserError for no safetensors (pickle files are refused), a missing, truncated or
    foreign shard, an unknown name.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        self._shard_of: dict[str, str] = {}
        if (self.folder / INDEX).is_file():
            self._read_index()
        elif (self.folder / SINGLE).is_file():
            self._shard_of = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise UserError(self._nothing_here())

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._shard_of)

    @property
    def shards(self) -> list[str]:
        """File names of the shards, sorted."""
        return sorted(set(self._shard_of.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self._shard_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._file(self._shard(name)).get_slice(name).get_shape())

    def get(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """A tensor in the file's dtype, on `device`, independent of the file."""
        tensor = self._file(self._shard(name)).get_tensor(name)
        return tensor.clone() if torch.device(device).type == "cpu" else tensor.to(device)

    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum((self.folder / shard).stat().st_size for shard in self.shards)

    def _shard(self, name: str) -> str:
        if name not in self._shard_of:
            raise UserError(
                f"checkpoint: tensor {name} must be in {self.folder}, got none; "
                "the checkpoint is incomplete or of another architecture"
            )
        return self._shard_of[name]

    def _file(self, shard: str) -> Any:
        if shard in self._open:
            return self._open[shard]
        path = self.folder / shard
        if not path.is_file():
            raise UserError(
                f"checkpoint: shard {shard} must exist, got none in {self.folder}; "
                "fetch the missing file"
            )
        try:
            handle = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(
                f"checkpoint: {path} must be a whole safetensors file, got {one_line(error)}; "
                "fetch it again"
            ) from error
        self._open[shard] = handle
        return handle

    def _read_index(self) -> None:
        shards = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise UserError(
                f"checkpoint: {INDEX} must hold a weight_map, got none; restore the file"
            )
        for name, shard in shards.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise UserError(
                    f"checkpoint: {INDEX} must name files of its own folder, got {shard!r}; "
                    "do not use this checkpoint"
                )
            self._shard_of[name] = shard
        for shard in self.shards:
            held = set(self._file(shard).keys())
            for name in (name for name, where in self._shard_of.items() if where == shard):
                if name not in held:
                    raise UserError(
                        f"checkpoint: {shard} must hold {name} as {INDEX} says, got none; "
                        "fetch the shard again"
                    )

    def _nothing_here(self) -> str:
        if not self.folder.is_dir():
            return f"checkpoint: {self.folder} must be a folder, got none; check the path"
        pickles = [
            path.name
            for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt")
            for path in sorted(self.folder.glob(pattern))
        ]
        if pickles:
            return (
                f"checkpoint: weights must be safetensors, got {pickles[0]} in {self.folder}; "
                "pickle files can run code and are never loaded, convert it to safetensors first"
            )
        return (
            f"checkpoint: {SINGLE} or {INDEX} must exist, got neither in {self.folder}; "
            "fetch the weights"
        )


def one_line(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]
