"""Quantized checkpoints as Hugging Face folders: written whole or not at all, read back bit for
bit.

config.json carries quantization_config (quantize_config.json repeats it for older loaders); tensors
are safetensors, sharded when large; tokenizer files are copied. Nothing is unpickled and no code of
a checkpoint runs. The model object and its config belong to the caller: this file deals in names
and tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ridgeline.core.errors import UserError
from ridgeline.core.files import atomic_dir
from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.gptq_config import GPTQConfig, LayerRule
from ridgeline.formats.registry import detect
from ridgeline.quant.recipe import Recipe

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSize:
    """What a quantized checkpoint weighs."""

    total_bytes: int
    """All tensors in the files."""
    quantized_bytes: int
    """Tensors of the quantized layers."""
    plain_bytes: int
    """The others: embeddings, norms, the head, layers that were skipped."""
    unquantized_bytes: int
    """What the same layers and the others take at 16 bits a weight."""


def config_of(recipe: Recipe) -> GPTQConfig:
    """The config entry that describes a recipe's result."""
    rules = tuple(
        LayerRule(
            pattern=f".*(?:{override.pattern})",
            skip=override.skip,
            bits=override.bits,
            group_size=override.group_size,
        )
        for override in recipe.overrides
    )
    is_gptq = recipe.method == "gptq"
    return GPTQConfig(
        layout=recipe.layout,
        rules=rules,
        damping=recipe.gptq.damping if is_gptq else None,
        true_sequential=is_gptq,
        static_groups=is_gptq and recipe.gptq.order == "static",
    )


def checkpoint_tensors(
    plain: Mapping[str, torch.Tensor], weights: Mapping[str, QuantizedWeight], config: GPTQConfig
) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint by name: the plain ones without what is quantized, then the
    packed.

    Raises: ValueError when a weight is not of the form that the config states for it.
    """
    replaced = {f"{name}.{part}" for name in weights for part in ("weight", "bias")}
    tensors = {name: tensor for name, tensor in plain.items() if name not in replaced}
    for name, weight in weights.items():
        layout = config.layout_of(name)
        assert layout is not None, f"{name} is quantized but its config skips it"
        for part, tensor in layout.pack(weight).items():
            tensors[f"{name}.{part}"] = tensor
    return tensors


def size_of(
    tensors: Mapping[str, torch.Tensor], weights: Mapping[str, QuantizedWeight]
) -> CheckpointSize:
    """Bytes of a checkpoint's tensors, and of the same at 16 bits."""
    prefixes = tuple(f"{name}." for name in weights)
    quantized = sum(t.nbytes for name, t in tensors.items() if name.startswith(prefixes))
    total = sum(tensor.nbytes for tensor in tensors.values())
    plain_count = sum(t.numel() for name, t in tensors.items() if not name.startswith(prefixes))
    wide = sum(weight.code_NK.numel() for weight in weights.values())
    wide += sum(w.bias_N.numel() for w in weights.values() if w.bias_N is not None)
    return CheckpointSize(
        total_bytes=total,
        quantized_bytes=quantized,
        plain_bytes=total - quantized,
        unquantized_bytes=2 * (plain_count + wide),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What goes into the folder beside the tensors."""

    files: tuple[Path, ...] = ()
    """Copied as they are: tokenizer, chat template, generation config."""
    texts: tuple[tuple[str, str], ...] = ()
    """(file name, contents): a model card, the run's report."""
    max_shard_bytes: int = MAX_SHARD_BYTES


def save_quantized(
    folder: Path | str,
    config: Mapping[str, Any],
    plain: Mapping[str, torch.Tensor],
    weights: Mapping[str, QuantizedWeight],
    recipe: Recipe,
    *,
    extras: Extras | None = None,
    overwrite: bool = False,
) -> CheckpointSize:
    """Write a quantized checkpoint folder, all or nothing; returns its size.

    config: the unquantized model's config.json; plain: its tensors by name (those of quantized
    linears are left out here). Raises: UserError when the folder exists or the disk refuses.
    """
    entry = config_of(recipe)
    extras = extras or Extras()
    tensors = checkpoint_tensors(plain, weights, entry)
    full = {**config, "quantization_config": entry.to_dict()}
    with atomic_dir(Path(folder), overwrite=overwrite) as temporary:
        _write_json(temporary / "config.json", full)
        _write_json(temporary / "quantize_config.json", entry.to_dict())
        _write_tensors(temporary, tensors, extras.max_shard_bytes)
        for file in extras.files:
            shutil.copyfile(file, temporary / file.name)
        for name, text in extras.texts:
            (temporary / name).write_text(text, encoding="utf-8")
    return size_of(tensors, weights)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], limit: int) -> None:
    shards = list(_shards(tensors, limit))
    names: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        contents = {name: tensors[name].detach().cpu().contiguous() for name in shard}
        try:
            save_file(contents, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"write: could not write {file}: {error}") from error
        names.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": names})


def _shards(tensors: Mapping[str, torch.Tensor], limit: int) -> Iterator[list[str]]:
    shard: list[str] = []
    held = 0
    for name, tensor in tensors.items():
        if shard and held + tensor.nbytes > limit:
            yield shard
            shard, held = [], 0
        shard.append(name)
        held += tensor.nbytes
    yield shard


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedCheckpoint:
    """A quantized folder read into memory."""

    config: dict[str, Any]
    """config.json as it is."""
    quantization: GPTQConfig
    plain: dict[str, torch.Tensor]
    """Tensors that belong to no quantized layer."""
    packed: dict[str, dict[str, torch.Tensor]]
    """Quantized layer's full name -> its tensors as stored."""

    def weights(self) -> dict[str, QuantizedWeight]:
        """Every quantized weight unpacked. Raises: UserError naming a layer that is damaged."""
        return {name: self._unpack(name) for name in self.packed}

    def _unpack(self, name: str) -> QuantizedWeight:
        layout = self.quantization.layout_of(name)
        if layout is None:
            raise UserError(
                f"checkpoint: {name} must be plain by its config, got packed tensors; "
                "the config does not describe these weights"
            )
        try:
            return layout.unpack(self.packed[name])
        except ValueError as error:
            raise UserError(f"checkpoint: {name}: {error}") from error


def read_quantization(folder: Path | str) -> tuple[dict[str, Any], GPTQConfig | None]:
    """(config.json, what it says of quantization); None for a plain checkpoint.

    Raises: UserError for an unreadable config or an unknown quant_method, by its name.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"checkpoint: could not read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"checkpoint: {path} must be JSON, got {error}; restore it") from error
    if not isinstance(config, dict):
        raise UserError(f"checkpoint: {path} must hold a JSON object; restore it")
    return config, detect(config, Path(folder))


def packed_layers(names: Iterable[str]) -> dict[str, bool]:
    """Quantized layers among tensor names -> whether they have a bias."""
    names = set(names)
    layers = sorted(n.removesuffix(".qweight") for n in names if n.endswith(".qweight"))
    return {layer: f"{layer}.bias" in names for layer in layers}


def load_quantized(folder: Path | str) -> QuantizedCheckpoint:
    """Read a quantized folder.

    Raises: UserError for a folder that is plain, damaged, or of an unknown quant_method.
    """
    folder = Path(folder)
    config, quantization = read_quantization(folder)
    if quantization is None:
        raise UserError(
            f"checkpoint: {folder} must be quantized, got a plain one; load it as a plain model"
        )
    tensors = dict(_read_tensors(folder))
    layers = packed_layers(tensors)
    packed: dict[str, dict[str, torch.Tensor]] = {layer: {} for layer in layers}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        owner, _, part = name.rpartition(".")
        (packed[owner] if owner in packed else plain)[part if owner in packed else name] = tensor
    return QuantizedCheckpoint(config=config, quantization=quantization, plain=plain, packed=packed)


def _read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"checkpoint: {folder} must hold safetensors, got none; pickled weights are not read"
        )
    if (folder / INDEX).is_file():
        files = _indexed_files(folder)
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118
                    yield name, handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"checkpoint: {file} must be whole safetensors, got {error}; fetch it again"
            ) from error


def _indexed_files(folder: Path) -> list[Path]:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"checkpoint: could not read {INDEX}: {error}; restore it") from error
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"checkpoint: {INDEX} must name files of {folder}, got {name!r}")
    return [folder / name for name in names]
