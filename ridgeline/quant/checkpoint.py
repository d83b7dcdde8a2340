"""Quantized checkpoints as Hugging Face folders: written whole or not at all, read back bit for
bit, in any of the formats, and converted from one to another.

config.json carries quantization_config (GPTQ's quantize_config.json repeats it for older loaders);
tensors are safetensors, sharded when large; tokenizer files are copied. Nothing is unpickled and no
code of a checkpoint runs. The model object and its config belong to the caller: this file deals in
names and tensors.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ridgeline.core import progress
from ridgeline.core.dtypes import dtype_name
from ridgeline.core.errors import UserError
from ridgeline.core.files import atomic_dir
from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.contract import Quantization, WeightFormat
from ridgeline.formats.convert import SourceFacts, convert_tensors, target_layout
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.formats.gptq_config import GPTQConfig, LayerRule
from ridgeline.formats.registry import KEYS as CONFIG_KEYS
from ridgeline.formats.registry import describe, detect
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


def config_of(
    recipe: Recipe, layers: Iterable[str] = (), skipped: Iterable[str] = ()
) -> Quantization:
    """The config entry that describes a recipe's result.

    layers, skipped: full names of the quantized and of the plain linears; GPTQ states patterns
    instead. Raises: ValueError for exceptions that the format's config cannot state.
    """
    layout = recipe.layout
    if not isinstance(layout, GPTQFormat):
        return describe(layout, {name: _layout(recipe, name) for name in layers}, [*skipped])
    rules = tuple(
        LayerRule(
            pattern=f".*(?:{override.pattern})",
            skip=override.skip,
            bits=override.bits,
            group_size=override.group_size,
        )
        for override in recipe.overrides
    )
    is_gptq = recipe.solver == "gptq"
    return GPTQConfig(
        layout=layout,
        rules=rules,
        damping=recipe.gptq.damping if is_gptq else None,
        true_sequential=is_gptq,
        static_groups=is_gptq and recipe.gptq.order == "static",
        lm_head="lm_head" in set(layers),
    )


def _layout(source: Recipe | Quantization, name: str) -> WeightFormat:
    layout = source.layout_of(name)
    assert layout is not None, f"{name} is quantized but its config skips it"
    return layout


def plain_linears(plain: Mapping[str, torch.Tensor], quantized: Iterable[str]) -> list[str]:
    """Full names of linears that stay plain: matrices inside numbered blocks, and a head."""
    done = set(quantized)
    names = []
    for full, tensor in plain.items():
        name = full.removesuffix(".weight")
        inside = name == "lm_head" or any(part.isdigit() for part in name.split("."))
        if name != full and name not in done and inside and tensor.dim() == 2:
            names.append(name)
    return names


def without_quantized(
    plain: Mapping[str, torch.Tensor], quantized: Iterable[str]
) -> dict[str, torch.Tensor]:
    """A model's tensors but those of its quantized linears."""
    replaced = {f"{name}.{part}" for name in quantized for part in ("weight", "bias")}
    return {name: tensor for name, tensor in plain.items() if name not in replaced}


def size_of(
    plain: Mapping[str, torch.Tensor],
    packed: Mapping[str, Mapping[str, torch.Tensor]],
    quantization: Quantization,
) -> CheckpointSize:
    """Bytes of a checkpoint's tensors, and of the same at 16 bits."""
    quantized = sum(tensor.nbytes for parts in packed.values() for tensor in parts.values())
    beside = sum(tensor.nbytes for tensor in plain.values())
    wide = sum(tensor.numel() for tensor in plain.values())
    for name, parts in packed.items():
        n, k = _layout(quantization, name).shape_of(parts)
        wide += n * k + (parts["bias"].numel() if "bias" in parts else 0)
    return CheckpointSize(
        total_bytes=quantized + beside,
        quantized_bytes=quantized,
        plain_bytes=beside,
        unquantized_bytes=2 * wide,
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
    linears are left out here). Raises: UserError when the folder exists or the disk refuses;
    ValueError when a weight is not of the recipe's form or the form's config cannot state it.
    """
    rest = without_quantized(plain, weights)
    entry = config_of(recipe, weights, plain_linears(rest, weights))
    checkpoint = QuantizedCheckpoint(
        config=dict(config),
        quantization=entry,
        plain=rest,
        packed={name: _layout(entry, name).pack(weight) for name, weight in weights.items()},
    )
    return write_checkpoint(folder, checkpoint, extras=extras, overwrite=overwrite)


def write_checkpoint(
    folder: Path | str,
    checkpoint: QuantizedCheckpoint,
    *,
    extras: Extras | None = None,
    overwrite: bool = False,
) -> CheckpointSize:
    """Write packed tensors and their config as a folder, all or nothing; returns its size.

    Raises: UserError when the folder exists or the disk refuses.
    """
    extras = extras or Extras()
    config = {k: v for k, v in checkpoint.config.items() if k not in CONFIG_KEYS}
    tensors = dict(checkpoint.plain)
    for name, parts in checkpoint.packed.items():
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    stored = [Stored.of(name, tensor) for name, tensor in tensors.items()]
    write_stored(
        folder, config, checkpoint.quantization, stored, extras=extras, overwrite=overwrite
    )
    return size_of(checkpoint.plain, checkpoint.packed, checkpoint.quantization)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor to be written, read only when its shard is."""

    name: str
    num_bytes: int
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Stored:
        """A tensor that is in memory."""
        return cls(name=name, num_bytes=tensor.nbytes, read=lambda: tensor)


def write_stored(
    folder: Path | str,
    config: Mapping[str, Any],
    quantization: Quantization,
    stored: list[Stored],
    *,
    extras: Extras,
    overwrite: bool = False,
) -> None:
    """Write a quantized folder with one shard's tensors in memory at a time, all or nothing.

    config: config.json without an entry for quantization. Raises: UserError as write_checkpoint.
    """
    entry = quantization.to_dict()
    if "lm_head" in packed_layers(each.name for each in stored):
        config = {**config, "tie_word_embeddings": False}  # the head has its own weight now
    with atomic_dir(Path(folder), overwrite=overwrite) as temporary:
        _write_json(temporary / "config.json", {**config, "quantization_config": entry})
        if quantization.side_file:
            _write_json(temporary / quantization.side_file, entry)
        _write_tensors(temporary, stored, extras.max_shard_bytes)
        for file in extras.files:
            shutil.copyfile(file, temporary / file.name)
        for name, text in extras.texts:
            (temporary / name).write_text(text, encoding="utf-8")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_tensors(folder: Path, stored: list[Stored], limit: int) -> None:
    shards = list(_shards(stored, limit))
    names: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        contents = {each.name: each.read().detach().cpu().contiguous() for each in shard}
        try:
            save_file(contents, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"write: could not write {file}: {error}") from error
        names.update(dict.fromkeys(contents, file))
    if len(shards) > 1:
        total = sum(each.num_bytes for each in stored)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": names})


def _shards(stored: list[Stored], limit: int) -> Iterator[list[Stored]]:
    shard: list[Stored] = []
    held = 0
    for each in stored:
        if shard and held + each.num_bytes > limit:
            yield shard
            shard, held = [], 0
        shard.append(each)
        held += each.num_bytes
    yield shard


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedCheckpoint:
    """A quantized folder read into memory."""

    config: dict[str, Any]
    """config.json as it is."""
    quantization: Quantization
    plain: dict[str, torch.Tensor]
    """Tensors that belong to no quantized layer."""
    packed: dict[str, dict[str, torch.Tensor]]
    """Quantized layer's full name -> its tensors as stored."""

    def weights(self) -> dict[str, QuantizedWeight]:
        """Every quantized weight unpacked. Raises: UserError naming a layer that is damaged."""
        return {name: self._unpack(name) for name in self.packed}

    def layout_of(self, name: str) -> WeightFormat:
        """A quantized layer's form. Raises: UserError where the config says it is plain."""
        layout = self.quantization.layout_of(name)
        if layout is None:
            raise UserError(
                f"checkpoint: {name} must be plain by its config, got packed tensors; "
                "the config does not describe these weights"
            )
        return layout

    def _unpack(self, name: str) -> QuantizedWeight:
        layout = self.layout_of(name)
        try:
            return layout.unpack(self.packed[name])
        except ValueError as error:
            raise UserError(f"checkpoint: {name}: {error}") from error


def read_quantization(folder: Path | str) -> tuple[dict[str, Any], Quantization | None]:
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


_CODES = (".qweight", ".weight_packed")
"""Ends of names of the tensors that make a layer quantized, in any format."""


def packed_layers(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Quantized layers among tensor names -> names of their tensors."""
    names = list(names)
    layers = sorted(n.rpartition(".")[0] for n in names if n.endswith(_CODES))
    parts: dict[str, set[str]] = {layer: set() for layer in layers}
    for name in names:
        owner, _, part = name.rpartition(".")
        if owner in parts:
            parts[owner].add(part)
    return {layer: frozenset(held) for layer, held in parts.items()}


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


def convert_checkpoint(
    source: QuantizedCheckpoint, target: str, *, lossy: bool = False
) -> QuantizedCheckpoint:
    """A quantized checkpoint in another format: gptq, awq or compressed-tensors.

    Every bit of codes, scales and zero points is kept; what the target cannot hold is refused with
    the layer and the reason unless `lossy`. The source's packed tensors are given up on the way.
    Raises: UserError for damaged tensors and for what the target cannot hold.
    """
    facts = _facts(source)
    if facts.desc_act and target == "compressed-tensors":
        progress.say(
            "convert: act-order is written as actorder group, which compressed-tensors 0.19 and "
            "later refuse to load; ridgeline reads it"
        )
    layouts: dict[str, WeightFormat] = {}
    packed: dict[str, dict[str, torch.Tensor]] = {}
    with progress.task(f"convert to {target}", len(source.packed), "layers") as advance:
        for name in list(source.packed):
            layout = source.layout_of(name)
            try:
                layouts[name] = target_layout(layout, target, facts)
                tensors = source.packed.pop(name)
                packed[name] = convert_tensors(tensors, layout, layouts[name], lossy=lossy)
            except ValueError as error:
                raise UserError(f"checkpoint: {name}: {error}") from error
            advance(1)
    common = Counter(layouts.values()).most_common(1)[0][0]
    try:
        entry = describe(common, layouts, plain_linears(source.plain, layouts))
    except ValueError as error:
        raise UserError(f"checkpoint: {error}") from error
    return QuantizedCheckpoint(
        config=source.config, quantization=entry, plain=source.plain, packed=packed
    )


def _facts(source: QuantizedCheckpoint) -> SourceFacts:
    """What the layers have in common, from their tensors where the config cannot say."""
    if not source.packed:
        raise UserError("checkpoint: quantized layers must be there to convert, got none")
    symmetric, desc_act, scale_dtype = True, False, None
    for name, tensors in source.packed.items():
        layout = source.layout_of(name)
        desc_act |= layout.desc_act
        try:
            layout.check_tensors(tensors)
            symmetric = symmetric and layout.zeros_of(tensors) is None
        except ValueError as error:
            raise UserError(f"checkpoint: {name}: {error}") from error
        scales = tensors.get("scales", tensors.get("weight_scale"))
        assert scales is not None, "check_tensors saw them"
        scale_dtype = scale_dtype or dtype_name(scales.dtype)
    return SourceFacts(symmetric=symmetric, desc_act=desc_act, scale_dtype=scale_dtype or "float16")


def _read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = [p.name for end in ("*.pt", "*.bin", "*.pth") for p in sorted(folder.glob(end))]
        got = pickles[0] if pickles else "none"
        raise UserError(
            f"checkpoint: {folder} must hold safetensors, got {got}; pickles can run code and are "
            "not read: save the model as safetensors with the library that wrote it "
            "(llm-awq's .pt: through AutoAWQ's save_quantized)"
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
