"""Writing tensors to safetensors files: streamed, hashed on the way, several files at once.

    8 bytes little-endian n | n bytes of JSON: name -> dtype, shape, data_offsets | the values

The package's own `save_file` makes one more copy of every tensor in host memory, and a checksum
then reads the file again. Here a slice goes into the checksum and to the disk while it is in the
cache; copies, checksums and writes release Python's lock, so that a rank's files are written in
parallel. Bound by SHA-256, one core a file, or by the disk.
Source of the format: https://huggingface.co/docs/safetensors (format).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch

WRITERS = 8
"""Files of one section and rank, and threads that write them, at most."""
PART_BYTES = 2**28
"""A section of more is cut into several files."""
_SLICE_BYTES = 2**22
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write a safetensors file, flushed to disk; returns its size and SHA-256.

    tensors: on any device, any strides. Raises: OSError where the disk refuses.
    """
    # Widest first: every tensor then starts at a multiple of its width.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor_bytes(tensor)
        shape = list(tensor.shape)
        offsets = [start, end]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        _append(file, digest, memoryview(len(text).to_bytes(8, "little") + text))
        for name in names:
            _append(file, digest, _bytes_of(tensors[name]))
        os.fsync(file.fileno())
    return {"bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's values."""
    return tensor.numel() * tensor.element_size()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's values in host memory; a copy where it lies elsewhere or has gaps."""
    host = tensor.detach().cpu().contiguous().reshape(-1)
    values: Any = host.view(torch.uint8).numpy()
    return memoryview(values)


def _append(file: FileIO, digest: Any, content: memoryview) -> None:
    for start in range(0, len(content), _SLICE_BYTES):
        rest = content[start : start + _SLICE_BYTES]
        digest.update(rest)
        while rest:
            rest = rest[file.write(rest) :]


def cut_in_parts(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The tensors dealt to a few files of about the same size, the largest first: one where they
    are small, at least one."""
    total = sum(map(tensor_bytes, tensors.values()))
    count = max(1, min(WRITERS, math.ceil(total / PART_BYTES), len(tensors)))
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name in sorted(tensors, key=lambda name: (-tensor_bytes(tensors[name]), name)):
        least = sizes.index(min(sizes))
        parts[least][name] = tensors[name]
        sizes[least] += tensor_bytes(tensors[name])
    return parts
