"""Hugging Face folders in and out: config.json, safetensors (single or sharded), tokenizer files.

A round trip is bitwise: the same tensors under the same names in the same dtype. A folder appears
whole or not at all. Quantized checkpoints are put together by whoever knows both rooms: read
`load_config`, build `skeleton`, replace linears, then `assign_weights` from a `TensorFolder`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ridgeline.core import progress
from ridgeline.core.dtypes import dtype_name, torch_dtype
from ridgeline.core.errors import UserError
from ridgeline.core.files import atomic_dir
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.tensorfile import INDEX, SINGLE, TensorFolder, one_line, read_json

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
GENERATION_CONFIG = "generation_config.json"
MAX_SHARD_BYTES = 5 * 10**9
NOT_WEIGHTS = (".rotary_emb.inv_freq",)
"""Ends of names that old checkpoints carry and that follow from the config."""


def load_hf_config(folder: Path | str) -> dict[str, Any]:
    """The raw config.json. Raises: UserError for a missing or malformed file."""
    return read_json(Path(folder) / "config.json")


def load_config(folder: Path | str) -> DecoderConfig:
    """The decoder that a folder's config.json describes.

    Raises: UserError, naming the file, for whatever DecoderConfig.from_hf refuses.
    """
    try:
        return DecoderConfig.from_hf(load_hf_config(folder))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UserError(f"{Path(folder) / 'config.json'}: {one_line(error)}") from error


def load_generation_config(folder: Path | str) -> dict[str, Any]:
    """generation_config.json, or {} where there is none."""
    path = Path(folder) / GENERATION_CONFIG
    return read_json(path) if path.is_file() else {}


def skeleton(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    """The model with shapes and no memory (meta device): replace modules, then assign weights."""
    return Decoder(config, device="meta", dtype=dtype)


def open_weights(folder: Path | str, config: DecoderConfig) -> TensorFolder:
    """The tensors of an unquantized checkpoint, checked by name, for who reads them one at a time.

    Raises: UserError for a folder that is incomplete, foreign, pickled or quantized.
    """
    _refuse_quantized(folder, load_hf_config(folder))
    tensors = TensorFolder(folder)
    found = {name for name in tensors if not name.endswith(NOT_WEIGHTS)}
    if config.tie_embeddings:
        _check_tied_copy(tensors)
        found.discard("lm_head.weight")
    expected = state_tensors(skeleton(config, torch.float32))
    _check_same(set(expected), found, folder)
    for name, tensor in expected.items():
        _check_shape(name, tuple(tensor.shape), tensors)
    return tensors


def _refuse_quantized(folder: Path | str, raw: dict[str, Any]) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UserError(
            f"checkpoint: {folder} must hold plain weights, got a {method} checkpoint; "
            "load it as a quantized model"
        )


def load_pretrained(
    folder: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Decoder:
    """Load an unquantized checkpoint; dtype None keeps the one that config.json states.

    Raises: UserError for a folder that is incomplete, foreign, pickled or quantized.
    """
    raw = load_hf_config(folder)
    config = load_config(folder)
    _refuse_quantized(folder, raw)
    tensors = TensorFolder(folder)
    model = skeleton(config, dtype or _stored_dtype(raw, tensors))
    assign_weights(model, tensors, device=device)
    return model


def assign_weights(
    model: Decoder, tensors: TensorFolder, *, device: torch.device | str = "cpu"
) -> None:
    """Give every parameter and persistent buffer of the model its tensor of the checkpoint.

    A floating parameter takes its own dtype (the skeleton's), any other tensor the file's.
    Raises: UserError naming missing tensors, tensors of the checkpoint without a place (an option
    silently lost would be worse), shapes that differ.
    """
    expected = set(model.state_dict())
    found = {name for name in tensors if not name.endswith(NOT_WEIGHTS)}
    if model.tied:
        _check_tied_copy(tensors)
        expected.discard("lm_head.weight")
        found.discard("lm_head.weight")
    _check_same(expected, found, tensors.folder)
    with progress.task("load weights", len(expected), "tensors") as advance:
        for name in sorted(expected):
            _assign(model, name, tensors, device)
            advance(1)
    model.tie_weights()


def check_names(config: DecoderConfig, names: Iterable[str], source: Path | str) -> None:
    """Whether these are the tensors of an unquantized model.

    Raises: UserError naming what is missing or has no place.
    """
    model = skeleton(config, torch.float32)
    expected = set(model.state_dict()) - ({"lm_head.weight"} if model.tied else set())
    _check_same(expected, set(names), source)


def _check_same(expected: set[str], found: set[str], source: Path | str) -> None:
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if missing:
        raise UserError(
            f"checkpoint: {source} must hold every tensor of the model, got none for "
            f"{_some(missing)}; fetch the whole checkpoint"
        )
    if unexpected:
        raise UserError(
            f"checkpoint: {source} must hold only tensors of the model, got "
            f"{_some(unexpected)}; its configuration does not describe these weights"
        )


def _assign(
    model: Decoder, full_name: str, tensors: TensorFolder, device: torch.device | str
) -> None:
    owner, _, name = full_name.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, name)
    _check_shape(full_name, tuple(old.shape), tensors)
    tensor = tensors.get(full_name, device)
    if isinstance(old, nn.Parameter):
        tensor = tensor.to(old.dtype) if tensor.is_floating_point() else tensor
        setattr(module, name, nn.Parameter(tensor, requires_grad=old.requires_grad))
    else:
        setattr(module, name, tensor)


def _check_shape(name: str, shape: tuple[int, ...], tensors: TensorFolder) -> None:
    if shape != tensors.shape(name):
        raise UserError(
            f"checkpoint: {name} must have shape {list(shape)}, got "
            f"{list(tensors.shape(name))}; config.json does not describe these weights"
        )


def _check_tied_copy(tensors: TensorFolder) -> None:
    """A tied checkpoint may repeat the table as lm_head.weight; two different tables are no tie."""
    if "lm_head.weight" not in tensors or "model.embed_tokens.weight" not in tensors:
        return
    if not torch.equal(tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")):
        raise UserError(
            "checkpoint: lm_head.weight must equal model.embed_tokens.weight with "
            "tie_word_embeddings, got another; set tie_word_embeddings to false in config.json"
        )


def _stored_dtype(raw: dict[str, Any], tensors: TensorFolder) -> torch.dtype:
    """dtype that config.json states, else the embedding's in the file."""
    name = raw.get("dtype") or raw.get("torch_dtype")
    if name is None:
        return tensors.get("model.embed_tokens.weight").dtype
    try:
        return torch_dtype(name)
    except ValueError as error:
        raise UserError(f"{tensors.folder / 'config.json'}: {error}") from error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def state_tensors(model: Decoder) -> dict[str, torch.Tensor]:
    """What is saved of a model: its state dict without the copy of a tied table."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.tied:
        del tensors["lm_head.weight"]
    return tensors


def save_pretrained(
    model: Decoder,
    folder: Path | str,
    *,
    tokenizer_from: Path | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write a Hugging Face folder, all or nothing.

    tokenizer_from: a folder whose tokenizer and generation files are copied along.
    Raises: UserError when the folder exists (and overwrite is False) or the disk refuses.
    """
    tensors = state_tensors(model)
    floating = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    config = model.config.to_hf() | {"torch_dtype": dtype_name(floating)}
    write_folder(
        folder,
        config,
        tensors.items(),
        companions=tokenizer_from,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
    )


def write_folder(
    folder: Path | str,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    companions: Path | str | Callable[[Path], None] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write config.json, generation_config.json and the tensors, consumed one shard at a time.

    companions: a folder to copy tokenizer and generation files from, or a function that writes
    them into the new folder. Raises: UserError as `save_pretrained`.
    """
    with atomic_dir(folder, overwrite=overwrite) as temporary:
        _write_json(temporary / "config.json", config)
        _write_json(temporary / GENERATION_CONFIG, _generation_config(config))
        if callable(companions):
            companions(temporary)
        elif companions is not None:
            copy_tokenizer(companions, temporary)
        try:
            _write_shards(temporary, tensors, max_shard_bytes)
        except SafetensorError as error:
            raise UserError(f"write: could not write {folder}: {one_line(error)}") from error


def copy_tokenizer(source: Path | str, target: Path) -> None:
    """Copy tokenizer and generation files that `source` has."""
    for name in (*TOKENIZER_FILES, GENERATION_CONFIG):
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, target / name)


def _write_shards(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> None:
    shards: list[dict[str, torch.Size]] = []
    pending: dict[str, torch.Tensor] = {}
    pending_bytes = total_bytes = 0

    def flush() -> None:
        nonlocal pending, pending_bytes
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append({name: tensor.shape for name, tensor in pending.items()})
        pending, pending_bytes = {}, 0

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + num_bytes > max_shard_bytes:
            flush()
        pending[name] = tensor.contiguous()
        pending_bytes += num_bytes
        total_bytes += num_bytes
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, held in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / name)
        weight_map |= dict.fromkeys(held, name)
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    _write_json(folder / INDEX, index)


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in keys if config.get(key) is not None}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
