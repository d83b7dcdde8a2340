"""A Hugging Face folder, plain or quantized, as a model ready to run.

The decoder knows no quantization and the quantizer no decoder; here the two meet: the decoder is
built without memory, its quantized linears are put in place, the rest is assigned.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.core.dtypes import dtype_name, torch_dtype
from ridgeline.core.errors import UserError
from ridgeline.core.model_folder import check_model_folder
from ridgeline.kernels.w4a16.cpu import one_row_refusal
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import (
    assign_weights,
    load_config,
    load_hf_config,
    load_pretrained,
    skeleton,
)
from ridgeline.nn.tensorfile import TensorFolder
from ridgeline.nn.tokenizer import Tokenizer
from ridgeline.quant.checkpoint import packed_layers, read_quantization
from ridgeline.quant.linear import empty_linears, prepare_linears


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """A model with its tokenizer."""

    model: Decoder
    tokenizer: Tokenizer
    folder: Path
    weights: str
    """What the weights are stored as: "float16", "gptq 4-bit group 64"."""
    dtype: str
    """Of activations and plain weights."""
    device: torch.device


def open_model(
    folder: Path | str, dtype: str = "auto", device: str = "auto", *, prepare: bool = True
) -> OpenModel:
    """Load a folder to run it.

    prepare: lay quantized layers out for their kernels now (False: whoever joins layers does it).
    dtype auto: bfloat16 on a GPU, float32 on a CPU; device auto: the GPU where there is one.
    Raises: UserError for a folder that is incomplete, foreign or damaged, a GPU that is not here.
    """
    folder = Path(folder)
    check_model_folder(folder)
    where = choose_device(device)
    run_dtype = torch_dtype(choose_dtype(dtype, where))
    tokenizer = Tokenizer(folder)
    raw = load_hf_config(folder)
    if is_quantized(folder):
        model, weights = load_quantized(folder, run_dtype, where, prepare=prepare)
    else:
        model = load_pretrained(folder, dtype=run_dtype, device=where)
        weights = str(raw.get("torch_dtype") or raw.get("dtype") or dtype_name(run_dtype))
    model.eval().requires_grad_(False)
    return OpenModel(
        model=model,
        tokenizer=tokenizer,
        folder=folder,
        weights=weights,
        dtype=dtype_name(run_dtype),
        device=where,
    )


def is_quantized(folder: Path | str) -> bool:
    """Whether a folder's config declares quantized weights. Raises: UserError as open_model."""
    return read_quantization(folder)[1] is not None


def choose_device(name: str) -> torch.device:
    """auto: the GPU where there is one. Raises: UserError for a GPU that is not here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("model: no CUDA device is usable here; use --device cpu")
    return torch.device(name)


def run_dtype(folder: Path | str, name: str, device: torch.device) -> str:
    """choose_dtype for an engine: auto is bfloat16 on a CPU too for a folder of quantized layers
    that a fast kernel takes: the head, the largest matmul left, reads half the bytes then.

    Raises: UserError as open_model.
    """
    if name != "auto" or device.type != "cpu" or not is_quantized(folder):
        return choose_dtype(name, device)
    _, quantization = read_quantization(folder)
    tensors = TensorFolder(folder)
    layers = packed_layers(tensors.names)
    if quantization is None or not layers:
        return choose_dtype(name, device)
    layer, parts = min(layers.items())
    layout = quantization.layout_of(layer)
    if layout is None:
        return choose_dtype(name, device)
    try:
        weight = layout.unpack({part: tensors.get(f"{layer}.{part}") for part in parts})
    except (ValueError, TypeError) as error:
        raise UserError(f"checkpoint: {folder}: {layer}: {error}") from error
    return "float32" if one_row_refusal(weight, torch.bfloat16) else "bfloat16"


def choose_dtype(name: str, device: torch.device) -> str:
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    if name != "auto":
        return name
    return "bfloat16" if device.type == "cuda" else "float32"


def load_quantized(
    folder: Path, dtype: torch.dtype, device: torch.device, *, prepare: bool = True
) -> tuple[Decoder, str]:
    """The model of a quantized folder, every layer laid out for its kernel, and what it holds.

    Raises: UserError for a folder that is damaged or of an unknown method.
    """
    _, quantization = read_quantization(folder)
    assert quantization is not None, "open_model asks only for quantized folders"
    tensors = TensorFolder(folder)
    model = skeleton(load_config(folder), dtype)
    layers = packed_layers(tensors.names)
    if not layers:
        raise UserError(
            f"checkpoint: {folder} must hold packed weights as its config says, got none; "
            "the config does not describe these weights"
        )
    try:
        empty_linears(
            model, layers, quantization.layout_of, dtype=dtype, stored_shape=tensors.shape
        )
        assign_weights(model, tensors, device=device)
        if prepare:
            prepare_linears(model)
    except (ValueError, TypeError) as error:
        raise UserError(f"checkpoint: {folder}: {error}") from error
    layout = quantization.layout
    group = "whole rows" if layout.group_size is None else f"group {layout.group_size}"
    return model, f"{layout.method} {layout.bits}-bit {group}"
