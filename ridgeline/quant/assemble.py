"""The finished folder from a journal and the source: one shard in memory at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from ridgeline.formats.registry import KEYS as CONFIG_KEYS
from ridgeline.quant.checkpoint import (
    CheckpointSize,
    Extras,
    Stored,
    config_of,
    packed_layers,
    write_stored,
)
from ridgeline.quant.journal import Journal
from ridgeline.quant.recipe import Recipe


class PlainTensors(Protocol):
    """The source's tensors by name (nn.tensorfile.TensorFolder is one)."""

    @property
    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def get(self, name: str) -> torch.Tensor: ...


def assemble(
    folder: Path,
    config: Mapping[str, Any],
    source: PlainTensors,
    journal: Journal,
    recipe: Recipe,
    *,
    extras: Callable[[CheckpointSize], Extras],
    overwrite: bool,
) -> CheckpointSize:
    """Write the quantized folder, all or nothing; returns its size.

    Whatever is not quantized is copied from the source bit for bit, but for norms that took a
    scale, which come from the journal in the source's dtype.
    extras: makes what goes in beside the tensors, given their size.
    Raises: UserError when the folder exists or the disk refuses; ValueError for exceptions that the
    format's config cannot state.
    """
    held = journal.tensors()
    layers = packed_layers(held)
    replaced = {f"{name}.{part}" for name in layers for part in ("weight", "bias")}
    plain = [name for name in _wanted(source, config) if name not in replaced]
    dtypes = {name: source.get(name).dtype for name in plain if name in held}
    stored = [
        _from_journal(name, held[name], dtypes[name])
        if name in held
        else _from_source(name, source)
        for name in plain
    ]
    packed = [
        _from_journal(f"{layer}.{part}", held[f"{layer}.{part}"], None)
        for layer in layers
        for part in sorted(layers[layer])
    ]
    skipped = [name for name in _plain_linears(plain, source) if name not in layers]
    entry = config_of(recipe, layers, skipped)
    size = _size(stored, packed, replaced, source)
    stated = {key: value for key, value in config.items() if key not in CONFIG_KEYS}
    write_stored(folder, stated, entry, stored + packed, extras=extras(size), overwrite=overwrite)
    return size


def _wanted(source: PlainTensors, config: Mapping[str, Any]) -> list[str]:
    """The source's tensors but a repeated tied head and old rotary tables."""
    tied = bool(config.get("tie_word_embeddings"))
    names = [name for name in source.names if not name.endswith(".rotary_emb.inv_freq")]
    return [name for name in names if not (tied and name == "lm_head.weight")]


def _plain_linears(plain: Iterable[str], source: PlainTensors) -> list[str]:
    """As checkpoint.plain_linears, by shapes."""
    names = []
    for full in plain:
        name = full.removesuffix(".weight")
        inside = name == "lm_head" or any(part.isdigit() for part in name.split("."))
        if name != full and inside and len(source.shape(full)) == 2:
            names.append(name)
    return names


def _size(
    plain: list[Stored], packed: list[Stored], replaced: set[str], source: PlainTensors
) -> CheckpointSize:
    beside = sum(each.num_bytes for each in plain)
    quantized = sum(each.num_bytes for each in packed)
    names = [each.name for each in plain] + [name for name in source.names if name in replaced]
    return CheckpointSize(
        total_bytes=beside + quantized,
        quantized_bytes=quantized,
        plain_bytes=beside,
        unquantized_bytes=2 * sum(math.prod(source.shape(name)) for name in names),
    )


def _from_source(name: str, source: PlainTensors) -> Stored:
    itemsize = source.get(name).element_size()
    return Stored(
        name=name,
        num_bytes=itemsize * math.prod(source.shape(name)),
        read=functools.partial(source.get, name),
    )


def _from_journal(name: str, path: Path, dtype: torch.dtype | None) -> Stored:
    def read() -> torch.Tensor:
        with safe_open(path, framework="pt") as handle:
            tensor = handle.get_tensor(name)
        return tensor if dtype is None else tensor.to(dtype)

    return Stored(name=name, num_bytes=read().nbytes, read=read)
